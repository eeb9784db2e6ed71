//! Plans transfers between two lists: pairs the entries, and sorts the pairs by their regions and by the rails that
//! reach them.

use std::collections::HashMap;
use std::sync::Arc;

use super::entries::Entry;
use super::{LocalList, RemoteList, Selection};
use crate::engine::Work;
use crate::engine::index::TransportIndex;
use crate::engine::plan::{ListPlan, PieceRule, Shape};
use crate::prepared::Part;
use crate::spi::{Capabilities, Operations, WorkKind};
use crate::{Access, Error, ErrorKind, ImmMode, Peer, Region, RemoteRegion, Result, WriteOptions};

/// The most requests of one transfer. Their plan takes 24 bytes each, so 1.5 GiB.
const MAX_REQUESTS: u64 = 1 << 26;

/// Plans a transfer between the selected entries of two lists. Returns one part for each set of rails.
pub(super) fn plan(
    peer: &Peer,
    kind: WorkKind,
    (local, local_selection): (&LocalList, Selection<'_>),
    (remote, remote_selection): (&RemoteList, Selection<'_>),
    options: &WriteOptions,
) -> Result<Vec<Part>> {
    let name = if kind == WorkKind::Read { "read_list" } else { "write_list" };
    let count = local_selection.count(local.entries().len(), "local", name)?;
    let remote_count = remote_selection.count(remote.entries().len(), "remote", name)?;
    if count == 0 || count != remote_count {
        let why = format!(
            "{count} local and {remote_count} remote entries are selected; select the same number on both sides, at least one"
        );
        return Err(Error::new(ErrorKind::InvalidRequest, name, why));
    }
    check_requests(count as u64, name)?;
    let planner = Planner { peer, kind, local: local.regions(), remote: remote.regions(), options, name };
    let (mut local_run, mut remote_run) = (0, 0);
    let entries = (0..count).map(|position| {
        let local = local.entries().get(local_selection.at(position), &mut local_run);
        (local, remote.entries().get(remote_selection.at(position), &mut remote_run))
    });
    planner.parts(PairedEntries::new(entries, local.regions().len(), name)?)
}

/// Refuses a transfer of too many requests.
fn check_requests(requests: u64, operation: &'static str) -> Result<()> {
    if requests <= MAX_REQUESTS {
        return Ok(());
    }
    let why =
        format!("the transfer takes {requests} requests, at most {MAX_REQUESTS}: use several transfers");
    Err(Error::new(ErrorKind::TooLarge, operation, why))
}

/// What the planning of a transfer needs.
struct Planner<'a> {
    peer: &'a Peer,
    kind: WorkKind,
    local: &'a [Region],
    remote: &'a [RemoteRegion],
    options: &'a WriteOptions,
    name: &'static str,
}

/// The entries of a transfer, by the pair of regions that they lie in.
struct PairedEntries {
    /// The numbers of the local and of the remote region of each pair, in the order of their first entries.
    pairs: Vec<(u32, u32)>,
    /// The index in `entries` behind the last entry of each pair.
    ends: Vec<usize>,
    /// The entries, one pair after the other. The entries of a pair are in the order of the transfer.
    entries: Vec<PairedEntry>,
}

#[derive(Clone, Copy)]
struct PairedEntry {
    local: u64,
    remote: u64,
    len: u64,
}

/// The rails that reach both regions of a pair.
#[derive(PartialEq, Eq)]
struct Reach {
    transport: TransportIndex,
    rails: Vec<bool>,
}

impl PairedEntries {
    /// Pairs the entries of both sides. `local_regions` is the number of local regions.
    ///
    /// # Errors
    /// `InvalidRequest` if the entries of a pair have different lengths.
    fn new(
        entries: impl ExactSizeIterator<Item = (Entry, Entry)>,
        local_regions: usize,
        operation: &'static str,
    ) -> Result<Self> {
        let mut pairs: Vec<(u32, u32)> = Vec::new();
        let mut number_of_pair = HashMap::new();
        // For each local region, the number of the pair that it was in last: most stay with one remote region.
        let mut last_pair: Vec<Option<u32>> = vec![None; local_regions];
        let mut counts: Vec<usize> = Vec::new();
        let mut drafts = Vec::with_capacity(entries.len());
        for (position, (local, remote)) in entries.enumerate() {
            if local.len != remote.len {
                let why = format!(
                    "the local entry at position {position} has {} bytes, and the remote entry has {}; the entries of a pair need the same length",
                    local.len, remote.len
                );
                return Err(Error::new(ErrorKind::InvalidRequest, operation, why));
            }
            let regions = (local.region, remote.region);
            let known = last_pair[local.region as usize].filter(|pair| pairs[*pair as usize] == regions);
            let pair = known.unwrap_or_else(|| {
                *number_of_pair.entry(regions).or_insert_with(|| {
                    pairs.push(regions);
                    counts.push(0);
                    pairs.len() as u32 - 1
                })
            });
            last_pair[local.region as usize] = Some(pair);
            counts[pair as usize] += 1;
            drafts.push((pair, PairedEntry { local: local.offset, remote: remote.offset, len: local.len }));
        }
        // The index of the next entry of each pair, then the index behind its last one.
        let mut ends: Vec<usize> =
            counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count))).collect();
        let mut sorted = vec![PairedEntry { local: 0, remote: 0, len: 0 }; drafts.len()];
        for (pair, entry) in drafts {
            let at = &mut ends[pair as usize];
            sorted[*at] = entry;
            *at += 1;
        }
        Ok(Self { pairs, ends, entries: sorted })
    }

    /// The entries of a pair.
    fn of(&self, pair: usize) -> &[PairedEntry] {
        let start = pair.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.entries[start..self.ends[pair]]
    }
}

impl Planner<'_> {
    /// One part for each set of rails, with all pairs that these rails reach.
    fn parts(&self, paired: PairedEntries) -> Result<Vec<Part>> {
        let mut reaches: Vec<(Reach, Vec<usize>)> = Vec::new();
        for (pair, (local, remote)) in paired.pairs.iter().enumerate() {
            let reach = self.check(&self.local[*local as usize], &self.remote[*remote as usize])?;
            match reaches.iter_mut().find(|(known, _)| *known == reach) {
                Some((_, pairs)) => pairs.push(pair),
                None => reaches.push((reach, vec![pair])),
            }
        }
        reaches.into_iter().map(|(reach, pairs)| self.part(&reach, &pairs, &paired)).collect()
    }

    /// Checks a pair of regions. Returns the rails that reach both.
    fn check(&self, local: &Region, remote: &RemoteRegion) -> Result<Reach> {
        let access = if self.kind == WorkKind::Read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        local.0.check_usable(self.name)?;
        remote.0.check(0, 0, access, self.name)?;
        self.peer.link_to(local, &remote.0, self.name)?;
        let transport = remote.0.transport;
        let registered = local.0.regions[transport].iter().zip(&remote.0.imports);
        let rails = registered.map(|(local, remote)| local.is_some() && remote.is_some()).collect();
        Ok(Reach { transport, rails })
    }

    /// The part of the pairs that the rails of `reach` carry.
    fn part(&self, reach: &Reach, pairs: &[usize], paired: &PairedEntries) -> Result<Part> {
        let operation = if self.kind == WorkKind::Read { Operations::READ } else { Operations::WRITE };
        let link = self.peer.0.first_link_of(reach.transport);
        let caps = link.capabilities_for(operation, self.options.imm, self.name)?;
        let count = pairs.iter().map(|pair| paired.of(*pair).len()).sum();
        let rule = self.rule(caps, pairs, paired)?;
        let mut list = ListPlan::with_capacity(count, false);
        for pair in pairs {
            let (local, remote) = paired.pairs[*pair];
            let (local, remote) = (&self.local[local as usize], &self.remote[remote as usize]);
            let entries = paired.of(*pair).iter().map(|entry| (entry.local, entry.remote, entry.len));
            list.push_segment(Arc::clone(&local.0), Arc::clone(&remote.0), rule, entries);
        }
        let (local, remote) = paired.pairs[pairs[0]];
        let (local, remote) = (&self.local[local as usize], &self.remote[remote as usize]);
        let device_memory = list
            .segments()
            .iter()
            .all(|segment| segment.local.device_memory_mask != 0 || segment.remote.device_memory);
        let work = self.options.work(Shape::List(Arc::new(list)), local, remote);
        Ok(Part { transport: reach.transport, work: Work { kind: self.kind, device_memory, ..work } })
    }

    /// How the entries become pieces.
    fn rule(&self, caps: &Capabilities, pairs: &[usize], paired: &PairedEntries) -> Result<PieceRule> {
        let lengths = pairs.iter().flat_map(|pair| paired.of(*pair)).map(|entry| entry.len);
        if self.options.imm.is_none() || self.options.imm_mode == ImmMode::Last {
            let chunk = caps.chunk.min(caps.max_write).max(1);
            let requests = lengths.map(|len| len.div_ceil(chunk)).fold(0, u64::saturating_add);
            check_requests(requests, self.name)?;
            return Ok(PieceRule::Merge { chunk });
        }
        let longest = lengths.max().unwrap_or(0);
        if longest > caps.max_write {
            let why = format!(
                "an entry has {longest} bytes; with an imm per request this transport moves at most {} at once",
                caps.max_write
            );
            return Err(Error::new(ErrorKind::TooLarge, self.name, why));
        }
        Ok(PieceRule::PerEntry)
    }
}
