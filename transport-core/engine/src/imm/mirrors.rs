//! Mirrors of counts: each arrival is stored into the signals that mirror its imm.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use foldhash::HashMap;

use crate::Signal;

/// All mirrors of a peer's counts, by imm value.
#[derive(Default)]
pub(super) struct Mirrors {
    by_imm: HashMap<u32, Vec<Mirrored>>,
    next: u64,
}

/// A signal that mirrors a count.
pub(super) struct Mirrored {
    id: u64,
    signal: Arc<dyn Signal>,
    total: u64,
    /// How far the signal advances when the peer is closed.
    advance_on_close: u32,
    /// How far the signal is ahead of the total.
    ahead: u32,
}

impl Mirrors {
    /// Counts one more arrival of `imm`.
    #[inline]
    pub fn arrived(&mut self, imm: u32) {
        if !self.by_imm.is_empty() {
            self.count(imm);
        }
    }

    #[cold]
    fn count(&mut self, imm: u32) {
        for mirror in self.by_imm.get_mut(&imm).into_iter().flatten() {
            mirror.total += 1;
            mirror.store();
        }
    }

    /// Advances the signals, because the peer is gone.
    pub fn close(&mut self) {
        for mirror in self.by_imm.values_mut().flatten() {
            mirror.ahead = mirror.advance_on_close;
            mirror.store();
        }
    }

    /// Adds a mirror that has counted `total` arrivals; returns its id. `is_closed` says that the peer is gone.
    pub fn add(
        &mut self,
        imm: u32,
        signal: Arc<dyn Signal>,
        total: u64,
        advance_on_close: u32,
        is_closed: bool,
    ) -> u64 {
        let id = self.next;
        self.next += 1;
        let ahead = if is_closed { advance_on_close } else { 0 };
        let mirror = Mirrored { id, signal, total, advance_on_close, ahead };
        mirror.store();
        self.by_imm.entry(imm).or_default().push(mirror);
        id
    }

    /// Removes a mirror. Drop it after unlocking: dropping a signal may run its owner's code.
    #[must_use = "to be dropped after unlocking"]
    pub fn remove(&mut self, imm: u32, id: u64) -> Option<Mirrored> {
        let mirrors = self.by_imm.get_mut(&imm)?;
        let place = mirrors.iter().position(|mirror| mirror.id == id)?;
        let removed = mirrors.swap_remove(place);
        if mirrors.is_empty() {
            self.by_imm.remove(&imm);
        }
        Some(removed)
    }

    /// The number of arrivals that a mirror has counted.
    pub fn total(&self, imm: u32, id: u64) -> u64 {
        let mut mirrors = self.by_imm.get(&imm).into_iter().flatten();
        mirrors.find(|mirror| mirror.id == id).map_or(0, |mirror| mirror.total)
    }

    /// Whether no signal mirrors a count.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.by_imm.is_empty()
    }
}

impl Mirrored {
    fn store(&self) {
        // The lock of the counts is held, so that the signal never goes back. The store releases the bytes.
        self.signal.atomic().store((self.total as u32).wrapping_add(self.ahead), Ordering::Release);
    }
}
