//! Operations that wait for their trigger: known here as every other, so that each end finds them, but
//! in no rail's rotation.

use std::time::Duration;

use super::{Engine, credit};
use crate::Access;
use crate::observe::What;

impl Engine {
    /// How long a worker may sleep for the sake of triggers, whose words wake nobody.
    pub(super) fn trigger_nap(&self, idle: Duration) -> Option<Duration> {
        (!self.untriggered.is_empty()).then(|| (idle / 8).min(self.handle.posting.trigger_nap))
    }

    /// Begins what waited for its trigger and need not any more; how many.
    pub(super) fn begin_triggered(&mut self) -> usize {
        let mut begun = 0;
        // Those that begin go out of the list, and those that have ended otherwise.
        let mut waiting = std::mem::take(&mut self.untriggered);
        waiting.retain(|id| {
            let active = self.active[id.index as usize].as_ref().filter(|active| active.id == *id);
            match active.and_then(|active| active.trigger.as_ref()) {
                None => false,
                Some(trigger) if !trigger.is_due() => true,
                Some(_) => {
                    self.trigger(id.index);
                    begun += 1;
                    false
                }
            }
        });
        self.untriggered = waiting;
        begun
    }

    /// From now on it is an operation as any other.
    fn trigger(&mut self, op: u32) {
        let now = self.now();
        let Some(active) = &mut self.active[op as usize] else { return };
        let trigger = active.trigger.take();
        let link = &active.peer.links[self.handle.group];
        link.backlog.begins(&active.work);
        active.metered = credit::is_metered(&active.work, &link.credit);
        active.moved = now;
        // What was true at the submission may not be any more.
        let remote = active.work.remote.as_ref();
        let name = Self::operation_name(active.work.kind);
        let refused = remote.and_then(|remote| remote.check(0, 0, Access::REMOTE_WRITE, name).err());
        let (id, deadline) = (active.id, active.deadline);
        self.note(15, op.into());
        self.record(What::Triggered { op: id });
        self.watch_until(now, deadline);
        match refused {
            Some(error) => self.fail_op(op, error),
            None => self.queue(op),
        }
        // Its owner's code, last.
        drop(trigger);
    }
}
