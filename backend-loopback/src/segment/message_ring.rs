//! The message ring carries immediate data and messages from one peer to one endpoint.
//!
//! It lies in the target's segment. Any thread of the peer may send. The thread that owns the endpoint receives,
//! through a [`RingReceiver`]. The receiver checks everything that the peer wrote.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use multirail_spi::{
    Locality, WorkKind,
    copy::{CopyStrategy, copy, finish, strategy},
};

use super::ring::{Cell, Ring};
use super::{ConnectionLayout, SegmentContent, commit_pages};

/// Entries of the ring.
pub(crate) const RING_ENTRIES: usize = 1024;
/// Messages that may wait in the ring.
pub(crate) const PAYLOADS: usize = 32;
/// Bytes of the largest message.
pub(crate) const MAX_MESSAGE: usize = 64 << 10;

/// Words of an entry: two, and the bytes of an inline message.
const ENTRY_WORDS: usize = 2 + INLINE_WORDS;
const INLINE_WORDS: usize = 5;
/// Bytes of the largest inline message. It lies in its entry, so that it takes one cache line from core to core.
const MAX_INLINE: usize = INLINE_WORDS * size_of::<u64>();
/// Inline messages that may wait for a receive.
const MAX_WAITING_INLINE: u64 = 1024;

/// A cell of the ring.
pub(crate) type RingCell = Cell<AtomicU64, ENTRY_WORDS>;

const HAS_IMM: u64 = 1 << 32;
const IS_MESSAGE: u64 = 1 << 33;
const IS_INLINE: u64 = 1 << 34;

/// Returns true if the last entry of a cell is a message with a payload.
pub(super) fn is_message(cell: &RingCell) -> bool {
    cell.last() & (IS_MESSAGE | IS_INLINE) == IS_MESSAGE
}

/// Cells that have memory from the beginning.
const FIRST_CELLS: u64 = {
    let bytes = ConnectionLayout::HEAD - std::mem::offset_of!(ConnectionLayout, cells);
    (bytes / size_of::<RingCell>()) as u64
};

fn ring(layout: &ConnectionLayout) -> Ring<'_, AtomicU64, RING_ENTRIES, ENTRY_WORDS> {
    Ring::new(&layout.sender.tail, &layout.cells)
}

/// Commits what the first messages need, so that they take no page faults. For either side.
#[cold]
pub(crate) fn warm_up(layout: &ConnectionLayout) {
    if commit_payload(layout, 0) {
        let _ = commit_cells_after(layout, RING_ENTRIES as u64);
    }
}

/// Appends an entry. Returns false if the ring is full.
#[inline]
fn push(layout: &ConnectionLayout, entry: &[u64]) -> bool {
    ring(layout).push(entry, |position| is_committed(layout, position) || commit_cells(layout, position))
}

/// Returns true if the initiator has committed the cell of that position.
#[inline]
fn is_committed(layout: &ConnectionLayout, position: u64) -> bool {
    position < layout.sender.more_cells.load(Ordering::Relaxed).saturating_add(FIRST_CELLS)
}

/// Commits the cells up to that position, and some more. Returns false if there is no memory.
#[cold]
fn commit_cells(layout: &ConnectionLayout, position: u64) -> bool {
    let Some(end) = commit_cells_after(layout, position) else { return false };
    layout.sender.more_cells.fetch_max(end - FIRST_CELLS, Ordering::Relaxed);
    true
}

/// Commits the cells up to that position, and some more. Returns the position of the first cell that is not committed,
/// or `None` if there is no memory. Called a few times per connection.
#[cold]
fn commit_cells_after(layout: &ConnectionLayout, position: u64) -> Option<u64> {
    let end = (position.saturating_add(1)).saturating_mul(2).min(RING_ENTRIES as u64).max(FIRST_CELLS);
    commit_pages(&layout.cells[..end as usize]).ok()?;
    // From its second lap on, the ring has all its memory.
    Some(if end == RING_ENTRIES as u64 { u64::MAX } else { end })
}

/// Commits a payload. Returns false if there is no memory.
#[cold]
fn commit_payload(layout: &ConnectionLayout, payload: u32) -> bool {
    commit_pages(std::slice::from_ref(&layout.payloads[payload as usize])).is_ok()
}

/// Sends immediate data. Returns false if the ring is full. Calls `wake` if the target sleeps.
#[inline]
pub(crate) fn send_imm(layout: &ConnectionLayout, imm: u32, wake: impl FnOnce()) -> bool {
    let sent = push(layout, &[HAS_IMM | u64::from(imm), 0]);
    if sent {
        wake_if_armed(layout, wake);
    }
    sent
}

/// Sends an entry that no peer may send.
#[cfg(test)]
pub(crate) fn send_invalid(layout: &ConnectionLayout, wake: impl FnOnce()) {
    assert!(push(layout, &[0, 0]));
    wake_if_armed(layout, wake);
}

/// Returns true if there is room for an imm now.
#[inline]
pub(crate) fn has_room(layout: &ConnectionLayout) -> bool {
    // A cell that is not committed was never used.
    !is_committed(layout, layout.sender.tail.load(Ordering::Relaxed)) || ring(layout).has_room()
}

/// Returns true if there is room for a request of that kind now.
fn has_room_for(layout: &ConnectionLayout, kind: WorkKind) -> bool {
    // Messages keep their order, so that one of a kind may wait for room for one of the other.
    let has_room_for_message =
        || layout.payloads_in_use.load(Ordering::Relaxed) != u32::MAX && has_inline_room(layout);
    has_room(layout) && (kind != WorkKind::Send || has_room_for_message())
}

/// Returns true if one more inline message may wait at the target.
#[inline]
fn has_inline_room(layout: &ConnectionLayout) -> bool {
    let sender = &layout.sender;
    let sent = sender.inline_sent.load(Ordering::Relaxed);
    let has_room = |taken: u64| sent.wrapping_sub(taken) < MAX_WAITING_INLINE;
    has_room(sender.inline_seen.load(Ordering::Relaxed)) || {
        let taken = layout.receiver.inline_taken.load(Ordering::Relaxed);
        sender.inline_seen.store(taken, Ordering::Relaxed);
        has_room(taken)
    }
}

/// Sends a message that lies in its entry. Returns false if there is no room.
///
/// # Safety
/// `len` <= [`MAX_INLINE`] bytes from `from` are readable.
#[inline]
unsafe fn send_inline(layout: &ConnectionLayout, from: *const u8, len: usize, imm: u64) -> bool {
    if !has_inline_room(layout) {
        return false;
    }
    let mut entry = [0; ENTRY_WORDS];
    entry[0] = IS_MESSAGE | IS_INLINE | imm;
    entry[1] = len as u64;
    // SAFETY: `len` fits into the words behind the first two; `from` by the caller.
    unsafe { copy(CopyStrategy::Plain, entry[2..].as_mut_ptr().cast(), from, len) };
    // Counted first, so that the target never has more than were sent. Threads that send at once may exceed the limit
    // by their number, for which the target leaves room.
    layout.sender.inline_sent.fetch_add(1, Ordering::Relaxed);
    let sent = push(layout, &entry[..2 + len.div_ceil(size_of::<u64>())]);
    if !sent {
        layout.sender.inline_sent.fetch_sub(1, Ordering::Relaxed);
    }
    sent
}

/// Asks the target for a wakeup once there is room for a request of that kind. Returns false if there is room
/// already. The fence pairs with the one in [`RingReceiver::has_made_room`].
pub(crate) fn request_room(layout: &ConnectionLayout, kind: WorkKind) -> bool {
    layout.flags.sender_blocked.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    !has_room_for(layout, kind)
}

/// Sends a message of `len` <= [`MAX_MESSAGE`] bytes. Returns false if the ring is full or all payloads are in use.
///
/// # Safety
/// `len` bytes from `from` are readable.
pub(crate) unsafe fn send_message(
    layout: &ConnectionLayout,
    from: *const u8,
    len: usize,
    imm: Option<u32>,
    wake: impl FnOnce(),
) -> bool {
    debug_assert!(len <= MAX_MESSAGE);
    let imm = imm.map_or(0, |imm| HAS_IMM | u64::from(imm));
    if len <= MAX_INLINE {
        // SAFETY: the length was checked; `from` by the caller.
        let sent = unsafe { send_inline(layout, from, len, imm) };
        if sent {
            wake_if_armed(layout, wake);
        }
        return sent;
    }
    let lowest_free = |in_use: u32| in_use.checked_add(1).map(|next| in_use | next);
    let Ok(in_use) = layout.payloads_in_use.try_update(Ordering::Acquire, Ordering::Relaxed, lowest_free)
    else {
        return false;
    };
    let payload = (!in_use).trailing_zeros();
    if layout.sender.payloads.load(Ordering::Relaxed) & (1 << payload) == 0 {
        if !commit_payload(layout, payload) {
            layout.payloads_in_use.fetch_and(!(1 << payload), Ordering::Release);
            return false;
        }
        layout.sender.payloads.fetch_or(1 << payload, Ordering::Relaxed);
    }
    let strategy = strategy(len as u64, Locality::Auto);
    // SAFETY: the payload is `MAX_MESSAGE` bytes of the mapped segment; `from` by the caller.
    unsafe { copy(strategy, layout.payloads[payload as usize].get().cast(), from, len) };
    finish(strategy);
    let sent = push(layout, &[IS_MESSAGE | imm, u64::from(payload) << 32 | len as u64]);
    if sent {
        wake_if_armed(layout, wake);
    } else {
        layout.payloads_in_use.fetch_and(!(1 << payload), Ordering::Release);
    }
    sent
}

/// Calls `wake` if the target does not look at the ring, or sleeps. The fence pairs with the one in
/// [`RingReceiver::arm`]: either this side sees that the target is armed, or the target sees the entry (or the slot of
/// a staging buffer).
#[inline]
pub(crate) fn wake_if_armed(layout: &ConnectionLayout, wake: impl FnOnce()) {
    fence(Ordering::SeqCst);
    if layout.flags.armed.load(Ordering::Relaxed) != 0 && layout.flags.armed.swap(0, Ordering::AcqRel) != 0 {
        wake();
    }
}

/// A message that waits for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitingMessage {
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    bytes: MessageBytes,
}

/// Where the bytes of a message are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageBytes {
    Inline([u64; INLINE_WORDS]),
    /// In the payload with that number.
    Payload(u32),
}

/// The state of the receiving side. It is never in shared memory.
#[derive(Debug)]
pub(crate) struct RingReceiver {
    head: u64,
    /// The position of the first cell that this side has not committed.
    committed: u64,
    /// The payloads that this side has committed, one bit each.
    committed_payloads: u32,
    /// The payloads of the messages in `waiting`, one bit each.
    payloads: u32,
    /// Inline messages that were taken, and those among `waiting`.
    inline_taken: u64,
    inline_waiting: u64,
    waiting: VecDeque<WaitingMessage>,
    /// Entries or payloads were freed since the last [`RingReceiver::has_made_room`].
    freed: bool,
    broken: bool,
}

impl Default for RingReceiver {
    fn default() -> Self {
        let (committed, committed_payloads) = (FIRST_CELLS, 0);
        Self {
            head: 0,
            committed,
            committed_payloads,
            payloads: 0,
            inline_taken: 0,
            inline_waiting: 0,
            waiting: VecDeque::new(),
            freed: false,
            broken: false,
        }
    }
}

/// What the peer has sent.
pub(crate) enum Arrival {
    Imm(u32),
    /// A message that no other message waits before. [`RingReceiver::take_message`] or
    /// [`RingReceiver::keep`] follows.
    Message(WaitingMessage),
}

impl RingReceiver {
    /// The receiver of a segment that has all its memory, or that no other process maps.
    pub(crate) fn of_committed() -> Self {
        Self { committed: u64::MAX, committed_payloads: u32::MAX, ..Self::default() }
    }

    /// Takes the next immediate data. Messages before it are queued.
    #[inline]
    pub(crate) fn next_imm(&mut self, layout: &ConnectionLayout) -> Option<u32> {
        loop {
            match self.next_arrival(layout)? {
                Arrival::Imm(imm) => return Some(imm),
                Arrival::Message(message) => self.waiting.push_back(message),
            }
        }
    }

    /// Takes the next arrival. Messages behind one that waits are queued.
    #[inline]
    pub(crate) fn next_arrival(&mut self, layout: &ConnectionLayout) -> Option<Arrival> {
        // A broken ring may have no memory under its next cell.
        while !self.broken
            && let Some(entry) = ring(layout).pop(&mut self.head)
        {
            self.freed = true;
            if self.head >= self.committed {
                self.commit_cells(layout);
            }
            match self.classify(entry) {
                Some(Arrival::Message(message)) if !self.waiting.is_empty() => {
                    self.waiting.push_back(message)
                }
                None => {}
                arrival => return arrival,
            }
        }
        None
    }

    /// Returns true if a message waits for a receive.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Keeps a message until there is a receive.
    pub(crate) fn keep(&mut self, message: WaitingMessage) {
        self.waiting.push_back(message);
    }

    /// Takes the message that has waited longest.
    pub(crate) fn pop_message(&mut self) -> Option<WaitingMessage> {
        self.waiting.pop_front()
    }

    /// The message that has waited longest.
    #[inline]
    pub(crate) fn next_message(&self) -> Option<&WaitingMessage> {
        self.waiting.front()
    }

    /// Copies a message, which waits no more, to `into` and frees its payload. Returns false if the payload has no
    /// memory: then the receiver takes nothing more from the peer.
    ///
    /// # Safety
    /// `len` bytes from `into` are writable, and nothing else accesses them.
    #[inline]
    pub(crate) unsafe fn take_message(
        &mut self,
        layout: &ConnectionLayout,
        message: &WaitingMessage,
        into: *mut u8,
        len: usize,
    ) -> bool {
        self.freed = true;
        let payload = match message.bytes {
            MessageBytes::Inline(words) => {
                self.inline_waiting -= 1;
                self.inline_taken += 1;
                layout.receiver.inline_taken.store(self.inline_taken, Ordering::Relaxed);
                // SAFETY: `classify` checked the length; `into` by the caller.
                unsafe { copy(CopyStrategy::Plain, into, words.as_ptr().cast(), len.min(message.len)) };
                return true;
            }
            MessageBytes::Payload(payload) => payload,
        };
        let bit = 1 << payload;
        // A sender that keeps to the rules has committed it.
        let has_memory = self.committed_payloads & bit != 0 || commit_payload(layout, payload);
        if has_memory {
            self.committed_payloads |= bit;
            let strategy = strategy(len as u64, Locality::Auto);
            // SAFETY: `classify` checked payload and length; `into` by the caller.
            unsafe {
                copy(strategy, into, layout.payloads[payload as usize].get().cast(), len.min(message.len));
            }
            finish(strategy);
        }
        self.broken |= !has_memory;
        self.payloads &= !bit;
        layout.payloads_in_use.fetch_and(!bit, Ordering::Release);
        has_memory
    }

    /// Returns true if the receiver has made room since the last call, and the peer has asked to be woken for that.
    pub(crate) fn has_made_room(&mut self, layout: &ConnectionLayout) -> bool {
        if !std::mem::take(&mut self.freed) {
            return false;
        }
        fence(Ordering::SeqCst);
        layout.flags.sender_blocked.load(Ordering::Relaxed) != 0
            && layout.flags.sender_blocked.swap(0, Ordering::AcqRel) != 0
    }

    /// Returns true if the peer has written an invalid entry. The receiver then takes nothing more from it.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Asks the peer to tell of its next entry. Returns false if there is an entry already.
    pub(crate) fn arm(&self, layout: &ConnectionLayout) -> bool {
        layout.flags.armed.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.broken || !ring(layout).ready(self.head)
    }

    /// Returns true if the peer has written nothing since [`arm`](Self::arm). Acquire, so that its entry is seen.
    pub(crate) fn is_armed(&self, layout: &ConnectionLayout) -> bool {
        layout.flags.armed.load(Ordering::Acquire) != 0
    }

    /// Withdraws the request of [`arm`](Self::arm).
    pub(crate) fn disarm(&self, layout: &ConnectionLayout) {
        layout.flags.armed.store(0, Ordering::Relaxed);
    }

    /// Commits the cells that the next entries may be in. The receiver takes nothing more if there is no memory.
    #[cold]
    fn commit_cells(&mut self, layout: &ConnectionLayout) {
        match commit_cells_after(layout, self.head) {
            Some(committed) => self.committed = committed,
            None => self.broken = true,
        }
    }

    #[inline]
    fn classify(&mut self, [head, body, inline @ ..]: [u64; ENTRY_WORDS]) -> Option<Arrival> {
        let imm = (head & HAS_IMM != 0).then_some(head as u32);
        if head & IS_MESSAGE == 0 {
            self.broken |= imm.is_none();
            return imm.map(Arrival::Imm);
        }
        if head & IS_INLINE != 0 {
            let len = body as usize;
            // Threads of the peer that send at once may exceed the limit a little.
            if len > MAX_INLINE || self.inline_waiting >= 2 * MAX_WAITING_INLINE {
                self.broken = true;
                return None;
            }
            self.inline_waiting += 1;
            return Some(Arrival::Message(WaitingMessage { len, imm, bytes: MessageBytes::Inline(inline) }));
        }
        let (payload, len) = ((body >> 32) as u32, body as u32 as usize);
        // A peer that named one payload twice could let `waiting` grow without bound.
        if payload as usize >= PAYLOADS || len > MAX_MESSAGE || self.payloads & (1 << payload) != 0 {
            self.broken = true;
            return None;
        }
        self.payloads |= 1 << payload;
        Some(Arrival::Message(WaitingMessage { len, imm, bytes: MessageBytes::Payload(payload) }))
    }
}

#[cfg(test)]
mod tests;
