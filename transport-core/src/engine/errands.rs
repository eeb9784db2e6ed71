//! What no endpoint tells of and every turn has to look at: regions that are being taken back, drains, and
//! words that operations wait for.

use super::Engine;

impl Engine {
    /// Whether there are any. Mostly there are none, which one branch finds out.
    #[inline]
    pub(super) fn has_errands(&self) -> bool {
        self.revoking.len() | self.draining.len() | self.untriggered.len() != 0
    }

    /// Looks at each of them; how many ended or began.
    #[cold]
    pub(super) fn run_errands(&mut self) -> usize {
        self.advance_revokes() + self.advance_drains() + self.begin_triggered()
    }
}
