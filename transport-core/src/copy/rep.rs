//! `rep movsb`, for big plain copies on AMD's CPUs with AVX-512.
//!
//! From 512 KiB to 4 MiB both sides have left a Zen 4's L2 (1 MiB) and lie in its L3. There
//! the vector loop moves 39 GB/s, `rep movsb` 48 to 49, and glibc's memcpy, which uses
//! it, 48. Sapphire Rapids is the other way round: there the vector loop wins. Hence the
//! vendor's name. Zen 3 has a fast `rep movsb` too, but no AVX-512: nobody measured it.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

use super::vector::LINE;

/// Plain copies of this many bytes go this way: 512 KiB. Below, the vector loop is as fast
/// (56 GB/s each at 256 KiB, Zen 4).
pub(super) const FROM: usize = 512 << 10;

/// Whether this CPU is AMD's and has a fast `rep movsb` (ERMS).
pub(super) fn is_fast() -> bool {
    let leaf = __cpuid(0);
    let amd = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    // Leaf 7, EBX bit 9: "enhanced rep movsb/stosb".
    amd && leaf.eax >= 7 && __cpuid_count(7, 0).ebx & (1 << 9) != 0
}

/// Whether [`copy`] is the best way for these bytes.
///
/// With a destination 1 to 63 bytes past the source, modulo 4 KiB, Zen 4's `rep movsb`
/// falls to 1.6 to 3.5 GB/s (glibc's memcpy with it, up to 768 KiB). Sides congruent modulo a
/// line never get there, and pages are: at 512 KiB and 1 MiB all that were tried ran at 47 to 50.
#[inline(always)]
pub(super) fn suits(dst: *mut u8, src: *const u8, len: usize) -> bool {
    len >= FROM && (dst.addr() ^ src.addr()).is_multiple_of(LINE)
}

/// # Safety
/// Those of [`copy`](super::copy).
#[inline(always)]
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    // The direction flag is clear in `asm!`. The stores may become visible in any order
    // among themselves, but before every later store, so that no fence is owed (Intel SDM
    // vol. 3, "Fast-String Operation and Out-of-Order Stores"; Linux's own memcpy rests
    // on the same with AMD's CPUs).
    // SAFETY: the caller vouches for `len` bytes of both ranges.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _, inout("rdi") dst => _, inout("rsi") src => _,
            options(nostack, preserves_flags),
        );
    }
}
