//! A request that comes alone: whoever waits for each answer has no second one to share a doorbell
//! with. It goes past the rotation and the batch's rules, which only order those that wait, and before
//! its operation is booked.

use super::posted::Run;
use super::{ActiveRail, Engine, Work};
use crate::op::OpId;
use crate::spi::PostResult;

/// What became of one.
pub(super) struct Lone {
    pub rail: usize,
    pub bytes: u64,
    pub result: PostResult,
}

impl Engine {
    /// Posts the only piece that an operation has, over `rail`, unless anything waits there or there is
    /// no room; then it is to be queued. It is to be booked once its operation is known here.
    pub(super) fn post_alone(
        &mut self,
        op: OpId,
        work: &Work,
        rail: usize,
        share: &mut ActiveRail,
    ) -> Option<Lone> {
        let this = &mut self.rails[rail];
        let item = share.next;
        let charge = this.window.charge(work.shape.piece_bytes().min(work.shape.bytes()));
        let has_room = this.credits() > 0
            && this.window.has_room(this.posted.charged(), this.posted.oldest_charge(), charge);
        if !this.rotation.is_clear() || !has_room {
            return None;
        }
        this.full = false;
        this.batch.clear();
        this.runs.clear();
        share.next += 1;
        let imm = work.imm_of_pieces();
        let bytes = work.expand(item..item + 1, share, imm, this.posted.id_of(0), &mut this.batch);
        this.runs.push(Run { op: op.index, item, count: 1, charge });
        Some(Lone { rail, bytes, result: self.post_batch(rail) })
    }
}
