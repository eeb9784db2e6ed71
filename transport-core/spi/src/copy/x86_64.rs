//! The copies of x86_64: they cut a range into the pieces that the loops of `vector` copy.

use super::implementation::Implementation;
use super::small::{SMALL, small};
use super::stream_loop::StreamLoop;
use super::trials::{PAGES, RANGES, SAMPLE};
use super::vector::{AHEAD, Avx2, Avx512, LINE, PAIR, Sse2, TURN, Vector};

/// 64-byte registers. Only for CPUs with AVX-512F.
pub(super) static AVX512: Implementation = implementation::<Avx512, false>("avx512");

/// As [`AVX512`], with prefetches: for Intel's CPUs.
pub(super) static AVX512_AHEAD: Implementation = implementation::<Avx512, true>("avx512, prefetching");

/// 32-byte registers. Only for CPUs with AVX2.
pub(super) static AVX2: Implementation = implementation::<Avx2, false>("avx2");

/// 16-byte registers.
pub(super) static SSE2: Implementation = implementation::<Sse2, false>("sse2");

/// On Intel's CPUs, a plain copy of at least this many bytes prefetches. A shorter copy touches less than 64 KiB of
/// source and destination together. An L1 of 48 KiB holds at least three quarters of that, so prefetches would only
/// cost issue slots. For longer copies they gain 5 to 15 % (Sapphire Rapids). On a Zen 4, they make no difference up to
/// 512 KiB, and lose 20 % at 1 MiB: without them, the plain loop is as fast as memcpy there
/// (`benches/benches/copy.rs`).
const AHEAD_FROM: usize = 32 << 10;

/// A streaming copy copies shorter pieces without streaming: the alignment would cost more than it gains.
const STREAM_PIECE: usize = 256;

/// A shorter range is no trial of a loop: it has few parts.
const TRIED_FROM: usize = 64 << 10;

/// The distances in bytes between the parts that a streaming copy copies side by side, by the loop of
/// [`StreamLoop`]. It tries them in this order.
///
/// A hardware prefetcher follows a stream only to the end of its page, and then has to start again (Intel Optimization
/// Reference Manual, "Data Prefetching"). With parts in four pages, some prefetchers are always active. glibc's memcpy
/// does the same above its own threshold. GB/s:
///
/// | | Sapphire Rapids, in no cache | Zen 4, huge pages |
/// |---|---|---|
/// | one stream | 9.5 | 18.7 |
/// | one stream, `prefetcht0` 1 KiB ahead | 11.5 | |
/// | parts 4 KiB apart | 13.2 | 15.5 |
/// | parts 16 KiB apart | 13.5 | 18.8 |
/// | parts 64 KiB apart | 13.9 | 20.3 |
/// | parts 256 KiB to 1 MiB apart | | 21.8 |
///
/// `prefetchnta` made the copy slower. Parts inside one page gain nothing.
const APART: [usize; 4] = [256 << 10, 64 << 10, 16 << 10, 4 << 10];

const fn implementation<V: Vector, const PREFETCH: bool>(name: &'static str) -> Implementation {
    Implementation {
        name,
        plain: plain::<V, PREFETCH>,
        stream: stream::<V>,
        stream_four: Some(stream_four::<V>),
        stream_by: Some(stream_by::<V>),
    }
}

/// # Safety
/// Those of [`copy`](super::copy), and the CPU has `V`'s instructions.
unsafe fn plain<V: Vector, const PREFETCH: bool>(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for `len` bytes and the CPU; each function names
    // what it moves, always inside them.
    unsafe {
        if len <= SMALL {
            small(dst, src, len);
        } else {
            if len <= 2 * TURN {
                lines::<V>(dst, src, len);
            } else {
                long::<V, PREFETCH>(dst, src, len);
            }
            V::reset_registers();
        }
    }
}

/// Copies 65 to 512 bytes: half of the lines from the front, the others from the back.
///
/// # Safety
/// Those of [`plain`], and `SMALL < len <= 2 * TURN`.
#[inline(always)]
unsafe fn lines<V: Vector>(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: each branch has checked that `len` holds the lines it moves, from either end.
    unsafe {
        let back = |lines: usize| len - lines * LINE;
        V::line(dst, src);
        if len > 2 * LINE {
            V::line(dst.add(LINE), src.add(LINE));
            if len > TURN {
                V::line(dst.add(2 * LINE), src.add(2 * LINE));
                V::line(dst.add(3 * LINE), src.add(3 * LINE));
                V::line(dst.add(back(4)), src.add(back(4)));
                V::line(dst.add(back(3)), src.add(back(3)));
            }
            V::line(dst.add(back(2)), src.add(back(2)));
        }
        V::line(dst.add(back(1)), src.add(back(1)));
    }
}

/// Copies more than 512 bytes: first one line; then turns from the first aligned line of `dst` on; at last one turn
/// that ends where the range ends. Neighbouring parts may overlap.
///
/// # Safety
/// Those of [`plain`], and `len > 2 * TURN`.
#[inline(always)]
unsafe fn long<V: Vector, const PREFETCH: bool>(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: `at` grows by what was moved and stays below `len`; the last turn
    // begins at `len - TURN`, which is positive.
    unsafe {
        V::line(dst, src);
        let mut at = LINE - dst.addr() % LINE;
        if PREFETCH && len >= AHEAD_FROM {
            // The prefetches stay inside the range: behind it, `prefetchw` would take cache lines away from other
            // cores.
            let turns = (len - at - AHEAD) / TURN;
            V::plain_ahead(dst.add(at), src.add(at), turns);
            at += turns * TURN;
        }
        // The last turn always has at least one byte of its own.
        let turns = (len - at - 1) / TURN;
        if turns > 0 {
            V::plain(dst.add(at), src.add(at), turns);
        }
        V::plain(dst.add(len - TURN), src.add(len - TURN), 1);
    }
}

/// # Safety
/// Those of [`copy`](super::copy), and the CPU has `V`'s instructions.
unsafe fn stream<V: Vector>(dst: *mut u8, src: *const u8, len: usize) {
    if len < STREAM_PIECE {
        // SAFETY: the caller's promise, unchanged.
        return unsafe { plain::<V, false>(dst, src, len) };
    }
    let no_trial = || (len < TRIED_FROM).then(|| RANGES.choice().stream_loop);
    if let Some(stream_loop) = RANGES.settled().or_else(no_trial) {
        // SAFETY: the caller's promise, unchanged.
        return unsafe { stream_by::<V>(stream_loop, dst, src, len) };
    }
    // Each trial but the last ends at the end of a line.
    let mut at = 0;
    while at < len {
        let to = dst.wrapping_add(at);
        let most = SAMPLE + to.addr().wrapping_neg() % LINE;
        let piece = if len - at < most + TRIED_FROM { len - at } else { most };
        // SAFETY: `at + piece <= len`, and the caller vouches for `len` bytes.
        RANGES.run(piece, |it| unsafe { stream_by::<V>(it, to, src.wrapping_add(at), piece) });
        at += piece;
    }
}

/// Streams a range by a given loop.
///
/// # Safety
/// Those of [`stream`], and `len >= LINE`.
unsafe fn stream_by<V: Vector>(stream_loop: StreamLoop, dst: *mut u8, src: *const u8, len: usize) {
    // Head and tail must not write a line that is also streamed. If they did, the CPU would read that line from memory,
    // and evict it again.
    let mut at = dst.addr().wrapping_neg() % LINE;
    // SAFETY: `at` grows by what was moved and never passes `len`, up to which the
    // caller vouches; it is less than a line at first, and `dst.add(at)` is aligned.
    unsafe {
        small(dst, src, at);
        let StreamLoop { streams, burst } = stream_loop;
        for apart in APART.into_iter().filter(|_| streams > 1) {
            while len - at >= streams * apart {
                let part = |number: usize| (dst.add(at + number * apart), src.add(at + number * apart));
                match streams {
                    2 => side_by_side::<V, 2>([part(0), part(1)], apart, burst),
                    _ => side_by_side::<V, 4>([part(0), part(1), part(2), part(3)], apart, burst),
                }
                at += streams * apart;
            }
        }
        let turns = (len - at) / TURN;
        if turns > 0 {
            V::stream(dst.add(at), src.add(at), turns);
            at += turns * TURN;
        }
        while len - at > SMALL {
            V::line(dst.add(at), src.add(at));
            at += LINE;
        }
        V::reset_registers();
        small(dst.add(at), src.add(at), len - at);
    }
}

/// Streams ranges side by side, `burst` bytes of one before it continues with the next.
///
/// # Safety
/// `len` bytes are readable at the second of each pair and writable at the first, which is aligned to a line; `len` is
/// a multiple of [`PAIR`], and `burst` is `PAIR` or a multiple of [`TURN`]; the CPU has `V`'s instructions.
#[inline(always)]
unsafe fn side_by_side<V: Vector, const N: usize>(
    ranges: [(*mut u8, *const u8); N],
    len: usize,
    burst: usize,
) {
    let burst = if burst < TURN { PAIR } else { burst };
    let whole = len - len % burst;
    // SAFETY: each copy begins at a multiple of a pair and ends at or before `len`.
    unsafe {
        if burst == PAIR {
            for at in (0..whole).step_by(PAIR) {
                for (dst, src) in ranges {
                    V::stream_pair(dst.add(at), src.add(at));
                }
            }
            return;
        }
        for at in (0..whole).step_by(burst) {
            for (dst, src) in ranges {
                V::stream(dst.add(at), src.add(at), burst / TURN);
            }
        }
        for (dst, src) in ranges {
            for at in (whole..len).step_by(PAIR) {
                V::stream_pair(dst.add(at), src.add(at));
            }
        }
    }
}

/// Streams four pieces side by side if their destinations are equally far from the start of a line. Otherwise, and if
/// they are shorter than [`STREAM_PIECE`], copies them one by one.
///
/// A prefetch of the first lines of the next four pieces, for their TLB entries, gained nothing: 9.7 GB/s without and
/// 9.8 with it for 4 KiB, 13.7 and 13.3 for 16 KiB (Zen 4, in no cache).
///
/// # Safety
/// Those of [`stream_four`](super::stream_four), and the CPU has `V`'s instructions.
unsafe fn stream_four<V: Vector>(dst: [*mut u8; 4], src: [*const u8; 4], len: usize) {
    let head = dst[0].addr().wrapping_neg() % LINE;
    let together = dst.iter().all(|dst| dst.addr().wrapping_neg() % LINE == head);
    if !together || len < STREAM_PIECE {
        // SAFETY: the caller's promise, for each of the four.
        return (0..4).for_each(|i| unsafe { stream::<V>(dst[i], src[i], len) });
    }
    let tail = (len - head) % LINE;
    let pairs = (len - head) / PAIR * PAIR;
    let ranges = [0, 1, 2, 3].map(|i| (dst[i].wrapping_add(head), src[i].wrapping_add(head)));
    // SAFETY: the caller vouches for `len` bytes of each, which are `head`, `pairs` (not
    // 0, since a piece is longer than a pair and a line), perhaps a line, and `tail`;
    // `head` aligns every `dst`.
    unsafe {
        PAGES.run(4 * pairs, |it| side_by_side::<V, 4>(ranges, pairs, it.burst));
        for (dst, src) in dst.into_iter().zip(src) {
            if head + pairs + tail < len {
                V::line(dst.add(head + pairs), src.add(head + pairs));
            }
        }
        V::reset_registers();
        for (dst, src) in dst.into_iter().zip(src) {
            small(dst, src, head);
            small(dst.add(len - tail), src.add(len - tail), tail);
        }
    }
}
