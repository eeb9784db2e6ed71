//! Grants at work: what waits for its peer's, and what our peers get of ours.
//!
//! Most peers grant without limit, or more than an operation takes: then an operation is
//! not metered, and nothing here runs per request.

use std::sync::Arc;

use super::active::Stage;
use super::neighbour::LinkState;
use super::{Active, Engine, Work};
use crate::Peer;
use crate::grant::{Allowed, Credit};
use crate::index::GroupIndex;
use crate::observe::GrantOf;
use crate::spi::WorkKind;

/// Whether the requests of `work` are to be counted against `credit`.
pub(super) fn is_metered(work: &Work, credit: &Credit) -> bool {
    let counted = |unit: &Allowed| !unit.is_unlimited();
    work.kind != WorkKind::Read
        && (credit.bytes() != u64::MAX || credit.unit(work.kind, work.imm).is_some_and(counted))
}

impl Active {
    fn credit(&self, group: GroupIndex) -> &Credit {
        &self.peer.links[group].credit
    }

    /// What one request takes of the peer's grant, besides bytes.
    fn unit(&self, group: GroupIndex) -> Option<&Allowed> {
        self.credit(group).unit(self.work.kind, self.piece_imm())
    }

    /// Bytes of one request, at most.
    #[inline]
    pub(super) fn piece(&self) -> u64 {
        match self.stage {
            Stage::Data => self.work.shape.piece_bytes().min(self.work.shape.bytes()),
            Stage::Flush | Stage::Imm => 0,
        }
    }

    /// Takes room for up to `wanted` of its requests out of the peer's grant; how many.
    pub(super) fn take(&self, group: GroupIndex, link: &mut LinkState, wanted: u32) -> u32 {
        // The engines of other rail groups have their part of the window.
        let engines = self.peer.route(self.peer.links[group].engine.transport).len() as u64;
        let (bytes, piece) = (self.credit(group).bytes().div_ceil(engines), self.piece());
        let fit = match piece {
            0 => u64::MAX,
            // One may always go, however large: the window is no limit of sizes.
            _ if link.posted == 0 && bytes > 0 => (bytes / piece).max(1),
            _ => bytes.saturating_sub(link.posted) / piece,
        };
        let wanted = wanted.min(u32::try_from(fit).unwrap_or(u32::MAX));
        let taken = self.unit(group).map_or(wanted, |unit| unit.take(wanted));
        link.posted += piece * u64::from(taken);
        taken
    }

    /// What of the peer's grant it waits for.
    pub(super) fn lacks(&self, group: GroupIndex) -> GrantOf {
        match self.unit(group) {
            Some(unit) if unit.is_used_up() && self.work.kind == WorkKind::Send => GrantOf::Messages,
            Some(unit) if unit.is_used_up() => GrantOf::Imms,
            _ => GrantOf::Bytes,
        }
    }
}

impl Engine {
    /// Requests of a metered operation ended. Those that failed did not arrive, as far as
    /// we know: the receiver will not count them.
    #[cold]
    pub(super) fn metered_ended(&mut self, op: u32, pieces: u32, failed: bool) {
        let Some(active) = &self.active[op as usize] else { return };
        let (link, back) = (active.link, active.piece() * u64::from(pieces));
        if failed && let Some(unit) = active.unit(self.handle.group) {
            unit.give_back(pieces);
            active.peer.tell_others(self.handle.group);
        }
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        state.posted -= back;
        if back > 0 || failed {
            self.resume(link);
        }
    }

    /// Gives back what was taken for requests that the endpoint did not accept.
    #[cold]
    pub(super) fn give_back_refused(&mut self, rail: usize, accepted: u32) {
        let mut left = accepted;
        for place in 0..self.rails[rail].runs.len() {
            let run = self.rails[rail].runs[place];
            let taken = run.count.min(left);
            left -= taken;
            let back = run.count - taken;
            let metered = |active: &&Active| active.metered && back > 0;
            let Some(active) = self.active[run.op as usize].as_ref().filter(metered) else { continue };
            if let Some(unit) = active.unit(self.handle.group) {
                unit.give_back(back);
                active.peer.tell_others(self.handle.group);
            }
            let link = active.link;
            if let Some(Some(state)) = self.links.get_mut(link as usize) {
                state.posted -= active.piece() * u64::from(back);
            }
            self.resume(link);
        }
    }

    /// Takes an operation out of a rail's rotation, whose turn it is, until its peer has
    /// room for it: others go on.
    #[cold]
    pub(super) fn park(&mut self, rail: usize, op: u32) {
        self.rails[rail].rotation.pop();
        self.handle.counts[rail].waits_for_grant();
        let Some(active) = &mut self.active[op as usize] else { return };
        active.rails[rail].queued = false;
        if !std::mem::replace(&mut active.parked, true)
            && let Some(Some(link)) = self.links.get_mut(active.link as usize)
        {
            link.parked.push_back(op);
        }
    }

    /// What waits for the peer's grant tries again.
    pub(super) fn resume(&mut self, link: u32) {
        // Nothing is parked meanwhile; the list keeps its memory.
        while let Some(Some(state)) = self.links.get_mut(link as usize)
            && let Some(op) = state.parked.pop_front()
        {
            if let Some(active) = &mut self.active[op as usize] {
                active.parked = false;
            }
            self.queue(op);
        }
    }

    /// A parked operation ended.
    #[cold]
    pub(super) fn unpark(&mut self, link: u32, op: u32) {
        if let Some(Some(state)) = self.links.get_mut(link as usize) {
            state.parked.retain(|parked| *parked != op);
        }
    }

    /// The peer has granted more.
    pub(super) fn granted(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get(link as usize) else { return };
        state.peer.links[self.handle.group].credit.looked();
        self.note(13, link.into());
        self.resume(link);
    }

    /// Grants a peer more, by what was taken out of the completion queue meanwhile.
    #[cold]
    pub(super) fn grant_more(&mut self, link: u32) {
        let Some(Some(state)) = self.links.get_mut(link as usize) else { return };
        let peer = Peer(Arc::clone(&state.peer));
        let [imms, messages] = std::mem::take(&mut state.arrived);
        let tell = |allowance| peer.tell_grant(self.handle.transport, allowance);
        match self.handle.ledger.renew(&peer.0, imms, messages, tell) {
            Ok(given) => state.steps = given.steps,
            Err(error) => peer.fail(error),
        }
    }
}
