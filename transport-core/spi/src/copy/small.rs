//! Copies of up to 64 bytes on x86_64, without a loop. As in glibc's memcpy, each size class copies two halves, which
//! may overlap. Uses only instructions that every x86_64 CPU has.

use std::arch::asm;

/// The most bytes that [`small`] takes.
pub(super) const SMALL: usize = 64;

/// Copies a range that is as long as one to two registers: the first register's bytes and the last register's bytes,
/// which may overlap.
macro_rules! ends {
    ($dst:ident, $src:ident, $len:ident, $size:literal, $mov:literal, $class:ident $($modifier:literal)?) => {
        asm!(
            concat!($mov, " {a", $($modifier,)? "}, [{s}]"),
            concat!($mov, " {b", $($modifier,)? "}, [{s} + {n} - ", $size, "]"),
            concat!($mov, " [{d}], {a", $($modifier,)? "}"),
            concat!($mov, " [{d} + {n} - ", $size, "], {b", $($modifier,)? "}"),
            d = in(reg) $dst, s = in(reg) $src, n = in(reg) $len,
            a = out($class) _, b = out($class) _,
            options(nostack, preserves_flags),
        )
    };
}

/// Copies at most [`SMALL`] bytes. Eight bytes (and four, two, one) are one load and one store, so that an aligned word
/// is never a mix of old and new bytes.
///
/// # Safety
/// Those of [`copy`](super::copy), and `len <= SMALL`.
#[inline(always)]
pub(super) unsafe fn small(dst: *mut u8, src: *const u8, len: usize) {
    debug_assert!(len <= SMALL);
    // SAFETY: each arm touches the first and the last bytes of the two ranges, never
    // more than `len` of them; the caller vouches for those.
    unsafe {
        match len {
            33.. => asm!(
                "movups {a}, [{s}]",
                "movups {b}, [{s} + 16]",
                "movups {y}, [{s} + {n} - 32]",
                "movups {z}, [{s} + {n} - 16]",
                "movups [{d}], {a}",
                "movups [{d} + 16], {b}",
                "movups [{d} + {n} - 32], {y}",
                "movups [{d} + {n} - 16], {z}",
                d = in(reg) dst, s = in(reg) src, n = in(reg) len,
                a = out(xmm_reg) _, b = out(xmm_reg) _, y = out(xmm_reg) _, z = out(xmm_reg) _,
                options(nostack, preserves_flags),
            ),
            16..=32 => ends!(dst, src, len, "16", "movups", xmm_reg),
            8..=15 => ends!(dst, src, len, "8", "mov", reg),
            4..=7 => ends!(dst, src, len, "4", "mov", reg ":e"),
            2..=3 => ends!(dst, src, len, "2", "mov", reg ":x"),
            1 => asm!(
                "mov {a}, byte ptr [{s}]",
                "mov byte ptr [{d}], {a}",
                d = in(reg) dst, s = in(reg) src, a = out(reg_byte) _,
                options(nostack, preserves_flags),
            ),
            0 => {}
        }
    }
}
