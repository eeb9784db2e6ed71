//! A bounded queue of small entries: many producers, one consumer, no locks.
//!
//! Vyukov's algorithm: each cell carries a turn counter that says whose move it
//! is. The turn counts laps (`2 * lap`: free, `2 * lap + 1`: full) rather than
//! positions, so that zeroed memory is an empty ring. Producers may be another
//! process: nothing read here can make the consumer loop, panic, or leave the
//! ring's bounds. The consumer keeps its position to itself.

use std::sync::atomic::{AtomicU64, Ordering};

/// The atomic word the ring is made of; loom brings its own.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn replace(&self, current: u64, new: u64) -> Result<u64, u64>;
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn replace(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange_weak(current, new, Ordering::Relaxed, Ordering::Relaxed)
    }
}

/// One entry and its turn, a cache line apart from the next.
#[repr(C, align(64))]
pub(crate) struct Cell<W> {
    turn: W,
    entry: [W; 2],
}

impl<W: Word> Cell<W> {
    /// The entry that was last in it.
    pub(crate) fn last(&self) -> Entry {
        [self.entry[0].load(Ordering::Relaxed), self.entry[1].load(Ordering::Relaxed)]
    }

    /// As it was before its first entry, nobody else looking.
    pub(crate) fn reset(&self) {
        [&self.turn, &self.entry[0], &self.entry[1]].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// What travels: two words.
pub(crate) type Entry = [u64; 2];

/// Attempts of a producer before it reports a full ring. A hostile consumer
/// could otherwise keep it running.
const ATTEMPTS: usize = 1 << 10;

/// A view of a ring that lives elsewhere, mostly in shared memory.
pub(crate) struct Ring<'a, W, const N: usize> {
    tail: &'a W,
    cells: &'a [Cell<W>; N],
}

impl<'a, W: Word, const N: usize> Ring<'a, W, N> {
    const SHIFT: u32 = {
        assert!(N.is_power_of_two());
        N.trailing_zeros()
    };

    #[inline]
    pub(crate) fn new(tail: &'a W, cells: &'a [Cell<W>; N]) -> Self {
        Self { tail, cells }
    }

    /// Appends `entry`, or says that the ring is full.
    #[inline]
    pub(crate) fn push(&self, entry: Entry) -> bool {
        for _ in 0..ATTEMPTS {
            let position = self.tail.load(Ordering::Relaxed);
            let (cell, free) = self.locate(position);
            let turn = cell.turn.load(Ordering::Acquire);
            if turn == free {
                if self.tail.replace(position, position.wrapping_add(1)).is_ok() {
                    cell.entry[0].store(entry[0], Ordering::Relaxed);
                    cell.entry[1].store(entry[1], Ordering::Relaxed);
                    cell.turn.store(free.wrapping_add(1), Ordering::Release);
                    return true;
                }
            } else if (turn.wrapping_sub(free) as i64) < 0 {
                return false;
            }
        }
        false
    }

    /// Whether a push would find room now; other producers may take it first.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        let (cell, free) = self.locate(self.tail.load(Ordering::Relaxed));
        (cell.turn.load(Ordering::Relaxed).wrapping_sub(free) as i64) >= 0
    }

    /// Whether the entry at `head` is there.
    #[inline]
    pub(crate) fn ready(&self, head: u64) -> bool {
        let (cell, free) = self.locate(head);
        cell.turn.load(Ordering::Acquire) == free.wrapping_add(1)
    }

    /// Takes the entry at `head` and moves on. One consumer only.
    #[inline]
    pub(crate) fn pop(&self, head: &mut u64) -> Option<Entry> {
        let (cell, free) = self.locate(*head);
        if cell.turn.load(Ordering::Acquire) != free.wrapping_add(1) {
            return None;
        }
        let entry = [cell.entry[0].load(Ordering::Relaxed), cell.entry[1].load(Ordering::Relaxed)];
        cell.turn.store(free.wrapping_add(2), Ordering::Release);
        *head = head.wrapping_add(1);
        Some(entry)
    }

    #[inline]
    fn locate(&self, position: u64) -> (&'a Cell<W>, u64) {
        let lap = position >> Self::SHIFT;
        (&self.cells[position as usize & (N - 1)], lap.wrapping_mul(2))
    }
}

#[cfg(test)]
mod tests;
