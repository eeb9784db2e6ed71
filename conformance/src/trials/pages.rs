//! Paged writes: permutations, strides, offsets, repeats, many pages.

use transport_core::{Access, Pages};

use crate::check::{TestResult, ensure_eq};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::sim_harness::SimPair;
use crate::trial::{ALL_PATHS, Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("pages::permuted", permuted).on(ALL_PATHS),
    Trial::new("pages::strides_and_offsets", strides_and_offsets).on(ALL_PATHS),
    Trial::new("pages::repeated_sources", repeated_sources).on(ALL_PATHS),
    Trial::new("pages::every_page_size", every_page_size).on(ALL_PATHS),
    Trial::new("pages::several_operations", several_operations).on(ALL_PATHS),
    Trial::new("pages::many", many).on(ALL_PATHS),
];

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

fn transfer(
    pair: &SimPair,
    from: &PageOffsets,
    to: &PageOffsets,
    page: usize,
    rooms: (usize, usize),
    seed: u64,
) -> TestResult {
    let src = CheckedRegion::new(&pair.a, rooms.0, Access::LOCAL, seed)?;
    let mut dst = CheckedRegion::new(&pair.b, rooms.1, FULL_ACCESS, seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let outcome =
        pair.sim.done(pair.to_b.write_pages(&src.region, from.pages(), &remote, to.pages(), page)?)?;
    let count = to.indices.len();
    ensure_eq("bytes", outcome.bytes, (count * page) as u64)?;
    expect(&mut dst, to, &src, from, page);
    dst.check(&format!("{count} pages of {page} bytes"))?;
    src.check("the source")
}

fn permuted(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    for count in context.sample([1, 2, 3, 15, 16, 17, 63, 64, 65, 200]) {
        let (from, to) = (shuffled(count, &mut random), shuffled(count, &mut random));
        let (from, to) = (PageOffsets::dense(from, 4096), PageOffsets::dense(to, 4096));
        let room = (count as usize + 1) * 4096;
        transfer(&pair, &from, &to, 4096, (room, room), context.seed)?;
    }
    Ok(())
}

fn strides_and_offsets(context: &TrialContext) -> TestResult {
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
        transfer(&pair, &from, &to, page, rooms, context.seed)?;
    }
    Ok(())
}

fn repeated_sources(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let from = PageOffsets::dense((0..150).map(|_| random.u32(0..4)).collect(), 2048);
    let to = PageOffsets::dense(shuffled(150, &mut random), 2048);
    transfer(&pair, &from, &to, 2048, (4 * 2048, 150 * 2048), context.seed)?;
    // The source stride is smaller than the page. Source pages may overlap, because they are only read.
    let from = PageOffsets { indices: (0..100).collect(), stride: 10, offset: 1 };
    transfer(
        &pair,
        &from,
        &PageOffsets::dense((0..100).rev().collect(), 512),
        512,
        (4096, 100 * 512),
        context.seed,
    )
}

fn every_page_size(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let chunk = pair.capabilities().chunk.min(1 << 20) as usize;
    for page in context.sample([1, 2, 63, 64, 4095, 4097, 65_536, chunk, chunk + 1]) {
        let (from, to) = (shuffled(9, &mut random), shuffled(9, &mut random));
        let (from, to) = (PageOffsets::dense(from, page), PageOffsets::dense(to, page));
        transfer(&pair, &from, &to, page, (9 * page, 9 * page + 50), context.seed)?;
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
fn many(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut random = fastrand::Rng::with_seed(context.seed);
    let count = context.amount(10_000, 2_500);
    let (from, to) = (shuffled(count, &mut random), shuffled(count, &mut random));
    let (from, to) = (PageOffsets::dense(from, 64), PageOffsets::dense(to, 64));
    let room = count as usize * 64;
    transfer(&pair, &from, &to, 64, (room, room), context.seed)
}
