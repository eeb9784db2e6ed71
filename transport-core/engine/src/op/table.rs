//! The op table: the state of each operation between its submission and its last completion.
//!
//! A slot has two owners: the *waiter* (an [`Op`](super::Op)) and the *engine*. The engine completes an operation
//! once, which gives the waiter its result. Separately, the engine marks the operation *quiesced*: no byte can move any
//! more. The waiter may release the slot at any time. The owner that finishes second frees the slot. So neither a
//! dropped future nor an early result frees memory that the hardware may still touch: the engine keeps this memory
//! under the same index.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::task::{Context, Poll};

use crossbeam_queue::ArrayQueue;

use super::receipt::TransferNotes;
use super::{Outcome, Receipt};
use crate::sync::{AtomicU64, UnsafeCell, WakerCell};
use crate::{EngineHandle, Error, Result};

/// An operation's id: a slot of an engine's op table, and the slot's generation, which differs for each operation in
/// the slot. Printed as `slot.generation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct OpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl std::fmt::Display for OpId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

impl OpId {
    /// TableSlot and generation in one word, for the flight recorder.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self { index: word as u32, generation: (word >> 32) as u32 }
    }
}

/// The most slots of a table.
pub const MAX_OPERATIONS: usize = 1 << 24;
/// The result is there; only the waiter may take it.
const COMPLETED: u64 = 1;
/// The engine has finished: no byte can move, and the engine will not write to the slot.
const QUIESCED: u64 = 2;
/// The waiter has released the slot and will not read it again.
const RELEASED: u64 = 4;
/// Generations start above the flags.
const GENERATION_SHIFT: u32 = 32;

struct TableSlot {
    /// `generation << 32 | flags`.
    state: AtomicU64,
    waker: WakerCell,
    end: UnsafeCell<OperationEnd>,
}

/// What the engine publishes when an operation ends.
struct OperationEnd {
    /// The waiter takes an error out; an outcome stays until the slot is free.
    result: Option<Result<Outcome>>,
    notes: TransferNotes,
}

/// All slots of an engine.
pub struct OpTable {
    slots: Box<[TableSlot]>,
    free: ArrayQueue<u32>,
}

// SAFETY: `end` is the only field that is not Sync. The engine writes it before
// it sets COMPLETED, the waiter uses it after it saw COMPLETED, and the owner that
// frees the slot clears it after both have released it: three phases ordered by `state`.
unsafe impl Sync for OpTable {}
// SAFETY: as above; results are Send.
unsafe impl Send for OpTable {}

impl OpTable {
    /// A table for so many operations of an engine that has `rails` rails.
    pub fn new(capacity: usize, rails: usize) -> Self {
        let capacity = capacity.clamp(1, MAX_OPERATIONS);
        let free = ArrayQueue::new(capacity);
        let slots = (0..capacity)
            .map(|index| {
                let _ = free.push(index as u32);
                let end = OperationEnd { result: None, notes: TransferNotes::with_room(rails) };
                TableSlot { state: AtomicU64::new(0), waker: WakerCell::new(), end: UnsafeCell::new(end) }
            })
            .collect();
        Self { slots, free }
    }

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Takes a slot; `None` when all are in use.
    #[inline]
    pub fn insert(&self) -> Option<OpId> {
        let index = self.free.pop()?;
        let state = self.slots[index as usize].state.load(Relaxed);
        Some(OpId { index, generation: (state >> GENERATION_SHIFT) as u32 })
    }

    /// The number of slots in use.
    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    // ---- the engine's side ----

    /// Publishes the result. Ignores all calls for the operation but the first.
    pub fn complete(&self, id: OpId, result: Result<Outcome>) {
        self.publish(id, COMPLETED, result, |notes| notes.is_noted = false);
    }

    /// Publishes the outcome of an operation that has succeeded, with what `note` writes down for its receipt, and marks
    /// the operation quiesced.
    #[inline]
    pub(crate) fn succeed(&self, id: OpId, outcome: Outcome, note: impl FnOnce(&mut TransferNotes)) {
        self.publish(id, COMPLETED | QUIESCED, Ok(outcome), |notes| {
            notes.is_noted = true;
            note(notes);
        });
    }

    /// Notes the receipt of the rest of an operation, which another rail group has carried. The operation is about to
    /// succeed.
    #[cold]
    pub(crate) fn note_continued(&self, id: OpId, rest: Receipt) {
        let slot = self.slot(id);
        if slot.state.load(Relaxed) & COMPLETED != 0 {
            return;
        }
        slot.end.with_mut(|end| {
            // SAFETY: as in `publish`: the operation has no result, so the engine alone uses the cell.
            let end = unsafe { &mut *end };
            end.notes.continued = Some((id.generation, Box::new(rest)));
        });
    }

    /// Publishes the result, unless the operation has one, and sets `flags`. Inlined, so that the engine does not write the
    /// result to memory twice.
    #[inline(always)]
    fn publish(&self, id: OpId, flags: u64, result: Result<Outcome>, note: impl FnOnce(&mut TransferNotes)) {
        let slot = self.slot(id);
        if slot.state.load(Relaxed) & COMPLETED != 0 {
            if flags & QUIESCED != 0 {
                self.quiesce(id);
            }
            return;
        }
        slot.end.with_mut(|end| {
            // SAFETY: not COMPLETED and not QUIESCED, so neither the waiter nor a freeing
            // party touches the cell, and one thread at a time drives the engine.
            let end = unsafe { &mut *end };
            // The slot had no result, because `free` clears it. So nothing has to be dropped.
            std::mem::forget(end.result.replace(result));
            note(&mut end.notes);
        });
        self.set(id, flags);
    }

    /// Sets flags of the engine, and wakes the waiter. Frees the slot if the operation is quiesced and the waiter has
    /// released it.
    #[inline]
    fn set(&self, id: OpId, flags: u64) {
        let slot = self.slot(id);
        let before = slot.state.fetch_or(flags, AcqRel);
        if before & RELEASED != 0 && flags & QUIESCED != 0 {
            self.free(id);
        } else {
            // If the operation is quiesced, and if the waiter releases the slot at this moment, and another operation
            // takes it, this wakes the waiter of the other operation without need. That waiter polls, and registers its
            // waker again.
            slot.waker.wake();
        }
    }

    #[inline]
    pub fn is_completed(&self, id: OpId) -> bool {
        self.slot(id).state.load(Acquire) & COMPLETED != 0
    }

    /// Whether no byte can move any more.
    #[inline]
    pub fn is_quiesced(&self, id: OpId) -> bool {
        self.slot(id).state.load(Acquire) & QUIESCED != 0
    }

    /// Marks the operation quiesced: no byte can move any more. The engine must not use `id` after this.
    pub fn quiesce(&self, id: OpId) {
        self.set(id, QUIESCED);
    }

    /// Completes the operation and marks it quiesced.
    pub fn finish(&self, id: OpId, result: Result<Outcome>) {
        self.publish(id, COMPLETED | QUIESCED, result, |notes| notes.is_noted = false);
    }

    /// Frees a slot whose id neither an engine nor a waiter has.
    #[inline]
    pub fn take_back(&self, id: OpId) {
        self.free(id);
    }

    /// Whether `id` is an operation that is not quiesced. The id may be of an operation that ended long ago.
    pub fn is_under_way(&self, id: OpId) -> bool {
        let state = self.slots[id.index as usize].state.load(Acquire);
        (state >> GENERATION_SHIFT) as u32 == id.generation && state & QUIESCED == 0
    }

    // ---- the waiter's side ----

    /// The result, once it is there. At most one `Ready` per operation.
    pub fn poll_result(&self, id: OpId, context: &mut Context<'_>) -> Poll<Result<Outcome>> {
        self.poll_flag(id, COMPLETED, context).map(|()| self.take(id))
    }

    /// The result if it is there.
    #[inline]
    pub fn try_result(&self, id: OpId) -> Option<Result<Outcome>> {
        self.is_completed(id).then(|| self.take(id))
    }

    /// The receipt, once the operation has succeeded. `None` before, and for operations that have none.
    pub fn receipt(&self, id: OpId, engine: &EngineHandle) -> Option<Receipt> {
        if !self.is_completed(id) {
            return None;
        }
        self.slot(id).end.with(|end| {
            // SAFETY: as in `take`; the borrow ends with this call.
            let end = unsafe { &*end };
            let outcome = end.result.as_ref()?.as_ref().ok()?;
            end.notes.is_noted.then(|| end.notes.receipt(id, outcome, engine))
        })
    }

    /// Ready once no byte can move any more.
    pub fn poll_quiesced(&self, id: OpId, context: &mut Context<'_>) -> Poll<()> {
        self.poll_flag(id, QUIESCED, context)
    }

    /// Releases the waiter's hold on the slot. The waiter must not use `id` after this.
    #[inline]
    pub fn release(&self, id: OpId) {
        let before = self.slot(id).state.fetch_or(RELEASED, AcqRel);
        if before & QUIESCED != 0 {
            self.free(id);
        }
    }

    fn poll_flag(&self, id: OpId, flag: u64, context: &mut Context<'_>) -> Poll<()> {
        let slot = self.slot(id);
        if slot.state.load(Acquire) & flag != 0 {
            return Poll::Ready(());
        }
        slot.waker.register(context.waker());
        match slot.state.load(Acquire) & flag {
            0 => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }

    fn take(&self, id: OpId) -> Result<Outcome> {
        // SAFETY: COMPLETED was seen, so the engine writes no more; the waiter is
        // one value and has not released the slot.
        let result = self.slot(id).end.with_mut(|end| match unsafe { &mut (*end).result } {
            Some(Ok(outcome)) => Some(Ok(*outcome)),
            other => other.take(),
        });
        result.unwrap_or_else(|| {
            Err(Error::new(crate::ErrorKind::Closed, "poll", "the operation's result was already taken"))
        })
    }

    fn free(&self, id: OpId) {
        let slot = self.slot(id);
        // SAFETY: both owners have let go, and this is the second of them.
        slot.end.with_mut(|end| unsafe { (*end).result = None });
        slot.waker.clear();
        slot.state.store(u64::from(id.generation.wrapping_add(1)) << GENERATION_SHIFT, Relaxed);
        let pushed = self.free.push(id.index);
        debug_assert!(pushed.is_ok(), "a slot was freed twice");
    }

    fn slot(&self, id: OpId) -> &TableSlot {
        let slot = &self.slots[id.index as usize];
        debug_assert_eq!(
            (slot.state.load(Relaxed) >> GENERATION_SHIFT) as u32,
            id.generation,
            "stale operation id"
        );
        slot
    }
}

#[cfg(test)]
mod tests;
