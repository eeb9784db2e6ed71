//! Paged writes and reads: permutations, strides, offsets, repeats, many pages.

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Pages, ReadOptions, WriteOptions};

use crate::check::{TestResult, ensure, ensure_eq, ensure_err};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("pages::permuted", |context| permuted(context, Direction::Write)).on(ALL_PATHS),
    Trial::new("pages::strides_and_offsets", |context| strides_and_offsets(context, Direction::Write))
        .on(ALL_PATHS),
    Trial::new("pages::repeated_sources", |context| repeated_sources(context, Direction::Write))
        .on(ALL_PATHS),
    Trial::new("pages::every_page_size", |context| every_page_size(context, Direction::Write)).on(ALL_PATHS),
    Trial::new("pages::several_operations", several_operations).on(ALL_PATHS),
    Trial::new("pages::many", |context| many(context, Direction::Write)).on(ALL_PATHS),
    Trial::new("pages::read_permuted", |context| permuted(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("pages::read_strides_and_offsets", |context| strides_and_offsets(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("pages::read_repeated_sources", |context| repeated_sources(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("pages::read_every_page_size", |context| every_page_size(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("pages::read_many", |context| many(context, Direction::Read))
        .on(ALL_PATHS)
        .needs(Operations::READ),
    Trial::new("pages::neighbours_share_requests", neighbours)
        .on(ALL_PATHS)
        .needs(Operations::READ.union(Operations::WRITE_IMM)),
    Trial::new("pages::prepared_reads", prepared_reads).on(ALL_PATHS).needs(Operations::READ),
    Trial::new("pages::refused_reads", refused_reads).needs(Operations::READ),
];

/// Which way the initiator moves the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

fn shuffled(count: u32, random: &mut fastrand::Rng) -> Vec<u32> {
    let mut list: Vec<_> = (0..count).collect();
    random.shuffle(&mut list);
    list
}

/// The offsets of the pages of one side.
#[derive(Clone)]
struct PageOffsets {
    indices: Vec<u32>,
    stride: usize,
    offset: usize,
}

impl PageOffsets {
    fn dense(indices: Vec<u32>, page: usize) -> Self {
        Self { indices, stride: page, offset: 0 }
    }

    fn pages(&self) -> Pages {
        Pages::new(self.indices.clone()).stride(self.stride).offset(self.offset)
    }

    fn at(&self, item: usize) -> usize {
        self.offset + self.indices[item] as usize * self.stride
    }
}

/// Expects in `dst` the bytes of a paged write.
fn expect(dst: &mut CheckedRegion, to: &PageOffsets, src: &CheckedRegion, from: &PageOffsets, page: usize) {
    for item in 0..to.indices.len() {
        dst.expect_from(to.at(item), src, from.at(item)..from.at(item) + page);
    }
}

/// Moves pages between a new region of each side. `rooms` are the bytes of the source and of the destination.
fn transfer(
    pair: &SimPair,
    direction: Direction,
    (from, to): (&PageOffsets, &PageOffsets),
    page: usize,
    rooms: (usize, usize),
    seed: u64,
) -> TestResult {
    let count = to.indices.len();
    let (src, mut dst, op) = match direction {
        Direction::Write => {
            let src = CheckedRegion::new(&pair.a, rooms.0, Access::LOCAL, seed)?;
            let dst = CheckedRegion::new(&pair.b, rooms.1, FULL_ACCESS, seed + 1)?;
            let remote = dst.import(&pair.to_b)?;
            let op = pair.to_b.write_pages(&src.region, from.pages(), &remote, to.pages(), page)?;
            (src, dst, op)
        }
        Direction::Read => {
            let src = CheckedRegion::new(&pair.b, rooms.0, Access::REMOTE_READ, seed)?;
            let dst = CheckedRegion::new(&pair.a, rooms.1, Access::LOCAL, seed + 1)?;
            let remote = src.import(&pair.to_b)?;
            let op = pair.to_b.read_pages(&dst.region, to.pages(), &remote, from.pages(), page)?;
            (src, dst, op)
        }
    };
    let outcome = pair.sim.done(op)?;
    ensure_eq("bytes", outcome.bytes, (count * page) as u64)?;
    expect(&mut dst, to, &src, from, page);
    dst.check(&format!("{direction:?} of {count} pages of {page} bytes"))?;
    src.check("the source")
}

fn permuted(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    for count in context.sample([1, 2, 3, 15, 16, 17, 63, 64, 65, 200]) {
        let (from, to) = (shuffled(count, &mut random), shuffled(count, &mut random));
        let (from, to) = (PageOffsets::dense(from, 4096), PageOffsets::dense(to, 4096));
        let room = (count as usize + 1) * 4096;
        transfer(&pair, direction, (&from, &to), 4096, (room, room), context.seed)?;
    }
    Ok(())
}

fn strides_and_offsets(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    for (page, strides, offsets) in [
        (4096, (4096, 8192), (0, 100)),
        (1000, (1001, 3000), (17, 1)),
        (777, (777, 778), (5, 0)),
        (64, (256, 64), (3, 9)),
    ] {
        let (from, to) = (shuffled(90, &mut random), shuffled(90, &mut random));
        let from = PageOffsets { indices: from, stride: strides.0, offset: offsets.0 };
        let to = PageOffsets { indices: to, stride: strides.1, offset: offsets.1 };
        // Both regions end exactly at the end of the last page.
        let rooms = (offsets.0 + 89 * strides.0 + page, offsets.1 + 89 * strides.1 + page);
        transfer(&pair, direction, (&from, &to), page, rooms, context.seed)?;
    }
    Ok(())
}

fn repeated_sources(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let from = PageOffsets::dense((0..150).map(|_| random.u32(0..4)).collect(), 2048);
    let to = PageOffsets::dense(shuffled(150, &mut random), 2048);
    transfer(&pair, direction, (&from, &to), 2048, (4 * 2048, 150 * 2048), context.seed)?;
    // The source stride is smaller than the page. Source pages may overlap, because they are only read.
    let from = PageOffsets { indices: (0..100).collect(), stride: 10, offset: 1 };
    let to = PageOffsets::dense((0..100).rev().collect(), 512);
    transfer(&pair, direction, (&from, &to), 512, (4096, 100 * 512), context.seed)
}

fn every_page_size(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let chunk = pair.capabilities().chunk.min(1 << 20) as usize;
    for page in context.sample([1, 2, 63, 64, 4095, 4097, 65_536, chunk, chunk + 1]) {
        let (from, to) = (shuffled(9, &mut random), shuffled(9, &mut random));
        let (from, to) = (PageOffsets::dense(from, page), PageOffsets::dense(to, page));
        transfer(&pair, direction, (&from, &to), page, (9 * page, 9 * page + 50), context.seed)?;
    }
    Ok(())
}

/// Several outstanding operations that share one page list.
fn several_operations(context: &TrialContext) -> TestResult {
    const PAGE: usize = 1024;
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let src = CheckedRegion::new(&pair.a, 100 * PAGE, Access::LOCAL, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.b, 8 * 100 * PAGE, FULL_ACCESS, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let from = PageOffsets::dense(shuffled(100, &mut random), PAGE);
    let list = from.pages();
    let mut ops = Vec::new();
    for part in 0..8 {
        let to = PageOffsets { indices: shuffled(100, &mut random), stride: PAGE, offset: part * 100 * PAGE };
        ops.push(pair.to_b.write_pages(&src.region, &list, &remote, to.pages(), PAGE)?);
        expect(&mut dst, &to, &src, &from, PAGE);
    }
    pair.sim.all_done(ops)?;
    dst.check("eight paged writes")
}

/// More pages than any queue holds.
fn many(context: &TrialContext, direction: Direction) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let count = context.amount(10_000, 2_500);
    let (from, to) = (shuffled(count, &mut random), shuffled(count, &mut random));
    let (from, to) = (PageOffsets::dense(from, 64), PageOffsets::dense(to, 64));
    let room = count as usize * 64;
    transfer(&pair, direction, (&from, &to), 64, (room, room), context.seed)
}

/// Pages that follow each other on both sides share requests, in writes and reads, unless each has its own imm.
fn neighbours(context: &TrialContext) -> TestResult {
    const PAGE: usize = 256;
    let pair = SimPair::new(context)?;
    let caps = pair.capabilities();
    let per_request = (caps.chunk.min(caps.max_write) as usize / PAGE).max(1);
    let mut mine = CheckedRegion::new(&pair.a, 100 * PAGE, Access::LOCAL, context.seed)?;
    let mut theirs = CheckedRegion::new(&pair.b, 100 * PAGE, FULL_ACCESS, context.seed + 1)?;
    let remote = theirs.import(&pair.to_b)?;
    let of_run = |run: u32| run * 8..run * 8 + 8;
    let runs = |order: &[u32]| PageOffsets::dense(order.iter().copied().flat_map(of_run).collect(), PAGE);
    let dense = |indices| PageOffsets::dense(indices, PAGE);
    let wide = |indices| PageOffsets { indices, stride: 2 * PAGE, offset: 0 };
    // Each row: the pages of both sides, and the lengths of the runs in which they follow each other.
    for (local, remote_pages, lengths) in [
        (runs(&[3, 0, 7]), runs(&[1, 9, 4]), vec![8; 3]),
        (dense((0..40).collect()), dense((10..50).collect()), vec![40]),
        // One page of eight has a neighbour, and the others have none.
        (
            dense(vec![0, 1, 4, 6, 8, 12, 14, 16]),
            dense(vec![0, 1, 4, 6, 8, 12, 14, 16]),
            [&[2][..], &[1; 6]].concat(),
        ),
        // Only one side has neighbours.
        (dense((0..40).collect()), dense((10..50).rev().collect()), vec![1; 40]),
        // The pages have gaps between them.
        (wide((0..40).collect()), dense((0..40).collect()), vec![1; 40]),
    ] {
        let count = local.indices.len() as u32;
        let requests: u32 = lengths.iter().map(|pages: &usize| pages.div_ceil(per_request) as u32).sum();
        let shared = (requests, count - requests);
        let (from, to) = (local.pages(), remote_pages.pages());
        let written = pair.sim.done(pair.to_b.write_pages(&mine.region, &from, &remote, &to, PAGE)?)?;
        ensure_eq("requests of a write", (written.work_requests, written.merged), shared)?;
        expect(&mut theirs, &remote_pages, &mine, &local, PAGE);
        theirs.check("pages written in runs")?;
        theirs.fill(context.seed + 2)?;
        let read = pair.sim.done(pair.to_b.read_pages(&mine.region, &from, &remote, &to, PAGE)?)?;
        ensure_eq("requests of a read", (read.work_requests, read.merged), shared)?;
        expect(&mut mine, &local, &theirs, &remote_pages, PAGE);
        mine.check("pages read in runs")?;
        let options = WriteOptions::new().imm(5).per_wr();
        let op = pair.to_b.write_pages_with(&mine.region, &from, &remote, &to, PAGE, &options)?;
        let each = pair.sim.done(op)?;
        ensure_eq("requests with an imm each", (each.work_requests, each.merged), (count, 0))?;
        expect(&mut theirs, &remote_pages, &mine, &local, PAGE);
        theirs.check("pages with an imm each")?;
    }
    Ok(())
}

/// A prepared read is posted many times, and is refused once the remote region is revoked.
fn prepared_reads(context: &TrialContext) -> TestResult {
    const PAGE: usize = 512;
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let mut src = CheckedRegion::new(&pair.b, 40 * PAGE, Access::REMOTE_READ, context.seed)?;
    let mut dst = CheckedRegion::new(&pair.a, 40 * PAGE, Access::LOCAL, context.seed + 1)?;
    let remote = src.import(&pair.to_b)?;
    let (from, to) = (shuffled(40, &mut random), shuffled(40, &mut random));
    let (from, to) = (PageOffsets::dense(from, PAGE), PageOffsets::dense(to, PAGE));
    let options = ReadOptions::new();
    let prepared =
        pair.to_b.prepare_read_pages(&dst.region, to.pages(), &remote, from.pages(), PAGE, &options)?;
    for round in 0..10 {
        src.fill(context.seed + 10 + round)?;
        let outcome = pair.sim.done(prepared.post()?)?;
        ensure_eq("bytes", outcome.bytes, (40 * PAGE) as u64)?;
        expect(&mut dst, &to, &src, &from, PAGE);
        dst.check(&format!("round {round}"))?;
    }
    ensure_err("an imm of a read", prepared.post_with_imm(1), &[ErrorKind::InvalidRequest])?;
    pair.sim.done(src.region.revoke()?)?;
    src.fill(context.seed + 30)?;
    pair.sim.fails("a post after revoke", prepared.post(), &[ErrorKind::Revoked, ErrorKind::RemoteAccess])?;
    dst.check("after revoke")
}

/// The errors of a paged read before submission.
fn refused_reads(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let writable = CheckedRegion::new(&pair.b, 8192, Access::REMOTE_WRITE, context.seed)?;
    let readable = CheckedRegion::new(&pair.b, 8192, Access::REMOTE_READ, context.seed)?;
    let dst = CheckedRegion::new(&pair.a, 8192, Access::LOCAL, context.seed + 1)?;
    let (writable, readable) = (writable.import(&pair.to_b)?, readable.import(&pair.to_b)?);
    let read = |remote, to: &[u32], from: &[u32], page| {
        let read = pair.to_b.read_pages(&dst.region, to, remote, from, page);
        read.map(|_| ()).map_err(|error| (error.kind(), error.to_string()))
    };
    for (result, kind) in [
        (read(&writable, &[0], &[0], 4096), ErrorKind::RemoteAccess),
        (read(&readable, &[0, 1], &[0], 4096), ErrorKind::InvalidRequest),
        (read(&readable, &[], &[], 4096), ErrorKind::InvalidRequest),
        (read(&readable, &[0], &[0], 0), ErrorKind::InvalidRequest),
        (read(&readable, &[2], &[0], 4096), ErrorKind::OutOfBounds),
        (read(&readable, &[0], &[2], 4096), ErrorKind::OutOfBounds),
    ] {
        let Err((found, text)) = result else { return ensure(false, "a wrong read was accepted") };
        ensure_eq("the kind of error", found, kind)?;
        ensure(text.contains("read_pages"), format!("the error does not name the operation: {text}"))?;
    }
    Ok(())
}
