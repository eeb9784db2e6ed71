//! The x86_64 loops, one set for each width of register.
//!
//! All copy *lines* of 64 bytes. One iteration of a loop, a *turn*, copies four lines: by four zmm, eight ymm or
//! sixteen xmm registers. The loads of a turn come before its stores. Otherwise a load would wait for an earlier store
//! of the same turn whose address is equal in the low 12 bits (4K aliasing).

use std::arch::asm;

/// A cache line.
pub(super) const LINE: usize = 64;

/// The bytes that one turn of a loop copies.
pub(super) const TURN: usize = 4 * LINE;

/// The least bytes of one range that a streaming copy of several ranges copies before it continues with the next range.
pub(super) const PAIR: usize = 2 * LINE;

/// The distance in bytes at which [`Vector::plain_ahead`] prefetches. Of 1, 2, 4 and 8 KiB, 2 KiB was the fastest on
/// Sapphire Rapids.
pub(super) const AHEAD: usize = 2048;

/// The loops of one register width.
///
/// # Safety
/// For every function: the CPU has the instructions, the bytes named are readable at
/// `src` and writable at `dst`, and the two ranges do not overlap.
pub(super) trait Vector {
    /// Copies 64 bytes, at any alignment.
    unsafe fn line(dst: *mut u8, src: *const u8);
    /// Copies `turns >= 1` turns.
    unsafe fn plain(dst: *mut u8, src: *const u8, turns: usize);
    /// As `plain`, and prefetches source and destination [`AHEAD`] bytes ahead.
    unsafe fn plain_ahead(dst: *mut u8, src: *const u8, turns: usize);
    /// Copies `turns >= 1` turns with non-temporal stores; `dst` is aligned to a line.
    unsafe fn stream(dst: *mut u8, src: *const u8, turns: usize);
    /// Copies one [`PAIR`] with non-temporal stores; `dst` is aligned to a line.
    unsafe fn stream_pair(dst: *mut u8, src: *const u8);
    /// Resets the upper halves of the registers (`vzeroupper`), if code without AVX would be slow otherwise.
    unsafe fn reset_registers();
}

macro_rules! vector {
    (
        $(#[$doc:meta])* $name:ident: $load:literal, $store:literal, $stream:literal,
        line [$($one:literal $at:literal),*],
        pair [$($half:literal $within:literal),*],
        turn [$($register:literal $offset:literal),*],
        clobbers [$($clobber:tt),*], leave [$($leave:literal, $($left:tt),*)?]
    ) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Vector for $name {
            #[inline(always)]
            unsafe fn line(dst: *mut u8, src: *const u8) {
                // SAFETY: the caller vouches for one line of both ranges and the CPU.
                unsafe {
                    asm!(
                        $(concat!($load, " ", $one, ", [{s} + ", $at, "]"),)*
                        $(concat!($store, " [{d} + ", $at, "], ", $one),)*
                        s = in(reg) src, d = in(reg) dst,
                        $(out($clobber) _,)*
                        options(nostack, preserves_flags),
                    );
                }
            }

            #[inline(always)]
            unsafe fn plain(dst: *mut u8, src: *const u8, turns: usize) {
                vector!(@loop dst, src, turns, [], $load, $store,
                    [$($register $offset),*], [$($clobber),*]);
            }

            #[inline(always)]
            unsafe fn plain_ahead(dst: *mut u8, src: *const u8, turns: usize) {
                vector!(@loop dst, src, turns, [
                    "prefetcht0 [{s} + {ahead}]" "prefetcht0 [{s} + {ahead} + 64]"
                    "prefetcht0 [{s} + {ahead} + 128]" "prefetcht0 [{s} + {ahead} + 192]"
                    "prefetchw [{d} + {ahead}]" "prefetchw [{d} + {ahead} + 64]"
                    "prefetchw [{d} + {ahead} + 128]" "prefetchw [{d} + {ahead} + 192]"
                ], $load, $store, [$($register $offset),*], [$($clobber),*], ahead = const AHEAD);
            }

            #[inline(always)]
            unsafe fn stream(dst: *mut u8, src: *const u8, turns: usize) {
                vector!(@loop dst, src, turns, [], $load, $stream,
                    [$($register $offset),*], [$($clobber),*]);
            }

            #[inline(always)]
            unsafe fn stream_pair(dst: *mut u8, src: *const u8) {
                // SAFETY: the caller vouches for one pair of both ranges and the CPU.
                unsafe {
                    asm!(
                        $(concat!($load, " ", $half, ", [{s} + ", $within, "]"),)*
                        $(concat!($stream, " [{d} + ", $within, "], ", $half),)*
                        s = in(reg) src, d = in(reg) dst,
                        $(out($clobber) _,)*
                        options(nostack, preserves_flags),
                    );
                }
            }

            #[inline(always)]
            unsafe fn reset_registers() {
                $(
                    // SAFETY: the caller vouches for the CPU; all it changes is declared.
                    unsafe { asm!($leave, $(out($left) _,)* options(nostack, preserves_flags)) }
                )?
            }
        }
    };
    (
        @loop $dst:ident, $src:ident, $turns:ident, [$($prefetch:literal)*], $load:literal, $store:literal,
        [$($register:literal $offset:literal),*], [$($clobber:tt),*] $(, $($extra:tt)*)?
    ) => {
        // SAFETY: the caller vouches for `turns` turns of both ranges and the CPU; a
        // prefetch cannot fault.
        unsafe {
            asm!(
                ".p2align 4",
                "2:",
                $($prefetch,)*
                $(concat!($load, " ", $register, ", [{s} + ", $offset, "]"),)*
                $(concat!($store, " [{d} + ", $offset, "], ", $register),)*
                "add {s}, 256",
                "add {d}, 256",
                "dec {n}",
                "jnz 2b",
                s = inout(reg) $src => _, d = inout(reg) $dst => _, n = inout(reg) $turns => _,
                $(out($clobber) _,)*
                $($($extra)*,)?
                options(nostack),
            );
        }
    };
}

vector! {
    /// AVX-512F. Code without AVX does not use the registers from 16 on, so they need no `vzeroupper`.
    Avx512: "vmovdqu64", "vmovdqu64", "vmovntdq",
    line ["zmm16" "0"],
    pair ["zmm16" "0", "zmm17" "64"],
    turn ["zmm16" "0", "zmm17" "64", "zmm18" "128", "zmm19" "192"],
    clobbers ["zmm16", "zmm17", "zmm18", "zmm19"], leave []
}

vector! {
    /// AVX2.
    Avx2: "vmovdqu", "vmovdqu", "vmovntdq",
    line ["ymm0" "0", "ymm1" "32"],
    pair ["ymm0" "0", "ymm1" "32", "ymm2" "64", "ymm3" "96"],
    turn [
        "ymm0" "0", "ymm1" "32", "ymm2" "64", "ymm3" "96",
        "ymm4" "128", "ymm5" "160", "ymm6" "192", "ymm7" "224"
    ],
    clobbers ["ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7"],
    leave [
        "vzeroupper", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7",
        "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15"
    ]
}

vector! {
    /// SSE2, which every x86_64 CPU has.
    Sse2: "movdqu", "movdqu", "movntdq",
    line ["xmm0" "0", "xmm1" "16", "xmm2" "32", "xmm3" "48"],
    pair [
        "xmm0" "0", "xmm1" "16", "xmm2" "32", "xmm3" "48",
        "xmm4" "64", "xmm5" "80", "xmm6" "96", "xmm7" "112"
    ],
    turn [
        "xmm0" "0", "xmm1" "16", "xmm2" "32", "xmm3" "48",
        "xmm4" "64", "xmm5" "80", "xmm6" "96", "xmm7" "112",
        "xmm8" "128", "xmm9" "144", "xmm10" "160", "xmm11" "176",
        "xmm12" "192", "xmm13" "208", "xmm14" "224", "xmm15" "240"
    ],
    clobbers [
        "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
        "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
    ],
    leave []
}
