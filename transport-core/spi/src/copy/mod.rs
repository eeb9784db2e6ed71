//! Copies from and to memory that another thread, process or device may write at the same time.
//!
//! In Rust's memory model such a race is undefined behaviour. So these copies are outside of the model. On x86_64 and
//! aarch64 they are inline `asm!`, which the compiler treats as an unknown access to memory. On other architectures,
//! and under miri and loom, they are relaxed atomics. If others write bytes during a copy, the copy is some mix of old
//! and new bytes, and nothing else. A checksum or a completion has to tell whether the bytes are complete.
//!
//! Reading order: this file, `implementation` (which loop this CPU runs), then `x86_64` with `vector` and `small`, and
//! `aarch64`. `stream_loop` and `trials` say how many ranges a streaming copy copies side by side.

#[cfg(all(target_arch = "aarch64", not(any(miri, multirail_loom))))]
mod aarch64;
mod implementation;
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
mod small;
mod stream_loop;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
mod trials;
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
mod vector;
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
mod x86_64;

use crate::Locality;
pub use stream_loop::{LoopOrigin, StreamChoice, StreamLoop};

/// An operation of at least this many bytes *streams*, even without a hint of the caller: it is copied past the caches
/// ([`CopyStrategy::Stream`]). 16 MiB.
///
/// No core has a private cache of this size. So the bytes come from memory and go to memory, unless a large shared
/// cache holds source and destination. In that case streaming loses 20 % (16 to 32 MiB, Sapphire Rapids with 480 MiB of
/// L3); otherwise it gains 90 %. glibc's threshold depends on the shared cache, and is too high (240 MiB on a Zen 4
/// with 32 MiB).
pub const STREAM_FROM: u64 = 16 << 20;

/// An operation of at least this many bytes streams, if its bytes are in no cache ([`Locality::Cold`]): 2 KiB.
///
/// Measured with one fence per operation, on pieces at random places of a buffer of 1 GiB (Sapphire Rapids): streaming
/// costs 25 % at 512 B, gains 8 % at 1 KiB, 25 % at 2 KiB, 15 to 25 % at 4 KiB and 50 % at 16 KiB. At 1 KiB, the next
/// reader's cache misses cost more than streaming gains.
pub const COLD_STREAM_FROM: u64 = 2 << 10;

/// How a copy moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyStrategy {
    /// Through the caches, like memcpy.
    Plain,
    /// Past the caches, with non-temporal stores: for bytes that nobody reads soon. The caller calls [`finish`] before
    /// it tells anybody that the bytes are there.
    Stream,
}

/// Chooses a strategy by the bytes of the whole operation, not of one of its pages, and by what the caller knows about
/// the caches.
///
/// ```
/// use multirail_spi::{Locality, copy::{CopyStrategy, strategy}};
/// assert_eq!(strategy(4 << 10, Locality::Auto), CopyStrategy::Plain);
/// assert_eq!(strategy(4 << 10, Locality::Cold), CopyStrategy::Stream);
/// assert_eq!(strategy(64 << 20, Locality::Auto), CopyStrategy::Stream);
/// ```
#[inline]
pub fn strategy(operation_bytes: u64, locality: Locality) -> CopyStrategy {
    let from = match locality {
        Locality::Cold => COLD_STREAM_FROM,
        Locality::Auto => STREAM_FROM,
    };
    if operation_bytes >= from { CopyStrategy::Stream } else { CopyStrategy::Plain }
}

/// Copies `len` bytes from `src` to `dst`, while others may read or write them.
///
/// The copy does not fence: call [`finish`] after the last copy of an operation.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst` until the call returns,
/// the two ranges do not overlap, and no Rust reference to `dst`'s bytes is alive.
#[inline]
pub unsafe fn copy(strategy: CopyStrategy, dst: *mut u8, src: *const u8, len: usize) {
    let implementation = implementation::active();
    let copier = match strategy {
        CopyStrategy::Plain => implementation.plain,
        CopyStrategy::Stream => implementation.stream,
    };
    // SAFETY: the ranges are as the caller promises; `active` only names loops that
    // this CPU can run.
    unsafe { copier(dst, src, len) }
}

/// Copies `len` bytes for each pair of a destination and a source, like calls of [`copy`]. Takes fewer instructions for
/// many short copies.
///
/// # Safety
/// Those of [`copy`], for each pair.
#[inline]
pub unsafe fn copy_each(
    strategy: CopyStrategy,
    ends: impl IntoIterator<Item = (*mut u8, *const u8)>,
    len: usize,
) {
    let implementation = implementation::active();
    let copier = match strategy {
        CopyStrategy::Plain => implementation.plain,
        CopyStrategy::Stream => implementation.stream,
    };
    for (dst, src) in ends {
        // SAFETY: as in `copy`.
        unsafe { copier(dst, src, len) }
    }
}

/// Copies four times `len` bytes with [`CopyStrategy::Stream`], like four calls of [`copy`] in any order. Does not
/// fence.
///
/// On CPUs that gain by it, the four copies advance side by side, so that their TLB misses overlap. Use it for
/// scattered pages of memory that is mapped in 4 KiB pages. GB/s for random pages of a memfd that are in no cache (Zen
/// 4):
///
/// | page size | memcpy | four calls of [`copy`] | `stream_four` |
/// |---|---|---|---|
/// | 4 KiB | 4.9 | 5.9 | 9.7 |
/// | 16 KiB | 6.4 | 10.9 | 13.7 |
/// | 64 KiB | 8.2 | 13.6 | 15.3 |
///
/// # Safety
/// Those of [`copy`], for each of the four. Destinations may overlap each other: bytes that are in two of them become
/// some mix of both sources.
#[inline]
pub unsafe fn stream_four(dst: [*mut u8; 4], src: [*const u8; 4], len: usize) {
    // SAFETY: the ranges are as the caller promises; `active` only names loops that
    // this CPU can run.
    unsafe { implementation::active().stream_four(dst, src, len) }
}

/// Flushes stores, if `strategy` is [`CopyStrategy::Stream`]. Call it after the copies of an operation and before its
/// completion or imm is published.
///
/// Non-temporal stores wait in write-combining buffers and may become visible after
/// later ordinary stores, a release store among them (Intel SDM vol. 1, 10.4.6.2).
#[inline]
pub fn finish(strategy: CopyStrategy) {
    if strategy == CopyStrategy::Stream {
        fence();
    }
}

#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
#[inline]
fn fence() {
    // SAFETY: sfence is in every x86_64 CPU and touches no register or memory.
    unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) }
}

#[cfg(all(target_arch = "aarch64", not(any(miri, multirail_loom))))]
#[inline]
fn fence() {
    // `stnp` needs no barrier of its own. But as on x86_64, even a relaxed store after `finish` must become visible
    // after the copied bytes. SAFETY: a barrier touches no register or memory.
    unsafe { std::arch::asm!("dmb ishst", options(nostack, preserves_flags)) }
}

#[cfg(any(miri, multirail_loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[inline]
fn fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}
