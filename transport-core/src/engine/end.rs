//! How operations end: done, failed, cancelled, expired, or with their peer.

use super::Engine;
use super::active::Stage;
use crate::observe::What;
use crate::op::OpId;
use crate::spi::PeerSlot;
use crate::{Error, ErrorKind, Outcome, Time};

impl Engine {
    /// Ends an operation that has nothing posted and nothing to post.
    pub(super) fn finish_if_over(&mut self, op: u32) {
        let Some(active) = &self.active[op as usize] else { return };
        if !active.is_over() {
            return;
        }
        if active.stage != Stage::Imm && active.error.is_none() && active.work.imm_comes_last() {
            if active.stage == Stage::Data && self.needs_flushes && self.begin_flush(op) {
                return;
            }
            let gate = self.active[op as usize].as_ref().and_then(|active| active.work.gate.as_ref());
            if gate.is_none_or(|gate| gate.pass()) {
                self.begin_imm(op);
                return;
            }
        }
        let Some(active) = &mut self.active[op as usize] else { return };
        let result = match active.error.take() {
            Some(error) => Err(error),
            None => Ok(Outcome {
                bytes: active.work.bytes(),
                work_requests: active.work_requests,
                ..Outcome::default()
            }),
        };
        active.leaves(self.handle.group);
        let (id, link, parked) = (active.id, active.link, active.parked);
        let span = std::mem::replace(&mut active.span, tracing::Span::none());
        let mut rails = std::mem::take(&mut active.rails);
        rails.clear();
        self.spare.push(rails);
        self.note(10, op.into());
        self.running -= 1;
        if self.running == 0 {
            self.watches_nothing();
        }
        if parked {
            self.unpark(link, op);
        }
        // The memory is let go before anyone is told that it is.
        self.active[op as usize] = None;
        self.ends(id, &span, result.as_ref().err());
        self.handle.table.end(id, result);
        if self.links[link as usize].as_ref().is_some_and(|link| link.dead) {
            self.retire_link(link);
        }
    }

    /// Fails an operation with its first error, once nothing of it is posted.
    pub(super) fn fail_op(&mut self, op: u32, error: Error) {
        let Some(active) = &mut self.active[op as usize] else { return };
        active.error.get_or_insert(error);
        active.drop_unposted();
        self.finish_if_over(op);
    }

    /// Answers the waiter at once; the memory stays held until nothing is posted.
    fn answer_early(&mut self, op: u32, error: Error) {
        let Some(active) = &self.active[op as usize] else { return };
        self.handle.table.answer(active.id, Err(error.clone()));
        self.fail_op(op, error);
    }

    pub(super) fn cancel_active(&mut self, id: OpId) {
        let Some(active) = &self.active[id.index as usize] else { return };
        if active.id == id {
            let error = Self::ended(ErrorKind::Cancelled, active.work.kind);
            self.stop(id.index, error);
        }
    }

    /// Ends an operation with an error once nothing of it is posted; at its deadline the abort scope goes down.
    pub(super) fn stop(&mut self, op: u32, error: Error) {
        let Some(active) = &mut self.active[op as usize] else { return };
        active.cancelled = true;
        self.next_deadline = self.next_deadline.min(active.deadline);
        self.note(11, op.into());
        self.fail_op(op, error);
    }

    /// Looks at every deadline once one may have passed.
    pub(super) fn expire(&mut self, now: Time) -> usize {
        let mut next = Time::NEVER;
        let mut expired = 0;
        for op in 0..self.active.len() as u32 {
            let Some(active) = &mut self.active[op as usize] else { continue };
            if active.deadline > now {
                next = next.min(active.deadline);
            } else if active.cancelled && !active.aborted {
                // Awaited long enough: the abort scope goes down.
                active.aborted = true;
                expired += 1;
                let cancelled = || Self::ended(ErrorKind::Cancelled, active.work.kind);
                let (link, error) = (active.link, active.error.clone().unwrap_or_else(cancelled));
                self.answer_early(op, error);
                self.abort_link(link);
            } else if !active.expired {
                active.expired = true;
                expired += 1;
                let error = Self::ended(ErrorKind::DeadlineExceeded, active.work.kind);
                let id = active.id;
                self.note(12, op.into());
                self.record(What::Expired { op: id });
                self.answer_early(op, error);
            }
        }
        expired += self.expire_revokes(now, &mut next);
        expired += self.expire_drains(now, &mut next);
        let (due, next_alarm) = self.handle.alarms.due(now);
        self.next_alarm = next_alarm;
        self.next_deadline = next.min(next_alarm);
        expired + due.wake()
    }

    /// The peer is gone: its operations are answered now, and what is posted to
    /// it is torn down.
    pub(super) fn fail_link(&mut self, link: u32, error: &Error) {
        let Some(state) = self.links.get_mut(link as usize).and_then(Option::as_mut) else { return };
        if std::mem::replace(&mut state.dead, true) {
            return;
        }
        if error.kind() != ErrorKind::Closed {
            self.keep_casualties(link, error);
        }
        self.link_of.retain(|_, known| *known != link);
        for op in 0..self.active.len() as u32 {
            if self.active[op as usize].as_ref().is_some_and(|active| active.link == link) {
                self.answer_early(op, error.clone());
            }
        }
        self.abort_link(link);
        self.settle_doubts(link);
        self.retire_link(link);
    }

    fn abort_link(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let peer = state.peer.short_id();
        for (rail, slot) in state.slots.iter().enumerate() {
            if let Some(slot) = slot {
                self.rails[rail].endpoint.abort(PeerSlot(slot.0));
            }
        }
        self.record(What::Aborted { peer });
    }

    /// Frees a dead link once every rail has said goodbye and no operation is left.
    pub(super) fn retire_link(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        let in_use = self.active.iter().flatten().any(|active| active.link == link);
        if state.dead && state.all_slots().next().is_none() && !in_use {
            if self.handle.first_rail == 0 {
                self.handle.ledger.close(state.peer.id);
            }
            self.links[link as usize] = None;
            self.handle.release_link(link);
        }
    }
}
