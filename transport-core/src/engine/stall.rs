//! Operations that make no progress: found by looking now and then, told once.

use super::Engine;
use crate::Time;
use crate::observe::What;

/// Parts of `stall_after` between two looks at least: bounds what looking costs
/// while operations come and go, and is how late a stall may be found.
const LOOKS: u32 = 8;

impl Engine {
    /// Looks at every operation once one may have stalled. No event: a run with
    /// another `stall_after`, or none, is the same run.
    #[cold]
    pub(super) fn look_for_stalls(&mut self, now: Time) {
        let watch = std::sync::Arc::clone(&self.handle.watch);
        let mut next = Time::NEVER;
        let mut found = Vec::new();
        // One that waits for its trigger has nothing to make progress with.
        let running = self.active.iter_mut().flatten().take(self.running);
        let running = running.filter(|op| op.trigger.is_none());
        let running = running.map(|op| (op.id, op.moved, &mut op.stalled));
        let revoking = self.revoking.iter_mut();
        let revoking = revoking.filter_map(|op| Some((op.id?, op.begun, &mut op.stalled)));
        for (id, moved, stalled) in running.chain(revoking).filter(|(.., stalled)| !**stalled) {
            let due = moved.after(watch.after);
            if due > now {
                next = next.min(due);
                continue;
            }
            *stalled = true;
            found.push(id);
        }
        self.next_look = next.max(now.after(watch.after / LOOKS));
        if next == Time::NEVER {
            self.next_look = Time::NEVER;
        }
        for id in &found {
            self.record(What::Stalled { op: *id });
            watch.found(self.handle.group, *id);
        }
        if !found.is_empty() && !self.handle.is_driven_by_caller() {
            watch.report_apart();
        }
    }
}
