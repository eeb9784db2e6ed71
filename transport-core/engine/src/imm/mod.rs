//! Counts of the immediate data that arrives from a peer.
//!
//! Counting begins when a peer is connected. So an imm that arrives before anyone waits for it is never lost.

mod mirrors;
mod values;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use mirrors::Mirrors;
use values::MAX_VALUES;
pub use values::Values;

use crate::waker_set::WakerSet;
use crate::{Error, Result, Signal};

/// The counts of all imm values of one peer.
#[derive(Default)]
pub struct ImmCounts(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    values: Values,
    /// The waiting futures, by the imm and the count that they wait for.
    waiting: WakerSet<(u32, u64)>,
    mirrors: Mirrors,
    /// The arrivals that were not counted, because there are too many values.
    lost: u64,
}

impl ImmCounts {
    /// Counts one more arrival of `imm`.
    pub fn arrived(&self, imm: u32) {
        let mut counts = self.lock();
        counts.mirrors.arrived(imm);
        let Some(count) = counts.values.add(imm) else {
            if counts.lost == 0 {
                tracing::error!(
                    imm,
                    "more than {MAX_VALUES} distinct imm values have counts; new values are dropped: take arrivals off their counts with try_take()"
                );
            }
            counts.lost += 1;
            return;
        };
        if counts.waiting.is_empty() {
            return;
        }
        let due = counts.waiting.take_range((imm, 0)..=(imm, count));
        drop(counts);
        due.wake();
    }

    /// Advances all mirrors and wakes all waiters, because the peer is gone.
    pub fn close(&self) {
        let mut counts = self.lock();
        counts.mirrors.close();
        let due = counts.waiting.take_all();
        drop(counts);
        due.wake();
    }

    /// The number of arrivals of `imm` that were not taken.
    #[inline]
    pub fn count(&self, imm: u32) -> u64 {
        self.lock().values.count(imm)
    }

    /// Takes `n` off the count of `imm` if it is at least `n`. Returns whether it did.
    #[inline]
    pub fn take(&self, imm: u32, n: u64) -> bool {
        self.lock().values.take(imm, n)
    }

    /// The result of `found` if the count of `imm` is at least `n`; else the error of `close_reason`, if there is one.
    /// Otherwise registers `waker`: it is woken when either may have changed. `id` as in [`WakerSet::register`].
    #[inline]
    pub fn poll<T>(
        &self,
        imm: u32,
        n: u64,
        id: &mut Option<u64>,
        waker: &Waker,
        close_reason: impl FnOnce() -> Option<Error>,
        found: impl FnOnce(&mut Values) -> T,
    ) -> Option<Result<T>> {
        let mut counts = self.lock();
        let output = if counts.values.count(imm) >= n {
            Some(Ok(found(&mut counts.values)))
        } else {
            close_reason().map(Err)
        };
        let waiting = &mut counts.waiting;
        let old = match output {
            Some(_) => waiting.unregister(id, (imm, n)),
            None => waiting.register(id, (imm, n), waker),
        };
        drop(counts);
        drop(old);
        output
    }

    /// Removes the waker of a wait that is dropped; `imm`, `n` and `id` as in [`ImmCounts::poll`].
    #[inline]
    pub fn forget(&self, imm: u32, n: u64, id: &mut Option<u64>) {
        if id.is_some() {
            let old = self.lock().waiting.unregister(id, (imm, n));
            drop(old);
        }
    }

    /// From now on stores the arrivals of `imm` into `signal`, beginning with those that were not taken. When the peer
    /// is closed, the signal advances by `advance_on_close`; at once if it `is_closed`, which is asked under the lock.
    /// Returns the id of the mirror.
    pub fn mirror(
        &self,
        imm: u32,
        signal: Arc<dyn Signal>,
        advance_on_close: u32,
        is_closed: impl FnOnce() -> bool,
    ) -> u64 {
        let mut counts = self.lock();
        let total = counts.values.count(imm);
        // The close of a peer sets the reason first, and then advances the mirrors under this lock.
        let is_closed = is_closed();
        counts.mirrors.add(imm, signal, total, advance_on_close, is_closed)
    }

    /// The number of arrivals that a mirror has counted.
    pub fn mirrored_total(&self, imm: u32, mirror: u64) -> u64 {
        self.lock().mirrors.total(imm, mirror)
    }

    /// Ends a mirror. The signal keeps its value.
    pub fn end_mirror(&self, imm: u32, mirror: u64) {
        let removed = self.lock().mirrors.remove(imm, mirror);
        // Dropping the signal may run its owner's code, so the lock is open again.
        drop(removed);
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_mirror_wraps_around() {
        let (counts, signal) = (ImmCounts::default(), Arc::new(AtomicU32::new(99)));
        let now = || signal.load(Ordering::Acquire);
        counts.lock().values.set(7, u64::from(u32::MAX) - 1);
        let mirror = counts.mirror(7, signal.clone(), 0, || false);
        (0..2).for_each(|_| counts.arrived(7));
        assert_eq!((now(), counts.mirrored_total(7, mirror)), (0, 1 << 32));
        counts.arrived(7);
        assert_eq!(now(), 1);
    }

    #[test]
    fn a_mirror_that_ends_leaves_nothing_behind() {
        let (counts, signal) = (ImmCounts::default(), Arc::new(AtomicU32::new(0)));
        let mirrors = [1, 2].map(|imm| (imm, counts.mirror(imm, signal.clone(), 0, || false)));
        assert_eq!(Arc::strong_count(&signal), 3);
        mirrors.iter().for_each(|(imm, mirror)| counts.end_mirror(*imm, *mirror));
        assert_eq!(Arc::strong_count(&signal), 1);
        assert!(counts.lock().mirrors.is_empty());
    }
}
