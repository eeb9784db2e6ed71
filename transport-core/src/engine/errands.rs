//! What no endpoint tells of and every turn has to look at: regions that are being taken back, drains, and
//! words that operations wait for.

use super::Engine;

impl Engine {
    /// Looks at them; how many came on. Mostly there are none, which one branch finds out.
    #[inline]
    pub(super) fn run_errands(&mut self) -> usize {
        match self.revoking.len() | self.draining.len() | self.untriggered.len() {
            0 => 0,
            _ => self.run_them(),
        }
    }

    #[cold]
    fn run_them(&mut self) -> usize {
        self.advance_revokes() + self.advance_drains() + self.begin_triggered()
    }
}
