//! Plans transfers between two lists: pairs the entries, and sorts the pairs by their regions and by the rails that
//! reach them.

use std::collections::HashMap;
use std::ops::Range;
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
pub(crate) fn plan(
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
    let entries = (0..count).map(|position| {
        let local = local.entries().get(local_selection.at(position));
        (local, remote.entries().get(remote_selection.at(position)))
    });
    planner.parts(PairedEntries::new(entries, local.regions().len(), name)?)
}

/// Refuses a transfer of too many requests.
fn check_requests(requests: u64, operation: &'static str) -> Result<()> {
    if requests <= MAX_REQUESTS {
        return Ok(());
    }
    let why = format!(
        "the transfer takes {requests} entries or requests, at most {MAX_REQUESTS}: use several transfers"
    );
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
    /// The entries, one pair after the other: the offsets in the local and in the remote region, and the length. The
    /// entries of a pair are in the order of the transfer, unless `sort_by_remote` has sorted them.
    entries: Vec<(u64, u64, u64)>,
    /// The length of the longest entry.
    longest: u64,
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
        let mut counts: Vec<usize> = Vec::new();
        let mut number_of_pair = HashMap::new();
        // For each local region, the remote region that it was last paired with, and the number of that pair. Most
        // stay with one remote region.
        let mut last_pair = vec![(u32::MAX, 0); local_regions];
        let (mut longest, mut is_sorted, mut last) = (0, true, 0);
        let mut unsorted = Vec::with_capacity(entries.len());
        let mut pair_of_entry: Vec<u32> = Vec::with_capacity(entries.len());
        for (position, (local, remote)) in entries.enumerate() {
            if local.len != remote.len {
                return Err(different(position, local.len, remote.len, operation));
            }
            let known = &mut last_pair[local.region as usize];
            if known.0 != remote.region {
                let regions = (local.region, remote.region);
                let pair = *number_of_pair.entry(regions).or_insert_with(|| {
                    pairs.push(regions);
                    counts.push(0);
                    pairs.len() as u32 - 1
                });
                *known = (remote.region, pair);
            }
            let pair = known.1;
            counts[pair as usize] += 1;
            longest = local.len.max(longest);
            is_sorted &= pair >= last;
            last = pair;
            unsorted.push((local.offset, remote.offset, local.len));
            pair_of_entry.push(pair);
        }
        // Where each pair begins.
        let begins = counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)));
        let mut ends: Vec<usize> = begins.collect();
        if is_sorted {
            ends.iter_mut().zip(&counts).for_each(|(end, count)| *end += count);
            return Ok(Self { pairs, ends, entries: unsorted, longest });
        }
        let mut entries = vec![(0, 0, 0); unsorted.len()];
        for (entry, pair) in unsorted.into_iter().zip(pair_of_entry) {
            let end = &mut ends[pair as usize];
            entries[*end] = entry;
            *end += 1;
        }
        Ok(Self { pairs, ends, entries, longest })
    }

    /// The entries of a pair.
    fn of(&self, pair: usize) -> &[(u64, u64, u64)] {
        &self.entries[self.range(pair)]
    }

    /// Sorts the entries of a pair by their offsets in the remote region.
    fn sort_by_remote(&mut self, pair: usize) {
        let range = self.range(pair);
        self.entries[range].sort_unstable_by_key(|(_, remote, _)| *remote);
    }

    fn range(&self, pair: usize) -> Range<usize> {
        pair.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[pair]
    }
}

#[cold]
fn different(position: usize, local: u64, remote: u64, operation: &'static str) -> Error {
    let why = format!(
        "the local entry at position {position} has {local} bytes, and the remote entry has {remote}; the two entries of a pair need the same length"
    );
    Error::new(ErrorKind::InvalidRequest, operation, why)
}

impl Planner<'_> {
    /// One part for each set of rails, with all pairs that these rails reach.
    fn parts(&self, mut paired: PairedEntries) -> Result<Vec<Part>> {
        let mut reaches: Vec<(Reach, Vec<usize>)> = Vec::new();
        for (pair, (local, remote)) in paired.pairs.iter().enumerate() {
            let reach = self.check(&self.local[*local as usize], &self.remote[*remote as usize])?;
            match reaches.iter_mut().find(|(known, _)| *known == reach) {
                Some((_, pairs)) => pairs.push(pair),
                None => reaches.push((reach, vec![pair])),
            }
        }
        reaches.into_iter().map(|(reach, pairs)| self.part(&reach, &pairs, &mut paired)).collect()
    }

    /// Checks a pair of regions. Returns the rails that reach both.
    fn check(&self, local: &Region, remote: &RemoteRegion) -> Result<Reach> {
        let access = if self.kind == WorkKind::Read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        local.0.check_usable(self.name)?;
        remote.0.check(0, 0, access, self.name)?;
        self.peer.link_to(local, &remote.0, self.options.path_policy, self.name)?;
        let transport = remote.0.transport;
        let registered = local.0.regions[transport].iter().zip(&remote.0.imports);
        let rails = registered.map(|(local, remote)| local.is_some() && remote.is_some()).collect();
        Ok(Reach { transport, rails })
    }

    /// The part of the pairs that the rails of `reach` carry.
    fn part(&self, reach: &Reach, pairs: &[usize], paired: &mut PairedEntries) -> Result<Part> {
        let operation = if self.kind == WorkKind::Read { Operations::READ } else { Operations::WRITE };
        let link = self.peer.0.first_link_of(reach.transport);
        let caps = link.capabilities_for(operation, self.options.imm, self.name)?;
        let count = pairs.iter().map(|pair| paired.of(*pair).len()).sum();
        let rule = self.rule(caps, pairs, paired)?;
        let mut list = ListPlan::with_capacity(count, false);
        for pair in pairs {
            let (local, remote) = paired.pairs[*pair];
            let (local, remote) = (&self.local[local as usize], &self.remote[remote as usize]);
            let prefers_ascending =
                || remote.0.imports.iter().flatten().any(|import| import.prefers_ascending());
            // With an imm each, the kernel is called for each entry anyway.
            if matches!(rule, PieceRule::Merge { .. }) && prefers_ascending() {
                paired.sort_by_remote(*pair);
            }
            let entries = paired.of(*pair).iter().copied();
            list.push_segment(Arc::clone(&local.0), Arc::clone(&remote.0), rule, entries);
        }
        let (local, remote) = paired.pairs[pairs[0]];
        let (local, remote) = (&self.local[local as usize], &self.remote[remote as usize]);
        let device_memory = list
            .segments()
            .iter()
            .all(|segment| segment.local.device_memory_mask != 0 || segment.remote.device_memory);
        let shape = Shape::List(Arc::new(list));
        let work = self.peer.work(self.kind, shape, local, remote, self.options)?;
        Ok(Part { transport: reach.transport, work: Work { device_memory, ..work } })
    }

    /// How the entries become pieces.
    fn rule(&self, caps: &Capabilities, pairs: &[usize], paired: &PairedEntries) -> Result<PieceRule> {
        let lengths = pairs.iter().flat_map(|pair| paired.of(*pair)).map(|(_, _, len)| *len);
        if self.options.imm.is_none() || self.options.imm_mode == ImmMode::Last {
            let chunk = caps.chunk.min(caps.max_write).max(1);
            if paired.longest > chunk {
                let requests = lengths.map(|len| len.div_ceil(chunk));
                check_requests(requests.fold(0, u64::saturating_add), self.name)?;
            }
            return Ok(PieceRule::Merge { chunk });
        }
        if paired.longest > caps.max_write
            && let Some(longest) = lengths.max().filter(|longest| *longest > caps.max_write)
        {
            let why = format!(
                "an entry has {longest} bytes; with an imm per request this transport moves at most {} at once",
                caps.max_write
            );
            return Err(Error::new(ErrorKind::TooLarge, self.name, why));
        }
        Ok(PieceRule::PerEntry)
    }
}
