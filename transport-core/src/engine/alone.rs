//! A request that comes alone: whoever waits for each answer has no second one to share a doorbell
//! with. It goes past the rotation and the batch's rules, which only order those that wait.

use super::Engine;
use super::posted::Run;

impl Engine {
    /// Posts the only piece that an operation has, over `rail`, unless anything waits there or there is
    /// no room; then it is to be queued.
    pub(super) fn post_alone(&mut self, op: u32, rail: usize) -> bool {
        let this = &mut self.rails[rail];
        let Some(active) = &mut self.active[op as usize] else { return false };
        let share = &mut active.rails[rail];
        let item = share.next;
        let piece = active.work.shape.piece_bytes().min(active.work.shape.bytes());
        let charge = this.window.charge(piece);
        let has_room = this.credits() > 0
            && this.window.has_room(this.posted.charged(), this.posted.oldest_charge(), charge);
        if active.metered || !this.rotation.is_clear() || !has_room {
            return false;
        }
        this.full = false;
        this.batch.clear();
        this.runs.clear();
        share.next += 1;
        let share = *share;
        let bytes = active.expand(item..item + 1, &share, this.posted.id_of(0), &mut this.batch);
        this.runs.push(Run { op, item, count: 1, charge });
        self.posted_alone += self.post_batch(rail, bytes, 0);
        true
    }
}
