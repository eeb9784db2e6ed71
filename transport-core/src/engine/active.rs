//! An operation on the worker's side: what is posted, what is not, how it will end.

use std::ops::Range;
use std::sync::Arc;

use super::Work;
use crate::index::GroupIndex;
use crate::observe::OperationKind;
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::plan::{RailRange, Shape};
use crate::spi::{Batch, PeerSlot, Piece, WorkKind, WorkRequest};
use crate::{Error, Time, Trigger, copy};

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Bytes are moving.
    Data,
    /// All bytes are delivered, each rail's before what comes over that rail: the others are flushed before the
    /// imm.
    Flush,
    /// All bytes are delivered; the one zero-byte imm is on its way.
    Imm,
}

/// An operation the engine knows. It holds `work`, and so every region the
/// hardware may touch, until `outstanding` is zero.
pub(crate) struct Active {
    pub id: OpId,
    pub work: Work,
    pub link: u32,
    pub peer: Arc<PeerInner>,
    /// What it waits for before it begins; taken once that is due.
    pub trigger: Option<Trigger>,
    pub deadline: Time,
    /// When it was submitted.
    pub begun: Time,
    /// When a request of it was last posted or ended.
    pub moved: Time,
    /// It was found to make no progress.
    pub stalled: bool,
    /// Its requests count against the peer's grant.
    pub metered: bool,
    /// It waits for that, in the list of its link.
    pub parked: bool,
    /// What its events belong to.
    pub span: tracing::Span,
    pub stage: Stage,
    /// One per rail of the engine; a pooled allocation.
    pub rails: Vec<ActiveRail>,
    /// Pieces not yet posted, over all rails.
    pub unposted: u32,
    /// Pieces posted and not acknowledged, over all rails.
    pub outstanding: u32,
    pub work_requests: u64,
    /// Why it will fail, once nothing is outstanding.
    pub error: Option<Error>,
    /// The waiter wants it stopped: at the deadline the abort scope goes down.
    pub cancelled: bool,
    /// The deadline has passed and the waiter has its answer.
    pub expired: bool,
    /// The abort scope is down.
    pub aborted: bool,
}

/// An operation's share of one rail.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ActiveRail {
    pub range: RailRange,
    /// The next piece to post.
    pub next: u32,
    /// Whether the rail's rotation holds the operation.
    pub queued: bool,
    /// Its share of what the operation's rails carry; 0 if the peer or the region cannot be
    /// reached over it.
    pub weight: u32,
    /// The endpoint had no room for its next piece, for the peer's sake.
    pub held: bool,
    /// The peer's slot there.
    pub slot: u32,
    pub lkey: u64,
    pub rkey: u64,
    pub base: u64,
}

impl ActiveRail {
    /// Whether the peer and the region can be reached over it.
    pub fn usable(&self) -> bool {
        self.weight > 0
    }

    /// Whether it carries, or has carried, a part of the operation.
    pub fn is_used(&self) -> bool {
        self.range.len() > 0
    }

    pub fn left(&self) -> u32 {
        self.range.end - self.next
    }
}

/// What users call it.
pub(super) fn kind_of(work: &Work) -> OperationKind {
    match work.kind {
        WorkKind::Read => OperationKind::Read,
        WorkKind::Send => OperationKind::Send,
        WorkKind::Write if matches!(work.shape, Shape::Touch { .. }) => OperationKind::WarmUp,
        WorkKind::Write if work.local.is_none() => OperationKind::WriteImm,
        WorkKind::Write if work.shape.is_pages() => OperationKind::WritePages,
        WorkKind::Write => OperationKind::Write,
    }
}

impl Active {
    /// Forgets what is not posted; it never will be.
    pub fn drop_unposted(&mut self) {
        for rail in &mut self.rails {
            rail.next = rail.range.end;
        }
        self.unposted = 0;
    }

    /// Appends the requests of `items` for one rail; returns their bytes.
    #[inline]
    pub fn expand(&self, items: Range<u32>, rail: &ActiveRail, first_id: u64, batch: &mut Batch) -> u64 {
        let imm = self.piece_imm();
        if self.stage == Stage::Data {
            return self.work.expand(items, rail, imm, first_id, batch);
        }
        let kind = if self.stage == Stage::Flush { WorkKind::Read } else { self.work.kind };
        batch.push(WorkRequest { kind, ..self.work.request(rail, imm, first_id) });
        0
    }

    /// The imm a piece carries: every piece's (`PerWr`), the last stage's, or that
    /// of the only piece there is.
    pub fn piece_imm(&self) -> Option<u32> {
        match self.stage {
            Stage::Data => self.work.imm_of_pieces(),
            Stage::Flush => None,
            Stage::Imm => self.work.imm,
        }
    }

    /// A request of it was posted or ended.
    #[inline]
    pub fn moves(&mut self, now: Time, next_look: &mut Time) {
        self.moved = now;
        if std::mem::take(&mut self.stalled) {
            // It may stall again.
            *next_look = now;
        }
    }

    /// It is none any more of what the worker has to do for its peer.
    #[inline]
    pub fn leaves(&self, group: GroupIndex) {
        if self.trigger.is_none() {
            self.peer.links[group].backlog.ended(&self.work);
        }
    }

    /// Nothing is posted and nothing will be.
    pub fn is_over(&self) -> bool {
        self.outstanding == 0 && self.unposted == 0
    }
}

impl Work {
    /// Appends the requests of `items` for one rail, each with `imm`; returns their bytes.
    #[inline]
    pub(super) fn expand(
        &self,
        items: Range<u32>,
        rail: &ActiveRail,
        imm: Option<u32>,
        first_id: u64,
        batch: &mut Batch,
    ) -> u64 {
        let request = self.request(rail, imm, first_id);
        let bytes = self.shape.bytes_of(items.clone());
        batch.push_run(request, |pieces| {
            self.shape.expand(items, pieces, |local, remote, len| Piece {
                local: request.local.wrapping_add(local as usize),
                remote: rail.base.wrapping_add(remote),
                len,
            });
        });
        bytes
    }

    /// What its requests over a rail have in common: of no bytes, at the beginning of both regions.
    #[inline]
    fn request(&self, rail: &ActiveRail, imm: Option<u32>, id: u64) -> WorkRequest {
        WorkRequest {
            id,
            peer: PeerSlot(rail.slot),
            kind: self.kind,
            local: self.local.as_ref().map_or(std::ptr::null_mut(), |region| region.start),
            lkey: rail.lkey,
            len: 0,
            remote: rail.base,
            rkey: rail.rkey,
            imm,
            strategy: copy::strategy(self.shape.bytes(), self.locality),
        }
    }
}
