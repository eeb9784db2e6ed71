//! Relaxed atomics: for architectures without a loop of their own, and for miri and
//! loom, which cannot see through assembly. Racing bytes are no data race here.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::implementation::Implementation;

/// Eight bytes at a time where both sides can be aligned together.
pub(super) static WORDS: Implementation =
    Implementation { name: "words", plain: words, stream: words, stream_four: None };

/// One byte at a time.
pub(super) static BYTES: Implementation =
    Implementation { name: "bytes", plain: bytes, stream: bytes, stream_four: None };

const WORD: usize = size_of::<u64>();

/// # Safety
/// Those of [`copy`](super::copy).
unsafe fn bytes(dst: *mut u8, src: *const u8, len: usize) {
    for at in 0..len {
        // SAFETY: `at < len`, and the caller vouches for `len` bytes of both ranges,
        // touched by nobody through references. Every byte is aligned. `src` is only
        // loaded from: `cast_mut` is for the signature.
        unsafe {
            let byte = AtomicU8::from_ptr(src.add(at).cast_mut()).load(Relaxed);
            AtomicU8::from_ptr(dst.add(at)).store(byte, Relaxed);
        }
    }
}

/// # Safety
/// Those of [`copy`](super::copy).
unsafe fn words(dst: *mut u8, src: *const u8, len: usize) {
    let head = dst.addr().wrapping_neg() % WORD;
    if dst.addr() % WORD != src.addr() % WORD || len < head + WORD {
        // SAFETY: the caller's promise, unchanged.
        return unsafe { bytes(dst, src, len) };
    }
    let words = (len - head) / WORD;
    let tail = head + words * WORD;
    // SAFETY: the caller vouches for `len` bytes; `head <= tail <= len`.
    unsafe {
        bytes(dst, src, head);
        bytes(dst.add(tail), src.add(tail), len - tail);
    }
    for at in (head..tail).step_by(WORD) {
        // SAFETY: as in `bytes`; `head` aligns `dst`, and `src` is congruent to it.
        unsafe {
            let word = AtomicU64::from_ptr(src.add(at).cast_mut().cast()).load(Relaxed);
            AtomicU64::from_ptr(dst.add(at).cast()).store(word, Relaxed);
        }
    }
}
