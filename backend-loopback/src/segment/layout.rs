//! The bytes of the segment that a target makes for each peer.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use super::SegmentContent;
#[cfg(doc)]
use super::commit_pages;
use super::lease_table::{Lease, REGION_SLOTS};
use super::message_ring::{self, MAX_MESSAGE, PAYLOADS, RING_ENTRIES, RingCell};

/// A message ring and a lease table. Every field is atomic or raw, since the other side may write any byte at any
/// time. Zeroed memory is the initial state.
///
/// Only the head has memory from the beginning, so that a silent peer costs little. Each side commits the rest before
/// its own first access to it (see [`commit_pages`]): cells and payloads as messages come, leases as regions are
/// imported.
#[repr(C)]
pub(crate) struct ConnectionLayout {
    pub(crate) flags: CachePadded<ConnectionFlags>,
    pub(crate) sender: CachePadded<SenderState>,
    /// Message payloads in use, one bit each. The initiator sets the bits, the target clears them.
    pub(crate) payloads_in_use: CachePadded<AtomicU32>,
    pub(crate) receiver: CachePadded<ReceiverState>,
    pub(crate) cells: [RingCell; RING_ENTRIES],
    pub(crate) leases: LeaseTable,
    pub(crate) payloads: [UnsafeCell<[u8; MAX_MESSAGE]>; PAYLOADS],
}

/// What the target alone changes.
#[repr(C)]
pub(crate) struct ReceiverState {
    /// Inline messages that the target has taken. The initiator reads this only if it knows of no room.
    pub(crate) inline_taken: AtomicU64,
}

/// What the initiator alone changes.
#[repr(C)]
pub(crate) struct SenderState {
    /// The position of the next entry.
    pub(crate) tail: AtomicU64,
    /// Cells beyond the head that the initiator has committed.
    pub(crate) more_cells: AtomicU64,
    /// Payloads that the initiator has committed, one bit each.
    pub(crate) payloads: AtomicU32,
    /// Inline messages that the initiator has sent.
    pub(crate) inline_sent: AtomicU64,
    /// Inline messages that the target had taken when the initiator looked last.
    pub(crate) inline_seen: AtomicU64,
}

/// The leases, from the beginning of a page on.
#[repr(C, align(4096))]
pub(crate) struct LeaseTable([Lease; REGION_SLOTS]);

impl Deref for LeaseTable {
    type Target = [Lease; REGION_SLOTS];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Flags by which each side asks the other to wake it.
#[repr(C)]
pub(crate) struct ConnectionFlags {
    /// The target's endpoint does not look at this ring, or sleeps, and wants to be told of the next entry.
    pub(crate) armed: AtomicU32,
    /// The initiator found the message ring full and wants to be woken when there is room.
    pub(crate) sender_blocked: AtomicU32,
    /// The target has closed the connection.
    pub(crate) closed: AtomicU32,
    /// The target's slot for the initiator, which marks it in the target's ready set.
    pub(crate) slot: AtomicU32,
}

// SAFETY: the payloads are only reached through raw pointers, by `copy`.
unsafe impl Sync for ConnectionLayout {}
// SAFETY: plain memory.
unsafe impl Send for ConnectionLayout {}

// SAFETY: atomics and raw payloads.
unsafe impl SegmentContent for ConnectionLayout {
    const HEAD: usize = 4096;
}

impl ConnectionLayout {
    /// Returns true if payloads may have been written: if an entry is a message, or if entries were overwritten.
    pub(super) fn has_messages(&self) -> bool {
        let tail = self.sender.tail.load(Ordering::Acquire) as usize;
        tail > RING_ENTRIES || self.cells[..tail].iter().any(message_ring::is_message)
    }

    /// Notes that all of the segment has memory.
    pub(super) fn mark_committed(&self) {
        self.sender.more_cells.store(RING_ENTRIES as u64, Ordering::Relaxed);
        self.sender.payloads.store(u32::MAX, Ordering::Relaxed);
    }

    /// Zeroes the parts that were used: the entries, `leases` and the flags. No other thread may use the layout any
    /// more.
    pub(super) fn reset<'a>(&'a self, leases: impl Iterator<Item = &'a Lease>) {
        let tail = self.sender.tail.swap(0, Ordering::Relaxed) as usize;
        self.cells[..tail.min(RING_ENTRIES)].iter().for_each(RingCell::reset);
        leases.for_each(Lease::reset);
        self.payloads_in_use.store(0, Ordering::Relaxed);
        for count in [&self.sender.inline_sent, &self.sender.inline_seen, &self.receiver.inline_taken] {
            count.store(0, Ordering::Relaxed);
        }
        for flag in [&self.flags.armed, &self.flags.sender_blocked, &self.flags.closed, &self.flags.slot] {
            flag.store(0, Ordering::Relaxed);
        }
    }
}
