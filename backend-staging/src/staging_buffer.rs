//! The staging buffer of a connection: host memory with slots for staged bytes, and with the records by which the two
//! processes exchange slot requests and responses.
//!
//! Each process has one buffer per connection. A process is the initiator of its own operations and the target of the
//! peer's, so its buffer has one area of each kind for each role. All areas are indexed by slot.

#[cfg(unix)]
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use cuda::{Device, PageLock, Reach};
use multirail_spi::{Access, Domain, Error, ErrorKind, HostBuffer, Memory, MemoryRegion, RemoteKey, Result};

use crate::page_table::{MAX_TABLE_WORDS, table_len};
use crate::wire::{
    ImmTag, NumberedRequest, REQUEST_WORDS, RESPONSE_WORDS, Response, WAKE_IMM, decode_response,
};

/// The number of slots for each role. With 512 KiB per slot, 4 MiB are in transfer at a time. A network of 200 Gbps
/// takes 170 µs for 4 MiB. A slot is in use for less: two GPU copies (15 µs each, H200) and two transfers over the
/// network.
pub(crate) const SLOT_COUNT: usize = 8;
/// The most bytes that a slot carries. Pages of 1 KiB in GPU memory of a p5 need slots of 512 KiB to reach 60 % of the
/// line (docs/performance.md).
pub(crate) const SLOT_BYTES: usize = 512 << 10;
/// Bytes of a slot's content: those that it carries, and a page table in front of them. The record of the slot request
/// lies in front of the content, so that one RDMA write can carry both.
pub(crate) const SLOT_LEN: usize = SLOT_BYTES + table_len(MAX_TABLE_WORDS).next_multiple_of(4096) as usize;

/// Bytes of the record that holds one slot request: a cache line.
const REQUEST_RECORD: usize = 8 * REQUEST_WORDS;
/// Bytes of the record that holds one response: whole cache lines.
const RESPONSE_RECORD: usize = (8 * RESPONSE_WORDS).next_multiple_of(64);
/// The offset of the records into which the peer writes its responses.
const RESPONSES_IN: usize = 0;
/// The offset of this process's responses: the sources of the RDMA writes that send them.
const RESPONSES_OUT: usize = RESPONSES_IN + SLOT_COUNT * RESPONSE_RECORD;
/// The distance of two slots. The record makes it an odd number of cache lines, so that the records of all slots fit the
/// processor's cache.
const SLOT_STRIDE: usize = REQUEST_RECORD + SLOT_LEN;
/// The offset of this process's slots as target: the peer's slot requests, and the bytes that the peer writes to a region
/// here, or reads from one.
const TARGET_SLOTS: usize = (RESPONSES_OUT + SLOT_COUNT * RESPONSE_RECORD).next_multiple_of(4096);
/// The offset of this process's slots as initiator: the sources of its slot requests, and bytes that it writes to a region
/// of the peer, or has read from one.
const INITIATOR_SLOTS: usize = TARGET_SLOTS + SLOT_COUNT * SLOT_STRIDE;
/// Bytes of a staging buffer.
pub(crate) const BUFFER_LEN: usize = INITIATOR_SLOTS + SLOT_COUNT * SLOT_STRIDE;

/// This process's staging buffer for one connection: 8.3 MiB.
///
/// The peer can write anywhere in it at any time. Slot requests and responses are therefore checked when they are read.
/// Staged bytes are not: the peer could only corrupt its own transfers.
pub(crate) struct StagingBuffer {
    /// Dropped before the memory, and before the page lock.
    region: Option<Arc<dyn MemoryRegion>>,
    memory: Arc<PolledMemory>,
    /// Set by the first copy of a GPU from or to the buffer.
    page_lock: OnceLock<(Option<PageLock>, Reach)>,
}

/// The memory of a staging buffer. The endpoint polls it, without waiting for a completion of the device.
struct PolledMemory(HostBuffer);

// SAFETY: all methods return what the buffer returns, which keeps this contract itself.
unsafe impl Memory for PolledMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_polled(&self) -> bool {
        true
    }

    #[cfg(unix)]
    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.0.shared_file()
    }
}

impl StagingBuffer {
    /// Allocates a buffer and registers it with `domain`, so that peers can write to it.
    pub(crate) fn new(domain: &dyn Domain) -> Result<Self> {
        let memory = Arc::new(PolledMemory(HostBuffer::new(BUFFER_LEN)?));
        // SAFETY: there are no references into the memory: it is only accessed by atomics, copies and devices.
        let region = unsafe { domain.register(Arc::clone(&memory) as _, Access::REMOTE_WRITE) }?;
        Ok(Self { region: Some(region), memory, page_lock: OnceLock::new() })
    }

    /// A buffer that no device knows.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn unregistered() -> Result<Self> {
        let memory = Arc::new(PolledMemory(HostBuffer::new(BUFFER_LEN)?));
        Ok(Self { region: None, memory, page_lock: OnceLock::new() })
    }

    /// The address of the first byte.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn address(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Stores the words of a slot request, as a peer does.
    #[cfg(fuzzing)]
    pub(crate) fn receive_request(&self, slot: usize, words: [u64; REQUEST_WORDS]) {
        for (index, word) in words.into_iter().enumerate() {
            self.word(TARGET_SLOTS + slot * SLOT_STRIDE + 8 * index).store(word, Ordering::Relaxed);
        }
    }

    /// Stores a word of a slot of this process as target, as a peer does.
    #[cfg(fuzzing)]
    pub(crate) fn receive_word(&self, slot: usize, index: usize, word: u64) {
        self.word(content(TARGET_SLOTS, slot) + 8 * (index % (SLOT_LEN / 8))).store(word, Ordering::Relaxed);
    }

    /// The key that the peer imports.
    pub(crate) fn key(&self) -> Result<RemoteKey> {
        let closed = || Error::new(ErrorKind::Closed, "connect", "the staging buffer is closed");
        self.region.as_ref().map(|region| region.key()).ok_or_else(closed)
    }

    /// The local key.
    pub(crate) fn lkey(&self) -> u64 {
        self.region.as_ref().map_or(0, |region| region.lkey())
    }

    /// How GPUs reach the buffer. The first call page-locks it through `device`, if that is possible.
    pub(crate) fn reach(&self, device: &Device) -> Reach {
        self.page_lock.get_or_init(|| self.lock(device)).1
    }

    fn lock(&self, device: &Device) -> (Option<PageLock>, Reach) {
        // SAFETY: the memory stays mapped until the lock is dropped (see `drop`). `PageLock::new` requires that memory
        // is locked before it is registered. Here the inner device has registered it before. That is harmless, because
        // no GPU copies from or to the memory before this method has returned.
        match unsafe { PageLock::new(device, self.memory.as_ptr(), BUFFER_LEN) } {
            Ok(lock) => (Some(lock), Reach::of_host(self.memory.as_ptr() as u64, BUFFER_LEN as u64)),
            Err(why) => {
                tracing::warn!(%why, "staging: the slots cannot be page-locked, so GPU copies are slow");
                (None, Reach::Driver)
            }
        }
    }

    /// The content of a slot of this process as target.
    pub(crate) fn target_slot(&self, slot: usize) -> *mut u8 {
        self.at(content(TARGET_SLOTS, slot))
    }

    /// The content of a slot of this process as initiator.
    pub(crate) fn initiator_slot(&self, slot: usize) -> *mut u8 {
        self.at(content(INITIATOR_SLOTS, slot))
    }

    /// The source of the RDMA write that sends the slot request of a slot. The content of the slot follows it.
    pub(crate) fn request_out(&self, slot: usize) -> *mut u8 {
        self.at(INITIATOR_SLOTS + slot * SLOT_STRIDE)
    }

    /// The source of the RDMA write that sends the response of a slot.
    pub(crate) fn response_out(&self, slot: usize) -> *mut u8 {
        self.at(RESPONSES_OUT + slot * RESPONSE_RECORD)
    }

    /// Bytes of the RDMA write that sends a slot request, without bytes that the request carries.
    pub(crate) const REQUEST_LEN: u64 = REQUEST_RECORD as u64;
    /// Stores a slot request for the RDMA write that sends it.
    pub(crate) fn set_request(&self, slot: usize, request: NumberedRequest) {
        for (index, word) in request.to_words().into_iter().enumerate() {
            self.word(INITIATOR_SLOTS + slot * SLOT_STRIDE + 8 * index).store(word, Ordering::Relaxed);
        }
        // A device reads the words only after the endpoint has posted the RDMA write. The fence keeps the stores before
        // the stores by which the endpoint posts it.
        fence(Ordering::Release);
    }

    /// Stores a response for the RDMA write that sends it.
    pub(crate) fn set_response(&self, slot: usize, words: &[u64]) {
        for (index, word) in words.iter().take(RESPONSE_WORDS).enumerate() {
            self.word(RESPONSES_OUT + slot * RESPONSE_RECORD + 8 * index).store(*word, Ordering::Relaxed);
        }
        fence(Ordering::Release);
    }

    /// The page table in a slot of this process as initiator, of at most [`MAX_TABLE_WORDS`] words.
    pub(crate) fn table_out(&self, slot: usize, words: usize) -> &[AtomicU64] {
        self.table(content(INITIATOR_SLOTS, slot), words)
    }

    /// The page table that the peer has written into a slot of this process as target.
    pub(crate) fn table_in(&self, slot: usize, words: usize) -> &[AtomicU64] {
        self.table(content(TARGET_SLOTS, slot), words)
    }

    fn table(&self, offset: usize, words: usize) -> &[AtomicU64] {
        assert!(words <= MAX_TABLE_WORDS && offset + 8 * words <= BUFFER_LEN);
        // SAFETY: as in `word`, for all words of the table.
        unsafe { std::slice::from_raw_parts(self.word(offset), words) }
    }

    /// The peer's latest slot request for a slot. `None` while it is incomplete, or if it has the sequence number
    /// `seen`. All bytes that the peer wrote before the request are visible; those that the request carries, if the imm of
    /// the request has come.
    pub(crate) fn request_in(&self, slot: usize, seen: u32) -> Option<NumberedRequest> {
        if self.sequence_in(slot) == seen {
            return None;
        }
        let words = std::array::from_fn(|index| {
            self.word(TARGET_SLOTS + slot * SLOT_STRIDE + 8 * index).load(Ordering::Relaxed)
        });
        fence(Ordering::Acquire);
        NumberedRequest::from_words(&words)
    }

    /// The slots whose latest slot request has another sequence number than `seen`, complete or not: a bit for each.
    pub(crate) fn new_requests(&self, seen: &[u32; SLOT_COUNT]) -> u32 {
        let mut new = 0;
        for (slot, seen) in seen.iter().enumerate() {
            // SAFETY: as in `word`: the records of all slots are in bounds and aligned.
            let word = unsafe { AtomicU64::from_ptr(self.at(TARGET_SLOTS + slot * SLOT_STRIDE).cast()) };
            new |= u32::from(word.load(Ordering::Relaxed) as u32 != *seen) << slot;
        }
        new
    }

    /// The sequence number of the peer's latest slot request for a slot, whether that is complete or not. 0 if there was
    /// none.
    pub(crate) fn sequence_in(&self, slot: usize) -> u32 {
        self.word(TARGET_SLOTS + slot * SLOT_STRIDE).load(Ordering::Relaxed) as u32
    }

    /// The peer's response to the slot request with this sequence number and so many pages; `None` before it is
    /// complete. All bytes that the peer wrote before the response are visible.
    pub(crate) fn response_in(&self, slot: usize, sequence: u32, pages: usize) -> Option<Response> {
        let record = RESPONSES_IN + slot * RESPONSE_RECORD;
        let response =
            decode_response(sequence, pages, |index| self.word(record + 8 * index).load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        response
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < BUFFER_LEN);
        self.memory.as_ptr().wrapping_add(offset)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= BUFFER_LEN && offset.is_multiple_of(8));
        // SAFETY: the word is in bounds, and aligned because the mapping begins at a page. The mapping lives as long as
        // `self`, and these records are only accessed by atomics here and by devices.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        drop(self.region.take());
        if let Some((Some(lock), _)) = self.page_lock.take() {
            // Unlocks, and then frees the memory, on another thread: unlocking waits for GPUs.
            cuda::drop_in_background((lock, Arc::clone(&self.memory)));
        }
    }
}

/// The offset of the content of a slot among those that begin at `slots`.
const fn content(slots: usize, slot: usize) -> usize {
    slots + slot * SLOT_STRIDE + REQUEST_RECORD
}

/// The peer's staging buffer: the remote addresses and the key for work requests that write to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteBuffer {
    pub base: u64,
    pub rkey: u64,
    /// The peer's tag of the imms that announce the bytes of slots. `None` unless both processes offer such imms.
    pub imms: Option<ImmTag>,
    /// Whether imms also wake the peer's worker.
    pub is_woken: bool,
}

impl RemoteBuffer {
    /// The address of a slot of the peer as target.
    pub(crate) fn target_slot(self, slot: usize) -> u64 {
        self.base + content(TARGET_SLOTS, slot) as u64
    }

    /// The address of a slot of the peer as initiator.
    pub(crate) fn initiator_slot(self, slot: usize) -> u64 {
        self.base + content(INITIATOR_SLOTS, slot) as u64
    }

    /// The address at which the peer expects the slot request of a slot. The content of the slot follows it.
    pub(crate) fn request(self, slot: usize) -> u64 {
        self.base + (TARGET_SLOTS + slot * SLOT_STRIDE) as u64
    }

    /// The imm of messages that announce no bytes: it wakes the peer's worker.
    pub(crate) fn wake_imm(self) -> Option<u32> {
        self.is_woken.then_some(WAKE_IMM)
    }

    /// The address at which the peer expects the response of a slot.
    pub(crate) fn response(self, slot: usize) -> u64 {
        self.base + (RESPONSES_IN + slot * RESPONSE_RECORD) as u64
    }
}
