//! Random content and order of pages, the same on both sides for one seed.
//!
//! The generator is part of the protocol, so it is spelled out here: SplitMix64
//! (Steele, Lea, Flood 2014), one stream per page, little-endian. The GPU that compares one is given where it
//! begins (`verification`).

use multirail::{Region, Result};

use super::load::Load;

/// Bytes of a page generated at a time: whole numbers of the generator.
const PIECE: usize = 64 << 10;

/// Bytes copied in or out at a time: enough for copies to a GPU, small enough for a cache.
const BATCH: usize = 16 * PIECE;

struct SplitMix(u64);

impl SplitMix {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

    /// The stream `stream` of `seed`.
    fn new(seed: u64, stream: u64) -> Self {
        let mut start = Self(seed ^ stream.wrapping_mul(Self::GAMMA));
        Self(start.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::GAMMA);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let mut words = bytes.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let tail = words.into_remainder();
        if !tail.is_empty() {
            let last = self.next().to_le_bytes();
            tail.copy_from_slice(&last[..tail.len()]);
        }
    }

    /// Page indices in a random order (Fisher-Yates).
    fn order(mut self, pages: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..pages).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
        order
    }
}

/// The order in which pages are taken from the source.
pub fn sources(load: &Load) -> Vec<u32> {
    SplitMix::new(load.seed, u64::MAX).order(load.pages)
}

/// Where they go, in the same order.
pub fn targets(load: &Load) -> Vec<u32> {
    SplitMix::new(load.seed, u64::MAX - 1).order(load.pages)
}

/// The source page that belongs at each page of the target.
pub fn arrived(load: &Load) -> Vec<u32> {
    let mut arrived = vec![0; load.pages as usize];
    sources(load).into_iter().zip(targets(load)).for_each(|(from, to)| arrived[to as usize] = from);
    arrived
}

/// Where the stream of a source page begins: the generator's state.
pub fn stream(load: &Load, page: u32) -> u64 {
    SplitMix::new(load.seed, u64::from(page)).0
}

/// Fills every page of a source region.
pub fn fill(region: &Region, load: &Load) -> Result<()> {
    let mut content = Content::new(load, (0..load.pages).collect());
    let mut batch = vec![0; BATCH.min(region.len())];
    for (at, len) in batches(region.len()) {
        content.fill(&mut batch[..len]);
        region.copy_in(at, &batch[..len])?;
    }
    Ok(())
}

/// Overwrites a target region, so that only bytes that arrive later can be right.
pub fn overwrite(region: &Region) -> Result<()> {
    let batch = vec![0xa5; BATCH.min(region.len())];
    batches(region.len()).try_for_each(|(at, len)| region.copy_in(at, &batch[..len]))
}

/// Compares every byte of a target region with what belongs there, on the host; the offset of the first that
/// differs.
pub fn first_wrong(region: &Region, load: &Load) -> Result<Option<u64>> {
    let mut content = Content::new(load, arrived(load));
    let (mut wanted, mut found) = (vec![0; BATCH.min(region.len())], vec![0; BATCH.min(region.len())]);
    for (at, len) in batches(region.len()) {
        content.fill(&mut wanted[..len]);
        region.copy_out(at, &mut found[..len])?;
        if wanted[..len] != found[..len] {
            let same = wanted.iter().zip(&found).take_while(|(wanted, found)| wanted == found).count();
            return Ok(Some((at + same) as u64));
        }
    }
    Ok(None)
}

/// The bytes of pages one after another.
struct Content<'a> {
    load: &'a Load,
    /// The pages that are left, the next one last.
    left: Vec<u32>,
    stream: SplitMix,
    /// What is generated of the page at hand, and not given out.
    piece: Vec<u8>,
    given: usize,
    /// What is not generated of it.
    page: u64,
}

impl<'a> Content<'a> {
    fn new(load: &'a Load, mut pages: Vec<u32>) -> Self {
        pages.reverse();
        let stream = SplitMix::new(load.seed, 0);
        Self { load, left: pages, stream, piece: Vec::with_capacity(PIECE), given: 0, page: 0 }
    }

    /// The next bytes; `bytes` does not go beyond the last page.
    fn fill(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            if self.given == self.piece.len() {
                self.generate();
            }
            let some = bytes.len().min(self.piece.len() - self.given);
            let (head, tail) = bytes.split_at_mut(some);
            head.copy_from_slice(&self.piece[self.given..self.given + some]);
            self.given += some;
            bytes = tail;
        }
    }

    fn generate(&mut self) {
        if self.page == 0 {
            let page = self.left.pop().expect("no bytes beyond the last page are asked for");
            self.stream = SplitMix::new(self.load.seed, u64::from(page));
            self.page = self.load.size;
        }
        let len = self.page.min(PIECE as u64) as usize;
        self.piece.resize(len, 0);
        self.stream.fill(&mut self.piece);
        (self.page, self.given) = (self.page - len as u64, 0);
    }
}

/// Whether `bytes` are the content of page `source`.
pub fn is_page(bytes: &[u8], load: &Load, source: u32) -> bool {
    let mut stream = SplitMix::new(load.seed, u64::from(source));
    let mut wanted = vec![0; PIECE.min(bytes.len())];
    bytes.len() as u64 == load.size
        && bytes.chunks(PIECE).all(|piece| {
            stream.fill(&mut wanted[..piece.len()]);
            wanted[..piece.len()] == *piece
        })
}

fn batches(total: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total).step_by(BATCH).map(move |at| (at, (total - at).min(BATCH)))
}

#[cfg(test)]
mod tests {
    use super::super::load::Kind;
    use super::super::memory::BenchMemory;
    use super::*;

    fn load(size: u64, pages: u32) -> Load {
        let (src, dst) = (BenchMemory::Host, BenchMemory::Host);
        Load { kind: Kind::Write, size, pages, inflight: 1, seed: 5, imm: 0, src, dst }
    }

    #[test]
    fn the_published_generator() {
        // First outputs of SplitMix64 for the seed 1234567, as published with it.
        let mut generator = SplitMix(1_234_567);
        assert_eq!(generator.next(), 6_457_827_717_110_365_317);
        assert_eq!(generator.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn orders_are_permutations_and_differ() {
        let load = load(1, 1000);
        let (from, to) = (sources(&load), targets(&load));
        assert_ne!(from, to);
        for mut order in [from, to] {
            order.sort_unstable();
            assert!(order.into_iter().eq(0..1000));
        }
    }

    #[test]
    fn pages_are_recognised() {
        let load = load(PIECE as u64 + 13, 2);
        let mut page = vec![0; load.size as usize];
        let mut stream = SplitMix::new(load.seed, 1);
        page.chunks_mut(PIECE).for_each(|piece| stream.fill(piece));
        assert!(is_page(&page, &load, 1));
        assert!(!is_page(&page, &load, 0));
        *page.last_mut().unwrap() ^= 1;
        assert!(!is_page(&page, &load, 1));
        assert!(!is_page(&page[1..], &load, 1));
    }

    #[test]
    fn content_is_page_after_page_however_it_is_cut() {
        let load = load(PIECE as u64 + 13, 3);
        let size = load.size as usize;
        let (mut whole, mut cut) = (vec![0; 3 * size], vec![0; 3 * size]);
        Content::new(&load, vec![2, 0, 1]).fill(&mut whole);
        let mut content = Content::new(&load, vec![2, 0, 1]);
        cut.chunks_mut(1001).for_each(|bytes| content.fill(bytes));
        assert_eq!(whole, cut);
        for (at, page) in [2, 0, 1].into_iter().enumerate() {
            assert!(is_page(&whole[at * size..(at + 1) * size], &load, page));
        }
    }

    #[test]
    fn batches_cover_everything_once() {
        for total in [1, BATCH, BATCH + 1, 3 * BATCH - 1] {
            let mut next = 0;
            for (at, len) in batches(total) {
                assert_eq!(at, next);
                next += len;
            }
            assert_eq!(next, total);
        }
    }
}
