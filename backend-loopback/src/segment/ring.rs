//! A bounded queue of small entries: many producers, one consumer, no locks.
//!
//! Vyukov's algorithm: each cell has a sequence number that says whether a producer or the consumer may use it. The
//! number counts laps (`2 * lap`: free, `2 * lap + 1`: full) rather than positions, so that zeroed memory is an empty
//! ring. Producers may be another process: nothing read here can make the consumer loop, panic, or leave the ring's
//! bounds. The consumer keeps its position to itself.

use std::sync::atomic::{AtomicU64, Ordering};

/// The atomic word that a ring and a ready set consist of. Loom's tests implement it for loom's own type.
pub(crate) trait AtomicWord {
    fn swap(&self, value: u64, order: Ordering) -> u64;
    fn set_bits(&self, bits: u64, order: Ordering);
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn try_replace(&self, current: u64, new: u64) -> Result<u64, u64>;
}

impl AtomicWord for AtomicU64 {
    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::swap(self, value, order)
    }

    #[inline]
    fn set_bits(&self, bits: u64, order: Ordering) {
        self.fetch_or(bits, order);
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn try_replace(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange_weak(current, new, Ordering::Relaxed, Ordering::Relaxed)
    }
}

/// One entry of `L` words and its sequence number, in a cache line of its own.
#[repr(C, align(64))]
pub(crate) struct Cell<W, const L: usize> {
    sequence: W,
    entry: [W; L],
}

impl<W: AtomicWord, const L: usize> Cell<W, L> {
    /// The first word of the last entry that was stored here.
    pub(crate) fn last(&self) -> u64 {
        self.entry[0].load(Ordering::Relaxed)
    }

    /// Zeroes the cell. No other thread may use the ring any more.
    pub(crate) fn reset(&self) {
        self.sequence.store(0, Ordering::Relaxed);
        self.entry.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// Attempts of a producer before it reports a full ring. Without a limit, a hostile consumer could keep it in the
/// loop.
const ATTEMPTS: usize = 1 << 10;

/// A ring. Its memory is elsewhere, usually in a segment.
pub(crate) struct Ring<'a, W, const N: usize, const L: usize> {
    tail: &'a W,
    cells: &'a [Cell<W, L>; N],
}

impl<'a, W: AtomicWord, const N: usize, const L: usize> Ring<'a, W, N, L> {
    const SHIFT: u32 = {
        assert!(N.is_power_of_two());
        N.trailing_zeros()
    };

    #[inline]
    pub(crate) fn new(tail: &'a W, cells: &'a [Cell<W, L>; N]) -> Self {
        Self { tail, cells }
    }

    /// Appends an entry, whose words from the length of `entry` on are any. Returns false if the ring is full, or if
    /// `may_use` says that the cell of a position has no memory.
    #[inline]
    pub(crate) fn push(&self, entry: &[u64], may_use: impl Fn(u64) -> bool) -> bool {
        for _ in 0..ATTEMPTS {
            let position = self.tail.load(Ordering::Relaxed);
            if !may_use(position) {
                return false;
            }
            let (cell, free) = self.locate(position);
            let sequence = cell.sequence.load(Ordering::Acquire);
            if sequence == free {
                if self.tail.try_replace(position, position.wrapping_add(1)).is_ok() {
                    for (word, value) in cell.entry.iter().zip(entry) {
                        word.store(*value, Ordering::Relaxed);
                    }
                    cell.sequence.store(free.wrapping_add(1), Ordering::Release);
                    return true;
                }
            } else if (sequence.wrapping_sub(free) as i64) < 0 {
                return false;
            }
        }
        false
    }

    /// Returns true if there is room for an entry now. Other producers may take it first.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        let (cell, free) = self.locate(self.tail.load(Ordering::Relaxed));
        (cell.sequence.load(Ordering::Relaxed).wrapping_sub(free) as i64) >= 0
    }

    /// Returns true if the entry at `head` was pushed.
    #[inline]
    pub(crate) fn ready(&self, head: u64) -> bool {
        let (cell, free) = self.locate(head);
        cell.sequence.load(Ordering::Acquire) == free.wrapping_add(1)
    }

    /// Takes the entry at `head` and advances `head`. A ring has one consumer.
    #[inline]
    pub(crate) fn pop(&self, head: &mut u64) -> Option<[u64; L]> {
        let (cell, free) = self.locate(*head);
        if cell.sequence.load(Ordering::Acquire) != free.wrapping_add(1) {
            return None;
        }
        let entry = std::array::from_fn(|word| cell.entry[word].load(Ordering::Relaxed));
        cell.sequence.store(free.wrapping_add(2), Ordering::Release);
        *head = head.wrapping_add(1);
        Some(entry)
    }

    #[inline]
    fn locate(&self, position: u64) -> (&'a Cell<W, L>, u64) {
        let lap = position >> Self::SHIFT;
        (&self.cells[position as usize & (N - 1)], lap.wrapping_mul(2))
    }
}

#[cfg(test)]
mod tests;
