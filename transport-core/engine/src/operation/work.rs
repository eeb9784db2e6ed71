//! What an operation does, and the memory that it uses.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::ActiveRail;
use crate::flow_control::{CreditCounter, SendCredit, Weight};
use crate::index::TransportIndex;
use crate::memory::{RegionInner, RemoteInner};
use crate::plan::{ListPlan, RailRange, Segment, Shape};
use crate::spi::{Batch, Paths, PeerSlot, Piece, WorkKind, WorkRequest};
use crate::trace::OperationKind;
use crate::{Access, Locality, Result, copy};

/// When immediate data is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ImmMode {
    /// Once, after every byte of the operation is visible at the target.
    #[default]
    Last,
    /// With every work request: once per page of a paged write, and `imm_count` times for a single write. The imms
    /// have no order.
    PerWr,
}

/// What an operation does, and the memory that it uses. The memory lives at least as long as this value.
#[derive(Clone)]
pub struct Work {
    pub kind: WorkKind,
    pub shape: Shape,
    /// The pieces of the shape that this engine carries. The engines of other rail groups carry the others.
    pub pieces: RailRange,
    /// What the shares of the operation have in common. Set if several engines share an operation and one of them sends
    /// an imm after all bytes, or if something is to be called when the operation is over.
    pub shared: Option<Arc<SharedState>>,
    /// `None` for an imm without bytes and for a warm-up. For a list: that of its first segment. The others are in the
    /// shape.
    pub local: Option<Arc<RegionInner>>,
    /// `None` for a message, for an imm without bytes and for a warm-up. For a list as `local`.
    pub remote: Option<Arc<RemoteInner>>,
    pub imm: Option<u32>,
    pub imm_mode: ImmMode,
    pub locality: Locality,
    /// Whether no request is posted a second time after a device or a path was lost.
    pub no_replay: bool,
    /// Whether the pages are coalesced: they share large work requests, through slots of both sides.
    pub coalesce: bool,
    /// The local or the remote memory is device memory that the CPU cannot address: posting copies no bytes.
    pub device_memory: bool,
}

impl Work {
    /// All pieces of `shape`, without memory and without an imm. The caller sets these.
    #[inline]
    pub fn of(kind: WorkKind, shape: Shape) -> Self {
        Self {
            kind,
            pieces: RailRange::all_of(&shape),
            shape,
            shared: None,
            local: None,
            remote: None,
            imm: None,
            imm_mode: ImmMode::Last,
            locality: Locality::Auto,
            no_replay: false,
            coalesce: false,
            device_memory: false,
        }
    }

    /// Whether the local region, if there is one, is registered on rail `rail` of a transport.
    #[inline]
    pub fn is_local_on(&self, transport: TransportIndex, rail: usize) -> bool {
        self.local.as_ref().is_none_or(|region| region.regions[transport][rail].is_some())
    }

    /// Whether the remote region, if there is one, is imported on rail `rail` of its transport.
    #[inline]
    pub fn is_remote_on(&self, rail: usize) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.imports[rail].is_some())
    }

    /// Checks that no region of the work was revoked, and that the peer's regions still allow this side's access.
    ///
    /// # Errors
    /// `Revoked`, `RemoteAccess`.
    pub fn check_regions(&self, operation: &'static str) -> Result<()> {
        self.locals().try_for_each(|local| local.check_usable(operation))?;
        self.check_remotes(operation)
    }

    /// As [`Work::check_regions`], for the remote regions alone.
    pub fn check_remotes(&self, operation: &'static str) -> Result<()> {
        let access = if self.kind == WorkKind::Read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        self.remotes().try_for_each(|remote| remote.check(0, 0, access, operation))
    }

    /// Whether a local region is revoked.
    #[inline]
    pub fn is_local_revoked(&self) -> bool {
        match &self.shape {
            Shape::List(list) => list.segments().iter().any(|segment| segment.local.is_revoked()),
            _ => self.local.as_ref().is_some_and(|local| local.is_revoked()),
        }
    }

    /// Whether `region` is a local region of the work.
    pub fn uses(&self, region: &Arc<RegionInner>) -> bool {
        self.locals().any(|local| Arc::ptr_eq(local, region))
    }

    /// The local regions.
    pub fn locals(&self) -> impl Iterator<Item = &Arc<RegionInner>> {
        self.local.iter().chain(self.segments().iter().map(|segment| &segment.local))
    }

    /// The remote regions.
    pub fn remotes(&self) -> impl Iterator<Item = &Arc<RemoteInner>> {
        self.remote.iter().chain(self.segments().iter().map(|segment| &segment.remote))
    }

    /// The segments of a list without the first one; none for any other shape.
    #[inline]
    fn segments(&self) -> &[Segment] {
        self.shape.list().map_or(&[], |list| &list.segments()[1..])
    }

    /// The paths that bytes take over a transport. `bare` is the path of requests that address no region.
    #[inline]
    pub fn path(&self, transport: TransportIndex, bare: impl FnOnce() -> Paths) -> Paths {
        let path = match (&self.shape, &self.local, &self.remote) {
            (Shape::List(list), ..) => list.path(),
            (_, Some(local), Some(remote)) => local.path_to(remote),
            (_, Some(local), None) => bare() | local.staging_on(transport),
            _ => bare(),
        };
        if self.coalesce { path | Paths::COALESCED } else { path }
    }

    /// The entries that share a request with the entry before them. Of the engines that share an operation, the one
    /// that has its first piece counts them.
    #[inline]
    pub fn merged(&self) -> u32 {
        self.shape.list().filter(|_| self.pieces.start == 0).map_or(0, ListPlan::merged)
    }

    /// Whether the work is one request that is never split over rails: an imm alone, or a message.
    #[inline]
    pub fn is_one_request(&self) -> bool {
        self.shape.is_empty() || self.kind == WorkKind::Send
    }

    /// The imm that every piece carries (`PerWr`), or that the only piece carries.
    #[inline]
    pub fn imm_of_pieces(&self) -> Option<u32> {
        let is_one_piece = self.shape.piece_count() == 1 && self.shared.is_none();
        match self.imm_mode {
            ImmMode::Last if !is_one_piece => None,
            _ => self.imm,
        }
    }

    /// Whether a request of its own delivers the imm after all bytes are delivered.
    pub fn imm_comes_last(&self) -> bool {
        self.imm.is_some() && self.imm_of_pieces().is_none()
    }

    /// Whether all bytes must be visible at the target before the operation is over, also those that other devices
    /// deliver: something else announces them.
    #[inline]
    pub fn is_announced(&self) -> bool {
        self.kind == WorkKind::Write && self.shared.as_ref().is_some_and(|shared| shared.on_end.is_some())
    }

    /// Notes that the operation has failed, or never began. Only then [`SharedState`] calls its function with false.
    pub fn note_failed(&self) {
        if let Some(shared) = &self.shared {
            shared.failed.store(true, Ordering::Release);
        }
    }

    /// The bytes of this engine's pieces.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.shape.bytes_of(self.pieces.start..self.pieces.end)
    }

    /// The weight of this engine's pieces in the backlog of their peer. Inlined for writes of one piece.
    #[inline(always)]
    pub fn backlog_weight(&self) -> Weight {
        Weight::of(self.bytes(), self.pieces.len())
    }

    /// The operation of the public API that this work belongs to.
    pub fn operation_kind(&self) -> OperationKind {
        match self.kind {
            WorkKind::Read if matches!(&self.shape, Shape::List(list) if !list.paged) => {
                OperationKind::ReadList
            }
            WorkKind::Read if self.shape.is_pages() => OperationKind::ReadPages,
            WorkKind::Read => OperationKind::Read,
            WorkKind::Send => OperationKind::Send,
            WorkKind::Write if matches!(self.shape, Shape::WarmUp { .. }) => OperationKind::WarmUp,
            WorkKind::Write if self.local.is_none() => OperationKind::WriteImm,
            WorkKind::Write if self.shape.is_pages() => OperationKind::WritePages,
            WorkKind::Write if self.shape.list().is_some() => OperationKind::WriteList,
            WorkKind::Write => OperationKind::Write,
        }
    }

    /// The name of the operation in its errors.
    pub fn operation_name(&self) -> &'static str {
        match self.kind {
            WorkKind::Write => "write",
            WorkKind::Read => "read",
            WorkKind::Send => "send",
        }
    }

    /// Whether another rail group may carry the work, or the rest of it. A message may not: the peer's receives are posted
    /// on rails of this group.
    pub fn may_change_group(&self) -> bool {
        let is_bound = self.kind == WorkKind::Send || matches!(self.shape, Shape::WarmUp { .. });
        !is_bound && !self.no_replay
    }

    /// The same work for the pieces in `ranges` alone, which ascend.
    #[cold]
    pub fn part_of(&self, ranges: &[RailRange]) -> Self {
        if ranges == [self.pieces] {
            return self.clone();
        }
        let shape = self.shape.part_of(ranges);
        let mut part = Self { pieces: RailRange::all_of(&shape), shape, ..self.clone() };
        if let Some(first) = part.shape.list().and_then(|list| list.segments().first()) {
            (part.local, part.remote) = (Some(Arc::clone(&first.local)), Some(Arc::clone(&first.remote)));
        }
        part
    }

    /// The imm alone, once all bytes that it announces are delivered.
    #[cold]
    pub fn imm_alone(&self) -> Self {
        let shape = Shape::Range { local: 0, remote: 0, len: 0, chunk: 1 };
        Self { imm: self.imm, ..Self::of(self.kind, shape) }
    }

    /// Whether requests of the work take credit of the peer's grant: it limits bytes, or what the requests carry.
    pub fn takes_credit(&self, credit: &SendCredit) -> bool {
        let is_limited = |counter: &CreditCounter| !counter.is_unlimited();
        self.kind != WorkKind::Read
            && (credit.bytes() != u64::MAX || credit.counter(self.kind, self.imm).is_some_and(is_limited))
    }

    /// Appends the requests of `pieces` over one rail to a batch, each with `imm`. Returns their bytes. Not for
    /// lists.
    #[inline]
    pub(crate) fn expand(
        &self,
        pieces: Range<u32>,
        rail: &ActiveRail,
        imm: Option<u32>,
        first_id: u64,
        batch: &mut Batch,
    ) -> u64 {
        let request = self.request(rail, imm, first_id);
        let bytes = self.shape.bytes_of(pieces.clone());
        batch.push_run(request, |into| {
            self.shape.expand(pieces, into, |local, remote, len| Piece {
                local: request.local.wrapping_add(local as usize),
                remote: rail.base.wrapping_add(remote),
                len,
            });
        });
        bytes
    }

    /// A request of no bytes at the start of both regions: what all requests over one rail have in common.
    #[inline]
    pub(super) fn request(&self, rail: &ActiveRail, imm: Option<u32>, id: u64) -> WorkRequest {
        WorkRequest {
            id,
            peer: PeerSlot(rail.slot),
            kind: self.kind,
            local: self.local.as_ref().map_or(std::ptr::null_mut(), |region| region.start()),
            lkey: rail.lkey,
            len: 0,
            remote: rail.base,
            rkey: rail.rkey,
            imm,
            strategy: copy::strategy(self.shape.bytes(), self.locality),
        }
    }
}

/// What the shares of one operation have in common.
///
/// It counts the engines that have not delivered their bytes yet: the last one sends the imm that announces the bytes
/// of all. If an engine fails, it never counts down, and no engine sends the imm. Once every engine has finished with
/// its share, so that no byte can move any more, it calls a function.
pub struct SharedState {
    undelivered: AtomicU32,
    /// Whether a share has failed.
    failed: AtomicBool,
    on_end: Option<OnEnd>,
}

/// A function that is called when an operation is over, with whether it has succeeded. It runs in the thread that
/// drives the engine, so it must not block.
pub type OnEnd = Box<dyn FnOnce(bool) + Send + Sync>;

impl SharedState {
    /// The state of an operation that `engines` engines share.
    pub fn new(engines: u32, on_end: Option<OnEnd>) -> Self {
        Self { undelivered: AtomicU32::new(engines), failed: AtomicBool::new(false), on_end }
    }

    /// Notes that the calling engine has delivered its bytes. Returns true if it is the last engine.
    pub fn count_down(&self) -> bool {
        // AcqRel: the imm comes after the completions of all other engines.
        self.undelivered.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// The `Work` of each engine holds the state. An engine drops its `Work` once none of its requests is outstanding, so
/// this runs after the last engine.
impl Drop for SharedState {
    fn drop(&mut self) {
        if let Some(on_end) = self.on_end.take() {
            on_end(!*self.failed.get_mut());
        }
    }
}
