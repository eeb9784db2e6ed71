//! Lists: entries of many regions, chosen by index, in one operation.

use transport_core::spi::Operations;
use transport_core::{
    Access, ErrorKind, ImmMode, LocalList, Op, ReadOptions, RemoteList, RemoteRegion, Selection, WriteOptions,
};

use crate::backend_under_test::Variant;
use crate::check::{TestResult, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, LIMIT, permutation};
use crate::sim_harness::{Options, SimHarness, SimPair};
use crate::trial::{ALL_PATHS, Trial, TrialContext};

const IMMS: Operations = Operations::WRITE_IMM;

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("lists::written_at_random", |context| at_random(context, Direction::Write)).on(ALL_PATHS),
    Trial::new("lists::read_at_random", |context| at_random(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("lists::written_by_index", |context| by_index(context, Direction::Write)).on(ALL_PATHS),
    Trial::new("lists::read_by_index", |context| by_index(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("lists::neighbours_share_requests", |context| neighbours(context, Direction::Write))
        .on(ALL_PATHS),
    Trial::new("lists::neighbours_share_reads", |context| neighbours(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("lists::large_entries_are_cut", large_entries).on(ALL_PATHS),
    Trial::new("lists::imms_come_last", imms_come_last).on(ALL_PATHS).needs(IMMS),
    Trial::new("lists::imms_per_entry", imms_per_entry).on(ALL_PATHS).needs(IMMS),
    Trial::new("lists::regions_of_different_rails", different_rails).on(ALL_PATHS).rails(2).needs(IMMS),
    Trial::new("lists::prepared", prepared).on(ALL_PATHS).needs(IMMS),
    Trial::new("lists::refused_once_revoked", refused_once_revoked),
    Trial::new("lists::refused", refused).needs(Operations::READ),
    Trial::new("lists::between_processes", between_processes)
        .on(&[Variant::Plain, Variant::Queued])
        .needs(Operations::all())
        .process(),
];

/// Which way the initiator moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

/// The regions of both sides.
struct Regions {
    local: Vec<CheckedRegion>,
    remote: Vec<CheckedRegion>,
    imported: Vec<RemoteRegion>,
}

/// An entry, as a trial knows it: a region and a range of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    region: usize,
    offset: usize,
    len: usize,
}

impl Regions {
    /// `count` regions of `len` bytes on each side.
    fn new(context: &TrialContext, pair: &SimPair, count: usize, len: usize) -> TestResult<Self> {
        let seeds = |side: u64| (0..count as u64).map(move |number| context.seed + 100 * side + number);
        let local: Vec<_> = seeds(0)
            .map(|seed| CheckedRegion::new(&pair.a, len, Access::LOCAL, seed))
            .collect::<TestResult<_>>()?;
        let remote: Vec<_> = seeds(1)
            .map(|seed| CheckedRegion::new(&pair.b, len, FULL_ACCESS, seed))
            .collect::<TestResult<_>>()?;
        Self::imported(pair, local, remote)
    }

    fn imported(pair: &SimPair, local: Vec<CheckedRegion>, remote: Vec<CheckedRegion>) -> TestResult<Self> {
        let imported = remote.iter().map(|region| region.import(&pair.to_b)).collect::<TestResult<_>>()?;
        Ok(Self { local, remote, imported })
    }

    /// A local list of these entries.
    fn local_list(&self, entries: &[Entry]) -> TestResult<LocalList> {
        let mut list = LocalList::new();
        for entry in entries {
            list.push(&self.local[entry.region].region, entry.offset, entry.len)?;
        }
        Ok(list)
    }

    /// A remote list of these entries.
    fn remote_list(&self, entries: &[Entry]) -> TestResult<RemoteList> {
        let mut list = RemoteList::new();
        for entry in entries {
            list.push(&self.imported[entry.region], entry.offset, entry.len)?;
        }
        Ok(list)
    }

    /// Expects what a transfer of these pairs of entries moves. No two destinations overlap.
    fn expect(&mut self, direction: Direction, pairs: impl IntoIterator<Item = (Entry, Entry)>) {
        for (local, remote) in pairs {
            let mine = &mut self.local[local.region];
            let theirs = &mut self.remote[remote.region];
            match direction {
                Direction::Write => {
                    theirs.expect_from(remote.offset, mine, local.offset..local.offset + local.len);
                }
                Direction::Read => {
                    mine.expect_from(local.offset, theirs, remote.offset..remote.offset + remote.len);
                }
            }
        }
    }

    fn check(&self, what: &str) -> TestResult {
        let both = self.local.iter().chain(&self.remote);
        both.enumerate().try_for_each(|(number, region)| region.check(&format!("{what}: region {number}")))
    }
}

/// Submits a transfer of a selection of two lists.
fn submit(
    pair: &SimPair,
    direction: Direction,
    local: (&LocalList, Selection<'_>),
    remote: (&RemoteList, Selection<'_>),
) -> TestResult<Op> {
    Ok(match direction {
        Direction::Write => {
            pair.to_b.write_list(local.0, local.1, remote.0, remote.1, &WriteOptions::new())?
        }
        Direction::Read => pair.to_b.read_list(local.0, local.1, remote.0, remote.1, &ReadOptions::new())?,
    })
}

/// Cuts the regions into entries of random lengths, with random gaps. Entries do not overlap.
fn random_entries(
    random: &mut fastrand::Rng,
    lengths: &[usize],
    regions: usize,
    region_len: usize,
) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut ends = vec![0; regions];
    for len in lengths {
        // Neighbours are frequent, so that merging has something to do.
        let gap = if random.u32(0..3) == 0 { random.usize(1..50) } else { 0 };
        let has_room = |region: &usize| ends[*region] + gap + len <= region_len;
        let first = random.usize(0..regions);
        let region = (0..regions).map(|turn| (first + turn) % regions).find(has_room)?;
        entries.push(Entry { region, offset: ends[region] + gap, len: *len });
        ends[region] += gap + len;
    }
    Some(entries)
}

/// Any lists: every byte is moved once, nothing twice, nothing else.
fn at_random(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    for round in 0..context.amount(6, 2) {
        let (count, room) = (random.usize(1..300), 40_000);
        let mut regions = Regions::new(context, &pair, random.usize(1..6), room)?;
        let most = (regions.local.len() * room / count / 2).clamp(2, 5000);
        // Lengths repeat, so that entries at equal distances occur too.
        let few: Vec<_> = (0..3).map(|_| random.usize(1..most)).collect();
        let lengths: Vec<_> = (0..count).map(|_| few[random.usize(0..few.len())]).collect();
        let of_side = |random: &mut _| random_entries(random, &lengths, regions.local.len(), room);
        let (Some(local), Some(remote)) = (of_side(&mut random), of_side(&mut random)) else { continue };
        let lists = (regions.local_list(&local)?, regions.remote_list(&remote)?);
        let posted_before: u64 = pair.a.counters().iter().map(|rail| rail.bytes).sum();
        let op = submit(&pair, direction, (&lists.0, (..).into()), (&lists.1, (..).into()))?;
        let outcome = pair.sim.done(op)?;
        let bytes: u64 = lengths.iter().map(|len| *len as u64).sum();
        ensure_eq("bytes", outcome.bytes, bytes)?;
        let posted: u64 = pair.a.counters().iter().map(|rail| rail.bytes).sum();
        ensure_eq("posted bytes", posted - posted_before, bytes)?;
        ensure_eq("entries", outcome.work_requests + outcome.merged, count as u32)?;
        regions.expect(direction, local.into_iter().zip(remote));
        regions.check(&format!("{direction:?}, round {round}, {count} entries"))?;
    }
    Ok(())
}

/// Lists made of strides once, and many selections by index.
fn by_index(context: &TrialContext, direction: Direction) -> TestResult {
    const BLOCK: usize = 256;
    const BLOCKS: usize = 60;
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let mut regions = Regions::new(context, &pair, 4, 2 * BLOCK * BLOCKS + 7)?;
    let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
    for number in 0..regions.local.len() {
        local.push_strided(&regions.local[number].region, 7, BLOCK, BLOCKS as u32, BLOCK)?;
        remote.push_strided(&regions.imported[number], 3, BLOCK, BLOCKS as u32, 2 * BLOCK)?;
    }
    ensure_eq("entries", (local.len(), remote.len()), (4 * BLOCKS, 4 * BLOCKS))?;
    let mine = |index: u32| Entry {
        region: index as usize / BLOCKS,
        offset: 7 + index as usize % BLOCKS * BLOCK,
        len: BLOCK,
    };
    let theirs = |index: u32| Entry { offset: 3 + index as usize % BLOCKS * 2 * BLOCK, ..mine(index) };
    let all = 0..(4 * BLOCKS) as u32;
    for count in context.sample([1, 2, 31, 32, 33, 100, 240]) {
        let mut chosen = || {
            let mut indices: Vec<_> = all.clone().collect();
            random.shuffle(&mut indices);
            indices.truncate(count);
            indices
        };
        let (from, to) = (chosen(), chosen());
        let op = submit(&pair, direction, (&local, (&from).into()), (&remote, (&to).into()))?;
        ensure_eq("bytes", pair.sim.done(op)?.bytes, (count * BLOCK) as u64)?;
        regions.expect(direction, from.iter().zip(&to).map(|(from, to)| (mine(*from), theirs(*to))));
        regions.check(&format!("{direction:?} of {count} blocks"))?;
        // A range, and the whole list beside the same entries by index.
        let start = random.u32(0..all.end - count as u32 + 1);
        let range = start..start + count as u32;
        let op = submit(&pair, direction, (&local, range.clone().into()), (&remote, (&to).into()))?;
        pair.sim.done(op)?;
        regions.expect(direction, range.zip(&to).map(|(from, to)| (mine(from), theirs(*to))));
        regions.check(&format!("{direction:?} of a range of {count} blocks"))?;
    }
    let reversed: Vec<_> = all.clone().rev().collect();
    pair.sim.done(submit(&pair, direction, (&local, (..).into()), (&remote, (&reversed).into()))?)?;
    regions.expect(direction, all.zip(reversed).map(|(from, to)| (mine(from), theirs(to))));
    regions.check("all blocks, reversed")
}

/// Entries that follow each other on both sides share requests, up to the transport's chunk.
fn neighbours(context: &TrialContext, direction: Direction) -> TestResult {
    const BLOCK: usize = 64;
    let pair = SimPair::new(context)?;
    let mut regions = Regions::new(context, &pair, 2, 100 * BLOCK)?;
    let per_request = (pair.capabilities().chunk.min(pair.capabilities().max_write) as usize / BLOCK).max(1);
    // Each row: the blocks of both sides, and into how many runs they fall.
    let rows: [(Vec<usize>, Vec<usize>, Vec<usize>); 5] = [
        ((0..8).collect(), (20..28).collect(), vec![8]),
        // Only one side has neighbours.
        ((0..8).collect(), (20..28).rev().collect(), vec![1; 8]),
        // Two runs that meet on one side.
        ((0..8).collect(), [20, 21, 22, 23, 40, 41, 42, 43].to_vec(), vec![4, 4]),
        // Gaps.
        ([0, 1, 3, 4, 6].to_vec(), [0, 1, 3, 4, 6].to_vec(), vec![2, 2, 1]),
        // The block behind comes first.
        ([5, 4, 3].to_vec(), [5, 4, 3].to_vec(), vec![1, 1, 1]),
    ];
    for (from, to, runs) in rows {
        for region in 0..2 {
            let entries = |blocks: &[usize]| -> Vec<_> {
                blocks.iter().map(|block| Entry { region, offset: block * BLOCK, len: BLOCK }).collect()
            };
            let (local, remote) = (entries(&from), entries(&to));
            let lists = (regions.local_list(&local)?, regions.remote_list(&remote)?);
            let op = submit(&pair, direction, (&lists.0, (..).into()), (&lists.1, (..).into()))?;
            let outcome = pair.sim.done(op)?;
            let requests: usize = runs.iter().map(|run| run.div_ceil(per_request)).sum();
            ensure_eq("requests", outcome.work_requests, requests as u32)?;
            ensure_eq("merged", outcome.merged, (from.len() - requests) as u32)?;
            regions.expect(direction, local.into_iter().zip(remote));
            regions.check(&format!("{direction:?} of {from:?} to {to:?}"))?;
        }
    }
    // Neighbours at the seam of two regions are none.
    let at = |region, block| Entry { region, offset: block * BLOCK, len: BLOCK };
    let (local, remote) = ([at(0, 98), at(0, 99), at(1, 0)], [at(1, 50), at(1, 51), at(1, 52)]);
    let lists = (regions.local_list(&local)?, regions.remote_list(&remote)?);
    let op = submit(&pair, direction, (&lists.0, (..).into()), (&lists.1, (..).into()))?;
    let outcome = pair.sim.done(op)?;
    let requests = 2_usize.div_ceil(per_request) + 1;
    ensure_eq("requests over a seam", outcome.work_requests, requests as u32)?;
    regions.expect(direction, local.into_iter().zip(remote));
    regions.check("over a seam")
}

/// An entry that is longer than a chunk becomes several requests.
fn large_entries(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let caps = pair.capabilities();
    let chunk = caps.chunk.min(caps.max_write).min(1 << 20) as usize;
    let len = 2 * chunk + 17;
    let mut regions = Regions::new(context, &pair, 1, 2 * len)?;
    let entries = [Entry { region: 0, offset: 3, len }, Entry { region: 0, offset: 3 + len, len: 9 }];
    let lists = (regions.local_list(&entries)?, regions.remote_list(&entries)?);
    let op = submit(&pair, Direction::Write, (&lists.0, (..).into()), (&lists.1, (..).into()))?;
    let outcome = pair.sim.done(op)?;
    ensure_eq("bytes", outcome.bytes, (len + 9) as u64)?;
    if caps.chunk as usize == chunk {
        // The second entry fits behind the first one's last piece.
        ensure_eq("requests", (outcome.work_requests, outcome.merged), (3, 1))?;
    }
    regions.expect(Direction::Write, entries.into_iter().zip(entries));
    regions.check("a large entry and a small one")
}

/// The pairs of 90 blocks over three regions, in both lists.
fn blocks(regions: &Regions, stride: usize, block: usize) -> TestResult<(LocalList, RemoteList, Vec<Entry>)> {
    let entries: Vec<_> = (0..90)
        .map(|index| Entry { region: index % regions.local.len(), offset: index / 3 * stride, len: block })
        .collect();
    Ok((regions.local_list(&entries)?, regions.remote_list(&entries)?, entries))
}

fn imms_come_last(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut regions = Regions::new(context, &pair, 3, 30 * 100)?;
    let (local, remote, entries) = blocks(&regions, 100, 64)?;
    for round in 0..5 {
        for region in &mut regions.local {
            region.fill(context.seed + 50 + round)?;
        }
        let options = WriteOptions::new().imm(round as u32);
        let op = pair.to_b.write_list(&local, .., &remote, .., &options)?;
        let mut op = op;
        regions.expect(Direction::Write, entries.iter().map(|entry| (*entry, *entry)));
        // Once the imm has arrived, all bytes are there.
        pair.sim.until("the imm", || pair.to_a.imm(round as u32).count() == 1)?;
        regions.check("when the imm arrives")?;
        ensure_eq("bytes", pair.sim.result(&mut op)??.bytes, 90 * 64)?;
    }
    pair.sim.settle()?;
    ensure_eq("imms", (0..5).map(|imm| pair.to_a.imm(imm).count()).sum::<u64>(), 5)
}

/// With an imm per request, no entry is merged or cut.
fn imms_per_entry(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut regions = Regions::new(context, &pair, 3, 30 * 64)?;
    let (local, remote, entries) = blocks(&regions, 64, 64)?;
    let options = WriteOptions::new().imm(4).per_wr();
    ensure_eq("the mode", options.imm_mode, ImmMode::PerWr)?;
    let outcome = pair.sim.done(pair.to_b.write_list(&local, .., &remote, .., &options)?)?;
    ensure_eq("requests", (outcome.work_requests, outcome.merged), (90, 0))?;
    pair.sim.until("the imms", || pair.to_a.imm(4).count() == 90)?;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(4).count(), 90)?;
    regions.expect(Direction::Write, entries.iter().map(|entry| (*entry, *entry)));
    regions.check("90 entries")
}

/// Regions near different rail groups, and a region on all rails: one operation and one imm for all.
fn different_rails(context: &TrialContext) -> TestResult {
    let options = Options { rails: Some(2), group_per_rail: true, ..Options::default() };
    let pair = SimHarness::new(context).pair_of(&options, &options)?;
    let near = |fabric, group, access, seed| match group {
        2 => CheckedRegion::new(fabric, 30 * 100, access, seed),
        _ => CheckedRegion::near(fabric, group, 30 * 100, access, seed),
    };
    let side = |fabric, access, seed: u64| -> TestResult<Vec<_>> {
        (0..3).map(|group| near(fabric, group, access, seed + group as u64)).collect()
    };
    let local = side(&pair.a, Access::LOCAL, context.seed)?;
    let remote = side(&pair.b, FULL_ACCESS, context.seed + 10)?;
    let mut regions = Regions::imported(&pair, local, remote)?;
    let (local, remote, entries) = blocks(&regions, 100, 64)?;
    let options = WriteOptions::new().imm(3);
    let prepared = pair.to_b.prepare_write_list(&local, .., &remote, .., &options)?;
    let parts = prepared.explain()?;
    ensure_eq("parts", parts.len(), 3)?;
    for round in 0..4 {
        for region in &mut regions.local {
            region.fill(context.seed + 50 + round)?;
        }
        let mut op = prepared.post()?;
        regions.expect(Direction::Write, entries.iter().map(|entry| (*entry, *entry)));
        pair.sim.until("the imm", || pair.to_a.imm(3).count() == round + 1)?;
        regions.check("when the imm arrives")?;
        ensure_eq("bytes", pair.sim.result(&mut op)??.bytes, 90 * 64)?;
    }
    // One entry in each region: each part has one request, and the imm still comes last.
    let first = [0_u32, 1, 2];
    let mut op = pair.to_b.write_list(&local, &first, &remote, &first, &options)?;
    pair.sim.until("the imm", || pair.to_a.imm(3).count() == 5)?;
    regions.check("when the imm of three entries arrives")?;
    pair.sim.result(&mut op)??;
    pair.sim.settle()?;
    ensure_eq("imms", pair.to_a.imm(3).count(), 5)
}

fn prepared(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut regions = Regions::new(context, &pair, 3, 30 * 100)?;
    let (local, remote, entries) = blocks(&regions, 100, 64)?;
    let (odd, even): (Vec<u32>, Vec<u32>) = (0..90).partition(|index| index % 2 == 1);
    let options = WriteOptions::new().imm(7);
    let parts = [
        pair.to_b.prepare_write_list(&local, &odd, &remote, &odd, &options)?,
        pair.to_b.prepare_write_list(&local, &even, &remote, &even, &options)?,
    ];
    drop((local, remote));
    ensure_eq("bytes", parts[0].bytes() + parts[1].bytes(), 90 * 64)?;
    for round in 0..8 {
        for region in &mut regions.local {
            region.fill(context.seed + 50 + round)?;
        }
        let ops = [parts[0].post()?, parts[1].post_with_imm(8)?, parts[0].post()?];
        pair.sim.all_done(ops.into())?;
        regions.expect(Direction::Write, entries.iter().map(|entry| (*entry, *entry)));
        regions.check(&format!("round {round}"))?;
    }
    pair.sim.until("the imms", || (pair.to_a.imm(7).count(), pair.to_a.imm(8).count()) == (16, 8))?;
    ensure(format!("{:?}", parts[0]).contains("write_list"), "the Debug text lacks the operation's name")
}

/// A revoke of any region of a list refuses the list, on either side, prepared or not.
fn refused_once_revoked(context: &TrialContext) -> TestResult {
    let revoked = [ErrorKind::Revoked, ErrorKind::RemoteAccess];
    for revoke_local in [false, true] {
        let pair = SimPair::new(context)?;
        let regions = Regions::new(context, &pair, 3, 30 * 100)?;
        let (local, remote, _) = blocks(&regions, 100, 64)?;
        let options = WriteOptions::new();
        let prepared = pair.to_b.prepare_write_list(&local, .., &remote, .., &options)?;
        let side = if revoke_local { &regions.local } else { &regions.remote };
        pair.sim.done(side[2].region.revoke()?)?;
        pair.sim.fails("a prepared list", prepared.post(), &revoked)?;
        pair.sim.fails("a list", pair.to_b.write_list(&local, .., &remote, .., &options), &revoked)?;
        // The entries of the other regions still go.
        let others: Vec<_> = (0..90).filter(|index| index % 3 != 2).collect();
        pair.sim.done(pair.to_b.write_list(&local, &others, &remote, &others, &options)?)?;
    }
    Ok(())
}

fn refused(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let regions = Regions::new(context, &pair, 1, 4096)?;
    let (mine, theirs) = (&regions.local[0].region, &regions.imported[0]);
    let other = SimHarness::new(context).pair()?;
    let (foreign, foreign_remote) = {
        let (local, remote) = (
            CheckedRegion::new(&other.a, 4096, Access::LOCAL, 1)?,
            CheckedRegion::new(&other.b, 4096, FULL_ACCESS, 2)?,
        );
        (local.region.clone(), remote.import(&other.to_b)?)
    };
    let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
    local.push_strided(mine, 0, 64, 10, 64)?;
    remote.push_strided(theirs, 0, 64, 9, 64)?;
    remote.push(theirs, 0, 65)?;
    for (what, result, kind) in [
        ("no bytes", local.push(mine, 0, 0), ErrorKind::InvalidRequest),
        ("beyond the end", local.push(mine, 4090, 7), ErrorKind::OutOfBounds),
        ("a stride beyond the end", local.push_strided(mine, 0, 64, 65, 64), ErrorKind::OutOfBounds),
        ("a huge stride", local.push_strided(mine, 0, 1, u32::MAX, usize::MAX), ErrorKind::OutOfBounds),
        ("another fabric", local.push(&foreign, 0, 64), ErrorKind::InvalidRequest),
        ("no remote bytes", remote.push(theirs, 0, 0), ErrorKind::InvalidRequest),
        ("beyond the remote end", remote.push(theirs, 4090, 7), ErrorKind::OutOfBounds),
        ("a huge remote stride", remote.push_strided(theirs, 9, 1, 3, usize::MAX), ErrorKind::OutOfBounds),
        ("another peer", remote.push(&foreign_remote, 0, 64), ErrorKind::InvalidRequest),
    ] {
        ensure_err(what, result, &[kind])?;
    }
    ensure_eq("entries after errors", (local.len(), remote.len()), (10, 10))?;
    let write = |from: Selection<'static>, to: Selection<'static>| {
        pair.to_b.write_list(&local, from, &remote, to, &WriteOptions::new())
    };
    let invalid = [ErrorKind::InvalidRequest];
    ensure_err("selections of different lengths", write((0..2).into(), (0..3).into()), &invalid)?;
    ensure_err("no entries", write((2..2).into(), (3..3).into()), &invalid)?;
    ensure_err("an index beyond the list", write((&[10]).into(), (&[0]).into()), &invalid)?;
    ensure_err("a range beyond the list", write((0..2).into(), (9..11).into()), &invalid)?;
    let different = ensure_err("entries of different lengths", write((..).into(), (..).into()), &invalid)?;
    ensure(different.to_string().contains("position 9"), format!("no position in: {different}"))?;
    // Access rights.
    let sealed = CheckedRegion::new(&pair.b, 64, Access::REMOTE_WRITE, context.seed)?;
    let mut sealed_list = RemoteList::new();
    sealed_list.push(&sealed.import(&pair.to_b)?, 0, 64)?;
    let read = pair.to_b.read_list(&local, 0..1, &sealed_list, .., &ReadOptions::new());
    ensure_err("a read of what may only be written", read, &[ErrorKind::RemoteAccess])?;
    // Lists of another fabric or peer.
    let write = other.to_b.write_list(&local, 0..1, &remote, 0..1, &WriteOptions::new());
    ensure_err("another peer's list", write, &invalid)?;
    pair.to_b.disconnect();
    let write = pair.to_b.write_list(&local, 0..1, &remote, 0..1, &WriteOptions::new());
    ensure_err("a peer that is gone", write, &[ErrorKind::Closed, ErrorKind::PeerDied]).map(drop)
}

/// Lists over four regions of another process, written and read. A half of the blocks has neighbours.
fn between_processes(context: &TrialContext) -> TestResult {
    const BLOCK: usize = 4096;
    const BLOCKS: u32 = 250;
    const REGIONS: usize = 4;
    let len = BLOCKS as usize * BLOCK;
    let mut pair = ConnectedPair::kept_or_new(context)?;
    let (fabric, peer) = (&pair.fabric, &pair.peer);
    let (mut near, mut far, mut back) = (Vec::new(), Vec::new(), Vec::new());
    let (mut mine, mut theirs, mut returned) = (LocalList::new(), RemoteList::new(), LocalList::new());
    for number in 0..REGIONS as u64 {
        near.push(CheckedRegion::new(fabric, len, Access::LOCAL, 10 + number)?);
        back.push(CheckedRegion::new(fabric, len, Access::LOCAL, 20 + number)?);
        // The bytes that the helper should hold.
        far.push(CheckedRegion::new(fabric, len, Access::LOCAL, 30 + number)?);
        pair.helper.command(&format!("alloc list-{number} {len} {}", 30 + number))?;
        let remote = within(LIMIT, "a lookup", peer.region(&format!("list-{number}")))??;
        mine.push_strided(&near[number as usize].region, 0, BLOCK, BLOCKS, BLOCK)?;
        theirs.push_strided(&remote, 0, BLOCK, BLOCKS, BLOCK)?;
        returned.push_strided(&back[number as usize].region, 0, BLOCK, BLOCKS, BLOCK)?;
    }
    // Single blocks at random, and runs of 8 blocks at random.
    let (from, to) = permutation(REGIONS as u32 * BLOCKS, 4);
    let (single, single_to) = (&from[..300], &to[..300]);
    let is_free = |run: &u32| (0..8).all(|block| !single_to.contains(&(run * 8 + block)));
    let runs: Vec<u32> = (0..REGIONS as u32 * BLOCKS / 8).filter(is_free).take(20).collect();
    let in_runs = runs.iter().rev().flat_map(|run| run * 8..run * 8 + 8);
    let from: Vec<_> = single.iter().copied().chain(in_runs).collect();
    let to: Vec<_> =
        single_to.iter().copied().chain(runs.iter().flat_map(|run| run * 8..run * 8 + 8)).collect();
    let at = |block: u32| ((block / BLOCKS) as usize, (block % BLOCKS) as usize * BLOCK);
    let options = WriteOptions::new().imm(900);
    let outcome = peer.write_list(&mine, &from, &theirs, &to, &options)?.wait(LIMIT)?;
    ensure_eq("bytes", outcome.bytes, (from.len() * BLOCK) as u64)?;
    ensure_eq("imms", pair.helper.command("expect 900 1")?, "1".into())?;
    for (from, to) in from.iter().zip(&to) {
        let ((source, start), (target, offset)) = (at(*from), at(*to));
        far[target].expect_from(offset, &near[source], start..start + BLOCK);
    }
    // The whole of the helper's regions, and then the same blocks back.
    let outcome = peer.read_list(&returned, .., &theirs, .., &ReadOptions::new())?.wait(LIMIT)?;
    ensure_eq("bytes", outcome.bytes, (REGIONS * len) as u64)?;
    ensure(outcome.merged > 0, "neighbours did not share requests")?;
    for (back, far) in back.iter_mut().zip(&far) {
        back.expect_from(0, far, 0..len);
        back.check("a region of the helper, read back")?;
    }
    peer.read_list(&mine, &to, &theirs, &from, &ReadOptions::new())?.wait(LIMIT)?;
    for (from, to) in from.iter().zip(&to) {
        let ((source, start), (target, offset)) = (at(*from), at(*to));
        near[target].expect_from(offset, &far[source], start..start + BLOCK);
    }
    near.iter().try_for_each(|region| region.check("blocks, read back"))?;
    pair.keep(context);
    Ok(())
}
