//! Random content and order of pages, the same on both sides for one seed.
//!
//! The generator is part of the protocol, so it is spelled out here: SplitMix64
//! (Steele, Lea, Flood 2014), one stream per page.

use multirail::{Region, Result};

use super::load::Load;

/// Bytes compared or filled at a time; a multiple of 8, small enough for a cache.
const PIECE: usize = 64 << 10;

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
        let last = self.next().to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
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

/// Fills every page of a source region.
pub fn fill(region: &Region, load: &Load) -> Result<()> {
    let mut piece = vec![0; PIECE];
    for page in 0..load.pages {
        let mut stream = SplitMix::new(load.seed, u64::from(page));
        for (at, len) in pieces(load.size) {
            stream.fill(&mut piece[..len]);
            region.copy_in((u64::from(page) * load.size + at) as usize, &piece[..len])?;
        }
    }
    Ok(())
}

/// Overwrites a target region, so that only bytes that arrive later can be right.
pub fn scrub(region: &Region) -> Result<()> {
    let piece = vec![0xa5; PIECE];
    for (at, len) in pieces(region.len() as u64) {
        region.copy_in(at as usize, &piece[..len])?;
    }
    Ok(())
}

/// Compares every byte of a target region with what belongs there; the offset of
/// the first piece that differs.
pub fn first_wrong(region: &Region, load: &Load) -> Result<Option<u64>> {
    let (mut wanted, mut found) = (vec![0; PIECE], vec![0; PIECE]);
    for (source, target) in sources(load).into_iter().zip(targets(load)) {
        let mut stream = SplitMix::new(load.seed, u64::from(source));
        for (at, len) in pieces(load.size) {
            let offset = u64::from(target) * load.size + at;
            stream.fill(&mut wanted[..len]);
            region.copy_out(offset as usize, &mut found[..len])?;
            if wanted[..len] != found[..len] {
                return Ok(Some(offset));
            }
        }
    }
    Ok(None)
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

fn pieces(total: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..total).step_by(PIECE).map(move |at| (at, (total - at).min(PIECE as u64) as usize))
}

#[cfg(test)]
mod tests {
    use super::super::load::Kind;
    use super::*;

    fn load(size: u64, pages: u32) -> Load {
        Load { kind: Kind::Write, size, pages, inflight: 1, seed: 5, imm: 0 }
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
    fn pieces_cover_everything_once() {
        for total in [1, PIECE as u64, PIECE as u64 + 1, 3 * PIECE as u64 - 1] {
            let mut next = 0;
            for (at, len) in pieces(total) {
                assert_eq!(at, next);
                next += len as u64;
            }
            assert_eq!(next, total);
        }
    }
}
