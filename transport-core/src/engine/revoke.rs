//! Regions that are being taken back, until no peer is inside a copy.

use std::sync::Arc;
use std::task::Poll;

use super::Engine;
use crate::observe::What;
use crate::op::OpId;
use crate::region::RegionInner;
use crate::{Error, Outcome, Time};

pub(super) struct Revoking {
    pub id: OpId,
    pub region: Arc<RegionInner>,
    pub deadline: Time,
    pub begun: Time,
    pub stalled: bool,
}

impl Engine {
    /// Asks every region that is being revoked whether it is quiet.
    pub(super) fn advance_revokes(&mut self) -> usize {
        let mut ended = 0;
        for place in (0..self.revoking.len()).rev() {
            let Poll::Ready(result) = self.revoking[place].region.poll_quiet() else { continue };
            let id = self.revoking.swap_remove(place).id;
            ended += 1;
            self.record(What::Ended { op: id, error: result.as_ref().err().map(Error::kind) });
            self.handle.table.end(id, result.map(|()| Outcome::default()));
        }
        ended
    }
}
