//! The loops a CPU can run, and the choice among them.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::stream_loop::StreamLoop;

/// One copy loop: `(dst, src, len)`, with [`copy`](super::copy)'s safety rules.
pub(super) type Copier = unsafe fn(*mut u8, *const u8, usize);

/// Four streaming copies at once, with [`stream_four`](super::stream_four)'s safety rules.
pub(super) type FourCopier = unsafe fn([*mut u8; 4], [*const u8; 4], usize);

/// A streaming copy by a given loop, with [`copy`](super::copy)'s safety rules.
pub(super) type StreamBy = unsafe fn(StreamLoop, *mut u8, *const u8, usize);

/// A loop for each [`CopyStrategy`](super::CopyStrategy), and one for four pieces.
pub(super) struct Implementation {
    /// The instructions it uses, for test messages.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) name: &'static str,
    pub(super) plain: Copier,
    pub(super) stream: Copier,
    /// `None` if four pieces side by side are not faster than one by one, or if that was not measured.
    pub(super) stream_four: Option<FourCopier>,
    /// A streaming copy by a given loop, for tests. `None` if there is only one.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) stream_by: Option<StreamBy>,
}

impl Implementation {
    /// # Safety
    /// Those of [`stream_four`](super::stream_four), and this CPU can run it.
    #[inline]
    pub(super) unsafe fn stream_four(&self, dst: [*mut u8; 4], src: [*const u8; 4], len: usize) {
        // SAFETY: (both) the caller's promise, for each of the four.
        unsafe {
            match self.stream_four {
                Some(four) => four(dst, src, len),
                None => (0..4).for_each(|i| (self.stream)(dst[i], src[i], len)),
            }
        }
    }
}

/// The implementation of this process. At first it is [`RESOLVE`]. The loops of `RESOLVE` choose the implementation for
/// this CPU, store it here, and run it. So no later copy has to check whether the choice was made.
static ACTIVE: AtomicPtr<Implementation> = AtomicPtr::new(ptr::from_ref(&RESOLVE).cast_mut());

static RESOLVE: Implementation = Implementation {
    name: "unresolved",
    // SAFETY: (all three) `copy`'s caller vouches for the ranges, `resolve` for the CPU.
    plain: |dst, src, len| unsafe { (resolve().plain)(dst, src, len) },
    // SAFETY: as above.
    stream: |dst, src, len| unsafe { (resolve().stream)(dst, src, len) },
    // SAFETY: as above.
    stream_four: Some(|dst, src, len| unsafe { resolve().stream_four(dst, src, len) }),
    stream_by: None,
};

/// The implementation of this process.
#[inline]
pub(super) fn active() -> &'static Implementation {
    // Relaxed: everything it may point to is a constant of the executable.
    let active = ACTIVE.load(Ordering::Relaxed);
    // SAFETY: ACTIVE only ever holds pointers made from `&'static Implementation`,
    // here and in `resolve`.
    unsafe { &*active }
}

#[cold]
fn resolve() -> &'static Implementation {
    let best = available()[0];
    ACTIVE.store(ptr::from_ref(best).cast_mut(), Ordering::Relaxed);
    best
}

/// The implementations that this CPU can run, best first; never empty.
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
pub(super) fn available() -> Vec<&'static Implementation> {
    use super::x86_64::{AVX2, AVX512, AVX512_AHEAD, SSE2};
    let mut available = Vec::new();
    // The macro also asks whether the operating system saves these registers.
    if is_x86_feature_detected!("avx512f") {
        available.push(&AVX512);
        available.push(&AVX512_AHEAD);
        if is_intel() {
            available.swap(0, 1);
        }
    }
    if is_x86_feature_detected!("avx2") {
        available.push(&AVX2);
    }
    available.push(&SSE2);
    #[cfg(test)]
    available.extend([&portable::WORDS, &portable::BYTES]);
    available
}

/// Whether Intel made this CPU, by the vendor's name in CPUID leaf 0.
#[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
fn is_intel() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// The implementations that this CPU can run, best first; never empty.
#[cfg(all(target_arch = "aarch64", not(any(miri, multirail_loom))))]
pub(super) fn available() -> Vec<&'static Implementation> {
    vec![
        &super::aarch64::NEON,
        #[cfg(test)]
        &portable::WORDS,
        #[cfg(test)]
        &portable::BYTES,
    ]
}

/// The implementations that may run here, best first; never empty.
///
/// Under miri and loom, `BYTES` is the best one: two concurrent copies of different alignment would access the same
/// bytes by atomics of different sizes, which miri reports as undefined behaviour.
#[cfg(any(miri, multirail_loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(super) fn available() -> Vec<&'static Implementation> {
    use portable::{BYTES, WORDS};
    if cfg!(any(miri, multirail_loom)) { vec![&BYTES, &WORDS] } else { vec![&WORDS, &BYTES] }
}

/// Loops of relaxed atomics: for architectures without a loop of their own, and for miri and loom, which do not
/// understand assembly. With atomics, concurrent access to the bytes is no data race.
#[cfg(any(test, miri, multirail_loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod portable {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    use super::Implementation;

    /// Copies eight bytes at a time, if source and destination have the same alignment.
    pub(in crate::copy) static WORDS: Implementation =
        Implementation { name: "words", plain: words, stream: words, stream_four: None, stream_by: None };

    /// Copies one byte at a time.
    pub(in crate::copy) static BYTES: Implementation =
        Implementation { name: "bytes", plain: bytes, stream: bytes, stream_four: None, stream_by: None };

    const WORD: usize = size_of::<u64>();

    /// # Safety
    /// Those of [`copy`](super::super::copy).
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
    /// Those of [`copy`](super::super::copy).
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
}
