//! The copies of aarch64, by pairs of 16-byte registers.

use std::arch::asm;

use super::implementation::Implementation;

/// NEON registers, which every aarch64 CPU that Rust's std supports has.
pub(super) static NEON: Implementation =
    Implementation { name: "neon", plain, stream, stream_four: None, stream_by: None };

/// The bytes that one iteration of a loop, a *turn*, copies.
const TURN: usize = 128;

/// A streaming copy copies shorter pieces without streaming.
const STREAM_PIECE: usize = 256;

/// Copies `turns >= 1` turns of 128 bytes: loads first, then stores.
macro_rules! turns {
    ($load:literal, $store:literal, $dst:expr, $src:expr, $turns:expr) => {
        asm!(
            ".p2align 4",
            "2:",
            concat!($load, " q0, q1, [{s}]"),
            concat!($load, " q2, q3, [{s}, #32]"),
            concat!($load, " q4, q5, [{s}, #64]"),
            concat!($load, " q6, q7, [{s}, #96]"),
            concat!($store, " q0, q1, [{d}]"),
            concat!($store, " q2, q3, [{d}, #32]"),
            concat!($store, " q4, q5, [{d}, #64]"),
            concat!($store, " q6, q7, [{d}, #96]"),
            "add {s}, {s}, #128",
            "add {d}, {d}, #128",
            "subs {n}, {n}, #1",
            "b.ne 2b",
            s = inout(reg) $src => _, d = inout(reg) $dst => _, n = inout(reg) $turns => _,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            out("v4") _, out("v5") _, out("v6") _, out("v7") _,
            options(nostack),
        )
    };
}

/// Copies a range that is as long as one to two registers: the first register's bytes and the last register's bytes,
/// which may overlap. The last register's bytes begin at `back`.
macro_rules! ends {
    ($load:literal, $store:literal, $class:ident $modifier:literal, $dst:ident, $src:ident, $back:expr) => {
        asm!(
            concat!($load, " {a:", $modifier, "}, [{s}]"),
            concat!($load, " {b:", $modifier, "}, [{s_end}]"),
            concat!($store, " {a:", $modifier, "}, [{d}]"),
            concat!($store, " {b:", $modifier, "}, [{d_end}]"),
            s = in(reg) $src, d = in(reg) $dst,
            s_end = in(reg) $src.add($back), d_end = in(reg) $dst.add($back),
            a = out($class) _, b = out($class) _,
            options(nostack, preserves_flags),
        )
    };
}

/// Copies at most 32 bytes. Eight bytes (and four, two, one) are one load and one store, so that an aligned word is
/// never a mix of old and new bytes.
///
/// # Safety
/// Those of [`copy`](super::copy), and `len <= 32`.
#[inline(always)]
unsafe fn small(dst: *mut u8, src: *const u8, len: usize) {
    debug_assert!(len <= 32);
    // SAFETY: each arm touches the first and the last bytes of the two ranges, never
    // more than `len` of them; the caller vouches for those.
    unsafe {
        match len {
            16.. => ends!("ldr", "str", vreg "q", dst, src, len - 16),
            8..=15 => ends!("ldr", "str", reg "x", dst, src, len - 8),
            4..=7 => ends!("ldr", "str", reg "w", dst, src, len - 4),
            2..=3 => ends!("ldrh", "strh", reg "w", dst, src, len - 2),
            1 => ends!("ldrb", "strb", reg "w", dst, src, 0),
            0 => {}
        }
    }
}

/// # Safety
/// Those of [`copy`](super::copy).
unsafe fn plain(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for `len` bytes; `at` grows by what was moved, and
    // the last turn begins at `len - TURN`, only when that is not negative.
    unsafe {
        let mut at = 0;
        if len >= TURN {
            // From the second turn on, `dst` is aligned. The last turn ends with the range.
            turns!("ldp", "stp", dst, src, 1usize);
            at = TURN - dst.addr() % 16;
            let turns = (len - at) / TURN;
            if turns > 0 {
                turns!("ldp", "stp", dst.add(at), src.add(at), turns);
            }
            turns!("ldp", "stp", dst.add(len - TURN), src.add(len - TURN), 1usize);
            return;
        }
        while len - at > 32 {
            small(dst.add(at), src.add(at), 32);
            at += 32;
        }
        small(dst.add(at), src.add(at), len - at);
    }
}

/// # Safety
/// Those of [`copy`](super::copy).
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for `len` bytes; `at` grows by what was moved, and
    // never passes `len`.
    unsafe {
        if len < STREAM_PIECE {
            return plain(dst, src, len);
        }
        // Streams whole lines, so that the CPU combines the stores of one line.
        let at = dst.addr().wrapping_neg() % 64;
        plain(dst, src, at);
        let turns = (len - at) / TURN;
        turns!("ldnp", "stnp", dst.add(at), src.add(at), turns);
        let at = at + turns * TURN;
        plain(dst.add(at), src.add(at), len - at);
    }
}
