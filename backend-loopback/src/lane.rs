//! A lane carries immediate data and messages from one peer to one endpoint.
//!
//! It lies in the target's segment. Any thread of the peer may send; the
//! endpoint's owner receives. What the peer wrote there is checked, never trusted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use multirail_spi::{
    Locality, WorkKind,
    copy::{copy, finish, strategy},
};

use crate::ring::{Cell, Entry, Ring};
use crate::segment::Layout;

/// Entries of a lane's ring.
pub(crate) const ENTRIES: usize = 1024;
/// Messages that may wait in a lane.
pub(crate) const PAYLOADS: usize = 32;
/// Bytes of one message.
pub(crate) const MESSAGE: usize = 64 << 10;

const HAS_IMM: u64 = 1 << 32;
const IS_MESSAGE: u64 = 1 << 33;

/// Whether what was last in a cell is a message.
pub(crate) fn is_message(cell: &Cell<AtomicU64>) -> bool {
    cell.last()[0] & IS_MESSAGE != 0
}

fn ring(layout: &Layout) -> Ring<'_, AtomicU64, ENTRIES> {
    Ring::new(&layout.tail, &layout.cells)
}

/// Sends immediate data; `false` if the lane is full. Rings through `bell` if the target sleeps.
#[inline]
pub(crate) fn send_imm(layout: &Layout, imm: u32, bell: impl FnOnce()) -> bool {
    let sent = ring(layout).push([HAS_IMM | u64::from(imm), 0]);
    if sent {
        wake(layout, bell);
    }
    sent
}

/// Whether an imm would find room now.
#[inline]
pub(crate) fn has_room(layout: &Layout) -> bool {
    ring(layout).has_room()
}

/// Whether a request of that kind would find room now.
fn takes(layout: &Layout, kind: WorkKind) -> bool {
    has_room(layout) && (kind != WorkKind::Send || layout.taken.load(Ordering::Relaxed) != u32::MAX)
}

/// Asks to be rung once there is room for a request of that kind. `false` if there
/// is already. The fence pairs with the one in [`Inlet::made_room`].
pub(crate) fn starve(layout: &Layout, kind: WorkKind) -> bool {
    layout.state.starved.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    !takes(layout, kind)
}

/// Sends a message of `len` <= [`MESSAGE`] bytes; `false` if the lane is full.
///
/// # Safety
/// `len` bytes from `from` are readable.
pub(crate) unsafe fn send_message(
    layout: &Layout,
    from: *const u8,
    len: usize,
    imm: Option<u32>,
    bell: impl FnOnce(),
) -> bool {
    debug_assert!(len <= MESSAGE);
    let lowest_free = |taken: u32| taken.checked_add(1).map(|next| taken | next);
    let Ok(taken) = layout.taken.try_update(Ordering::Acquire, Ordering::Relaxed, lowest_free) else {
        return false;
    };
    let payload = (!taken).trailing_zeros();
    let strategy = strategy(len as u64, Locality::Auto);
    // SAFETY: the payload is `MESSAGE` bytes of the mapped segment; `from` by the caller.
    unsafe { copy(strategy, layout.payloads[payload as usize].get().cast(), from, len) };
    finish(strategy);
    let imm = imm.map_or(0, |imm| HAS_IMM | u64::from(imm));
    let sent = ring(layout).push([IS_MESSAGE | imm, u64::from(payload) << 32 | len as u64]);
    if sent {
        wake(layout, bell);
    } else {
        layout.taken.fetch_and(!(1 << payload), Ordering::Release);
    }
    sent
}

/// Wakes the target if it sleeps. The fence pairs with the one in [`Inlet::arm`]:
/// either we see it armed, or it sees the entry (or the slot of a stage).
#[inline]
pub(crate) fn wake(layout: &Layout, bell: impl FnOnce()) {
    fence(Ordering::SeqCst);
    if layout.state.armed.load(Ordering::Relaxed) != 0 && layout.state.armed.swap(0, Ordering::AcqRel) != 0 {
        bell();
    }
}

/// A message that waits for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    payload: u32,
}

/// The receiving end's own state: never in shared memory.
#[derive(Debug, Default)]
pub(crate) struct Inlet {
    head: u64,
    held: u32,
    waiting: VecDeque<Message>,
    /// Entries or payloads were freed since [`Inlet::made_room`].
    freed: bool,
    broken: bool,
}

impl Inlet {
    /// Takes the next immediate data; puts messages that lie before it aside.
    #[inline]
    pub(crate) fn next_imm(&mut self, layout: &Layout) -> Option<u32> {
        while let Some(entry) = ring(layout).pop(&mut self.head) {
            self.freed = true;
            match self.classify(entry) {
                Some(imm) => return Some(imm),
                None if self.broken => return None,
                None => {}
            }
        }
        None
    }

    /// The message that waits longest.
    pub(crate) fn next_message(&self) -> Option<Message> {
        self.waiting.front().copied()
    }

    /// Copies that message to `into` and frees its payload.
    ///
    /// # Safety
    /// `len` bytes from `into` are writable and nobody else's.
    pub(crate) unsafe fn take_message(&mut self, layout: &Layout, into: *mut u8, len: usize) {
        let Some(message) = self.waiting.pop_front() else { return };
        let strategy = strategy(len as u64, Locality::Auto);
        // SAFETY: `classify` checked payload and length; `into` by the caller.
        unsafe {
            copy(strategy, into, layout.payloads[message.payload as usize].get().cast(), len.min(message.len))
        };
        finish(strategy);
        self.freed = true;
        self.held &= !(1 << message.payload);
        layout.taken.fetch_and(!(1 << message.payload), Ordering::Release);
    }

    /// Whether room was made for a peer that asked to be rung for it.
    pub(crate) fn made_room(&mut self, layout: &Layout) -> bool {
        if !std::mem::take(&mut self.freed) {
            return false;
        }
        fence(Ordering::SeqCst);
        layout.state.starved.load(Ordering::Relaxed) != 0
            && layout.state.starved.swap(0, Ordering::AcqRel) != 0
    }

    /// Whether the peer broke the protocol: nothing more is taken from it.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Asks to be rung at the next entry. `false` if one is there already.
    pub(crate) fn arm(&mut self, layout: &Layout) -> bool {
        layout.state.armed.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.broken || !ring(layout).ready(self.head)
    }

    /// Takes that back.
    pub(crate) fn disarm(&mut self, layout: &Layout) {
        layout.state.armed.store(0, Ordering::Relaxed);
    }

    fn classify(&mut self, [head, body]: Entry) -> Option<u32> {
        let imm = (head & HAS_IMM != 0).then_some(head as u32);
        if head & IS_MESSAGE == 0 {
            self.broken |= imm.is_none();
            return imm;
        }
        let (payload, len) = ((body >> 32) as u32, body as u32 as usize);
        // A payload named twice would let a peer grow our queue without bound.
        if payload as usize >= PAYLOADS || len > MESSAGE || self.held & (1 << payload) != 0 {
            self.broken = true;
            return None;
        }
        self.held |= 1 << payload;
        self.waiting.push_back(Message { len, imm, payload });
        None
    }
}

#[cfg(test)]
mod tests;
