//! A connection's memory for staged bytes: slots, and the lines by which the two sides speak of them.

#[cfg(unix)]
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use cuda::{Device, PageLock, Reach};
use multirail_spi::{
    Access, Domain, Error, ErrorKind, HostBuffer, KeyMaterial, Memory, MemoryRegion, Result,
};

use crate::wire::{Ask, WORDS};

/// Slots of a ring, each way. With those of 64 KiB 2 MiB are under way, what a line of 200 Gbps carries in 84 µs: about
/// as long as a slot is taken by two copies of a GPU (15 µs each, H200) and three crossings of the line.
pub(crate) const SLOTS: usize = 32;
/// Bytes of a slot.
pub(crate) const SLOT: usize = 64 << 10;

/// A line for each slot, and what they are for.
const LINE: usize = 8 * WORDS;
const LINES: usize = SLOTS * LINE;
/// Written by the peer: its answers, and its asks.
const ANSWERS_IN: usize = 0;
const ASKS_IN: usize = LINES;
/// What is written there, from here.
const ASKS_OUT: usize = 2 * LINES;
const ANSWERS_OUT: usize = 3 * LINES;
/// What the peer writes into this side's regions, and what this side gives it to read.
const THEIRS: usize = 4 * LINES;
/// What this side writes, and what it has read.
const OURS: usize = THEIRS + SLOTS * SLOT;
/// Bytes of a ring.
pub(crate) const LEN: usize = OURS + SLOTS * SLOT;

/// Of a side, the memory that both sides write to: 4 MiB and 8 KiB. The peer may write anywhere in it at any time:
/// what is read from it is checked, and what goes out of it is the peer's own affair.
pub(crate) struct Ring {
    /// Gone before the memory, and before its lock.
    region: Option<Arc<dyn MemoryRegion>>,
    memory: Arc<Watched>,
    /// Once a GPU has copied from it or into it.
    locked: OnceLock<(Option<PageLock>, Reach)>,
}

/// A ring's memory, which is looked at before a device tells of it.
struct Watched(HostBuffer);

// SAFETY: the buffer's own promises.
unsafe impl Memory for Watched {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_watched(&self) -> bool {
        true
    }

    #[cfg(unix)]
    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.0.shared_file()
    }
}

/// Where the peer's ring begins, and its key, as requests to it take them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct There {
    pub base: u64,
    pub rkey: u64,
    /// The imm of what is written there, if the two sides agreed on one.
    pub knock: Option<u32>,
}

impl Ring {
    /// A new one, which peers reach by `domain`.
    pub(crate) fn new(domain: &dyn Domain) -> Result<Self> {
        let memory = Arc::new(Watched(HostBuffer::new(LEN)?));
        // SAFETY: nobody holds references into it: all access is by atomics, copies and devices.
        let region = unsafe { domain.register(Arc::clone(&memory) as _, Access::REMOTE_WRITE) }?;
        Ok(Self { region: Some(region), memory, locked: OnceLock::new() })
    }

    /// What the peer needs.
    pub(crate) fn key(&self) -> Result<KeyMaterial> {
        let gone = || Error::new(ErrorKind::Closed, "connect", "the ring is gone");
        self.region.as_ref().map(|region| region.key()).ok_or_else(gone)
    }

    /// The local key.
    pub(crate) fn lkey(&self) -> u64 {
        self.region.as_ref().map_or(0, |region| region.lkey())
    }

    /// How GPUs reach it: page-locked by way of `device` from its first use on, where that can be done.
    pub(crate) fn reach(&self, device: &Device) -> Reach {
        self.locked.get_or_init(|| self.lock(device)).1
    }

    fn lock(&self, device: &Device) -> (Option<PageLock>, Reach) {
        // SAFETY: the memory is mapped until after the lock is gone (`drop`). That it was registered before harms nobody:
        // no GPU but by way of here copies to it or from it.
        match unsafe { PageLock::new(device, self.memory.as_ptr(), LEN) } {
            Ok(lock) => (Some(lock), Reach::of_host(self.memory.as_ptr() as u64, LEN as u64)),
            Err(why) => {
                tracing::warn!(%why, "staging: the slots are not page-locked, which makes GPUs' copies slow");
                (None, Reach::Driver)
            }
        }
    }

    /// Bytes of slot `at` that the peer has written, or is going to get.
    pub(crate) fn theirs(&self, at: usize) -> *mut u8 {
        self.at(THEIRS + at * SLOT)
    }

    /// Bytes of slot `at` that go out, or that were read.
    pub(crate) fn ours(&self, at: usize) -> *mut u8 {
        self.at(OURS + at * SLOT)
    }

    /// What goes out as ask `at`.
    pub(crate) fn ask_out(&self, at: usize) -> *mut u8 {
        self.at(ASKS_OUT + at * LINE)
    }

    /// What goes out as answer `at`.
    pub(crate) fn answer_out(&self, at: usize) -> *mut u8 {
        self.at(ANSWERS_OUT + at * LINE)
    }

    /// Bytes of an ask, and of an answer.
    pub(crate) const ASK: u64 = LINE as u64;
    pub(crate) const ANSWER: u64 = 8;

    pub(crate) fn set_ask(&self, at: usize, ask: Ask) {
        for (place, word) in ask.to_words().into_iter().enumerate() {
            self.word(ASKS_OUT + at * LINE + 8 * place).store(word, Ordering::Relaxed);
        }
        fence(Ordering::Release);
    }

    pub(crate) fn set_answer(&self, at: usize, word: u64) {
        self.word(ANSWERS_OUT + at * LINE).store(word, Ordering::Release);
    }

    /// What the peer asks for in slot `at`; `None` while that is not whole. What it wrote before is visible.
    pub(crate) fn ask_in(&self, at: usize) -> Option<Ask> {
        let words =
            std::array::from_fn(|place| self.word(ASKS_IN + at * LINE + 8 * place).load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        Ask::from_words(&words)
    }

    /// What the peer has answered in slot `at`. What it wrote before is visible.
    pub(crate) fn answer_in(&self, at: usize) -> u64 {
        self.word(ANSWERS_IN + at * LINE).load(Ordering::Acquire)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < LEN);
        self.memory.as_ptr().wrapping_add(offset)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= LEN && offset.is_multiple_of(8));
        // SAFETY: in bounds and aligned, as the mapping begins at a page; it lives as long as `self`, and nobody
        // accesses these lines but by atomics here and by devices.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

impl There {
    /// Where bytes of slot `at` go that are to be written to a region there.
    pub(crate) fn theirs(self, at: usize) -> u64 {
        self.base + (THEIRS + at * SLOT) as u64
    }

    /// Where bytes of slot `at` go that were read.
    pub(crate) fn ours(self, at: usize) -> u64 {
        self.base + (OURS + at * SLOT) as u64
    }

    pub(crate) fn ask(self, at: usize) -> u64 {
        self.base + (ASKS_IN + at * LINE) as u64
    }

    pub(crate) fn answer(self, at: usize) -> u64 {
        self.base + (ANSWERS_IN + at * LINE) as u64
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        drop(self.region.take());
        if let Some((Some(lock), _)) = self.locked.take() {
            // In this order, where nobody waits for a GPU.
            cuda::let_go((lock, Arc::clone(&self.memory)));
        }
    }
}
