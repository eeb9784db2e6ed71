use super::implementation::{active, available};
use super::{COLD_STREAM_FROM, CopyStrategy, STREAM_FROM, copy, finish, strategy, stream_four};
use crate::Locality;

/// The bytes before and after a destination that a copy must not change: more than any loop copies at once. (Under miri
/// there are only loops of words and bytes.)
const GUARD: usize = if cfg!(miri) { 16 } else { 512 };
const UNTOUCHED: u8 = 0xa5;

/// A source and a destination whose first bytes can be put at any alignment.
struct Pair {
    src: Vec<u8>,
    dst: Vec<u8>,
}

/// The index in `bytes` that is at least [`GUARD`] and `offset` past a 64-byte line.
fn start(bytes: &[u8], offset: usize) -> usize {
    GUARD + (bytes.as_ptr().addr() + GUARD).wrapping_neg() % 64 + offset
}

impl Pair {
    fn new(longest: usize) -> Self {
        let room = longest + 2 * GUARD + 64 + if cfg!(miri) { 64 } else { 4096 };
        // The pattern does not repeat at a power of two, so the test notices swapped lines.
        let src = (0..room).map(|at| (at % 251) as u8 ^ (at / 251) as u8).collect();
        Self { src, dst: vec![UNTOUCHED; room] }
    }

    /// Copies once, compares with std's copy, and cleans up.
    fn check(
        &mut self,
        name: &str,
        copier: impl Fn(*mut u8, *const u8, usize),
        len: usize,
        src_offset: usize,
        dst_offset: usize,
    ) {
        let from = start(&self.src, src_offset);
        let to = start(&self.dst, dst_offset);
        let guarded = to - GUARD..to + len + GUARD;
        let mut expected = vec![UNTOUCHED; guarded.len()];
        expected[GUARD..GUARD + len].copy_from_slice(&self.src[from..from + len]);
        assert!(from + len <= self.src.len() && guarded.end <= self.dst.len());
        // SAFETY: both ranges are inside their vectors (just checked), which are two allocations.
        let (to_first, from_first) = unsafe { (self.dst.as_mut_ptr().add(to), self.src.as_ptr().add(from)) };
        copier(to_first, from_first, len);
        finish(CopyStrategy::Stream);
        assert!(
            self.dst[guarded.clone()] == expected,
            "{name}: {len} bytes, source at 64k+{src_offset}, destination at 64k+{dst_offset}"
        );
        self.dst[guarded].fill(UNTOUCHED);
    }
}

fn for_all(mut check: impl FnMut(&str, &dyn Fn(*mut u8, *const u8, usize))) {
    for implementation in available() {
        for (kind, copier) in [("plain", implementation.plain), ("stream", implementation.stream)] {
            // SAFETY: `Pair::check` passes ranges as `copy` asks for; `available` names only what this CPU can run.
            let copier = |dst, src, len| unsafe { copier(dst, src, len) };
            check(&format!("{} {kind}", implementation.name), &copier);
        }
    }
}

#[test]
fn every_small_size() {
    let longest = if cfg!(miri) { 40 } else { 1100 };
    let mut pair = Pair::new(longest);
    for_all(|name, copier| {
        for len in 0..=longest {
            for (src, dst) in [(0, 0), (0, 1), (1, 0), (3, 7), (63, 63), (8, 24)] {
                pair.check(name, copier, len, src, dst);
            }
        }
    });
}

#[test]
fn every_alignment() {
    let sizes: &[usize] = if cfg!(miri) { &[17] } else { &[1, 8, 64, 65, 255, 256, 257, 513, 2500] };
    let step = if cfg!(miri) { 13 } else { 1 };
    let mut pair = Pair::new(2500);
    for_all(|name, copier| {
        for &len in sizes {
            for src in (0..64).step_by(step) {
                for dst in (0..64).step_by(step) {
                    pair.check(name, copier, len, src, dst);
                }
            }
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "millions of interpreted bytes")]
fn big_sizes() {
    // Sizes below and above every threshold: prefetching from 32 KiB, parts from 16, 64 and 256 KiB and 1 MiB.
    let sizes = [
        (4 << 10) - 1,
        4 << 10,
        (16 << 10) + 63,
        (32 << 10) - 1,
        32 << 10,
        (32 << 10) + 1,
        (64 << 10) + 255,
        (80 << 10) + 17,
        256 << 10,
        (256 << 10) + 64,
        (512 << 10) - 1,
        512 << 10,
        (1 << 20) + 12345,
        (3 << 20) + 1,
    ];
    let mut pair = Pair::new(4 << 20);
    for_all(|name, copier| {
        for len in sizes {
            // 4095 apart: the offset at which loads alias with earlier stores.
            for (src, dst) in [(0, 0), (1, 0), (0, 1), (5, 43), (0, 4095), (7, 7), (43, 107)] {
                pair.check(name, copier, len, src, dst);
            }
        }
    });
}

/// Every loop that a setting may name, over lengths around the parts and bursts.
#[test]
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
fn every_stream_loop() {
    use super::StreamLoop;
    use super::stream_loop::BURSTS;
    let sizes = [256, 257, 4096, (16 << 10) + 63, (32 << 10) + 128, (1 << 20) + 12345];
    let mut pair = Pair::new(2 << 20);
    for implementation in available() {
        let Some(stream_by) = implementation.stream_by else { continue };
        for (streams, burst) in [1, 2, 4].into_iter().flat_map(|n| BURSTS.map(|burst| (n, burst))) {
            for (len, (src, dst)) in sizes.into_iter().flat_map(|len| [(0, 0), (5, 43)].map(|at| (len, at))) {
                let name = format!("{} {streams}x{burst}", implementation.name);
                // SAFETY: `check` passes ranges as `copy` asks for; `available` names only what this CPU can run.
                let copier =
                    |dst, src, len| unsafe { stream_by(StreamLoop::new(streams, burst), dst, src, len) };
                pair.check(&name, copier, len, src, dst);
            }
        }
    }
}

/// Four pieces of one length, each with guards; `offsets` is where their sources and
/// destinations lie in a line.
#[test]
fn four_at_once() {
    let sizes: &[usize] = if cfg!(miri) {
        &[0, 17]
    } else {
        &[0, 1, 63, 64, 255, 256, 257, 319, 320, 2048, 4095, 4096, 4097, 16384 + 77]
    };
    // All aligned; destinations aligned together; each with its own alignment.
    let offsets: [([usize; 4], [usize; 4]); 6] = [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 17, 0, 63], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [24, 24, 24, 24]),
        ([9, 8, 7, 6], [63, 63, 63, 63]),
        ([0, 0, 0, 0], [0, 0, 0, 1]),
        ([5, 0, 40, 2], [3, 64, 33, 1]),
    ];
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let mut pairs = [(); 4].map(|()| Pair::new(longest));
    for (i, pair) in pairs.iter_mut().enumerate() {
        pair.src.iter_mut().for_each(|byte| *byte = byte.wrapping_add(50 * i as u8));
    }
    for implementation in available() {
        for &len in sizes {
            for (from, to) in offsets {
                // From mutable pointers: the portable loops load by atomics, which miri permits only on those.
                let src = std::array::from_fn(|i| {
                    let at = start(&pairs[i].src, from[i]);
                    pairs[i].src[at..][..len].as_mut_ptr().cast_const()
                });
                let dst = std::array::from_fn(|i| {
                    let at = start(&pairs[i].dst, to[i]);
                    pairs[i].dst[at..][..len].as_mut_ptr()
                });
                // SAFETY: eight ranges of `len` bytes (just sliced) of eight allocations;
                // `available` names only what this CPU can run.
                unsafe { implementation.stream_four(dst, src, len) };
                finish(CopyStrategy::Stream);
                for (i, pair) in pairs.iter_mut().enumerate() {
                    let (from, to) = (start(&pair.src, from[i]), start(&pair.dst, to[i]));
                    let mut expected = vec![UNTOUCHED; pair.dst.len()];
                    expected[to..to + len].copy_from_slice(&pair.src[from..from + len]);
                    let name = implementation.name;
                    assert!(pair.dst == expected, "{name}: piece {i} of {len} bytes, {offsets:?}");
                    pair.dst.fill(UNTOUCHED);
                }
            }
        }
    }
}

#[test]
fn the_public_copy_moves_bytes() {
    let src: Vec<u8> = (0..200).collect();
    for strategy in [CopyStrategy::Plain, CopyStrategy::Stream] {
        let mut dst = vec![0; 200];
        // SAFETY: two vectors of 200 bytes each.
        unsafe { copy(strategy, dst.as_mut_ptr(), src.as_ptr(), 200) };
        finish(strategy);
        assert_eq!(dst, src);
    }
    let mut dst = [[0; 50]; 4];
    let to = dst.each_mut().map(|piece| piece.as_mut_ptr());
    let from = [0, 50, 100, 150].map(|at| src.as_ptr().wrapping_add(at));
    // SAFETY: four arrays, and four quarters of a vector, of 50 bytes each.
    unsafe { stream_four(to, from, 50) };
    finish(CopyStrategy::Stream);
    assert_eq!(dst.as_flattened(), src);
    assert_eq!(active().name, available()[0].name);
}

#[test]
fn the_strategy_follows_size_and_hint() {
    assert_eq!(strategy(0, Locality::Cold), CopyStrategy::Plain);
    assert_eq!(strategy(COLD_STREAM_FROM - 1, Locality::Cold), CopyStrategy::Plain);
    assert_eq!(strategy(COLD_STREAM_FROM, Locality::Cold), CopyStrategy::Stream);
    assert_eq!(strategy(STREAM_FROM - 1, Locality::Auto), CopyStrategy::Plain);
    assert_eq!(strategy(STREAM_FROM, Locality::Auto), CopyStrategy::Stream);
    assert_eq!(strategy(u64::MAX, Locality::Auto), CopyStrategy::Stream);
}

/// A thread that sees the flag also sees all words of the streaming copy before it, because of `finish`. Concurrent
/// copies do no harm.
#[test]
fn a_peer_thread_sees_finished_copies() {
    use std::sync::atomic::{AtomicU64, Ordering};
    const WORDS: usize = if cfg!(miri) { 16 } else { 512 };
    let rounds = if cfg!(miri) { 3 } else { 20_000 };
    let memory: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let seen: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let (flag, ready) = (AtomicU64::new(0), AtomicU64::new(0));
    let address = |words: &[AtomicU64]| words[..].as_ptr().cast::<u8>().cast_mut();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                while ready.load(Ordering::Acquire) != round - 1 {
                    std::thread::yield_now();
                }
                let source = vec![round; WORDS];
                // SAFETY: WORDS words on both sides; `memory` is only reached through
                // atomics and `copy`.
                unsafe { copy(CopyStrategy::Stream, address(&memory), source.as_ptr().cast(), 8 * WORDS) };
                finish(CopyStrategy::Stream);
                flag.store(round, Ordering::Release);
            }
        });
        for round in 1..=rounds {
            loop {
                let done = flag.load(Ordering::Acquire) == round;
                // Concurrent copies are allowed. Their bytes are a mix.
                // SAFETY: as above, into `seen`.
                unsafe { copy(CopyStrategy::Plain, address(&seen), address(&memory), 8 * WORDS) };
                if done {
                    break;
                }
                std::thread::yield_now();
            }
            assert!(seen.iter().all(|word| word.load(Ordering::Relaxed) == round));
            ready.store(round, Ordering::Release);
        }
    });
}
