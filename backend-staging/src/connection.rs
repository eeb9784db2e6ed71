//! The connections of a domain. The connector (any thread) adds and closes them; the endpoint's thread uses and removes
//! them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use multirail_spi::{Event, PeerSlot, RemoteMemory, SlotTable, WorkKind, WorkRequest};

use crate::copies::Copies;
use crate::gpu_memory::RegisteredGpuMemory;
use crate::offer::StagingOffer;
use crate::region::StagedRegions;
use crate::staging_buffer::{RemoteBuffer, SLOT_COUNT, StagingBuffer};
use crate::wire::{IMM_TAGS, ImmTag, is_reserved};

/// A connection to one peer, and the staging buffers of both processes.
pub(crate) struct Connection {
    pub peer: PeerSlot,
    /// This process's staging buffer.
    pub buffer: StagingBuffer,
    /// The peer's staging buffer, and its import.
    remote: OnceLock<(RemoteBuffer, Arc<dyn RemoteMemory>)>,
    /// Whether the connector is done with the peer's offer.
    is_complete: AtomicBool,
    /// Whether both processes coalesce.
    coalesces: AtomicBool,
    /// The tag of the peer's slot imms, if this process offers to use imms.
    pub imms: Option<ImmTag>,
    fence: Mutex<Fence>,
    /// Whether `fence` is not `Fence::Open`.
    has_fence: AtomicBool,
    is_closing: AtomicBool,
}

/// What keeps the target from serving the peer's slot requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Nothing: it serves them.
    Open,
    /// A fence was asked for, and copies may be under way.
    Asked,
    /// No copy is under way, and none begins.
    Shut,
    /// The fence is lifted. The target passes over the slot requests that have arrived before: these are their sequence
    /// numbers, by slot.
    Lifted(Vec<u32>),
}

impl Connection {
    fn new(peer: PeerSlot, buffer: StagingBuffer, imms: Option<ImmTag>) -> Self {
        Self {
            peer,
            buffer,
            remote: OnceLock::new(),
            is_complete: AtomicBool::new(false),
            coalesces: AtomicBool::new(false),
            imms,
            fence: Mutex::new(Fence::Open),
            has_fence: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
        }
    }

    /// The peer's staging buffer. `None` if the peer does not stage, or is not connected yet.
    pub(crate) fn remote_buffer(&self) -> Option<RemoteBuffer> {
        self.remote.get().map(|(buffer, _)| *buffer)
    }

    /// Stores the import of the peer's staging buffer. The connection uses imms if both processes offer that, and
    /// coalesces if both allow it.
    pub(crate) fn connect(&self, import: Arc<dyn RemoteMemory>, offer: StagingOffer, coalesces: bool) {
        let imms = offer.imms.filter(|_| self.imms.is_some());
        let is_woken = imms.is_some() && offer.is_woken;
        self.coalesces.store(offer.coalesces && coalesces, Ordering::Release);
        let buffer = RemoteBuffer { base: import.base(), rkey: import.rkey(), imms, is_woken };
        let _ = self.remote.set((buffer, import));
    }

    /// Notes that the connector is done with the peer's offer: with [`connect`](Self::connect), if the peer stages.
    pub(crate) fn set_complete(&self) {
        self.is_complete.store(true, Ordering::Release);
    }

    /// Whether an imm that has arrived may belong to the peer's endpoint although the peer's offer is not known yet.
    pub(crate) fn may_use_imms(&self) -> bool {
        self.imms.is_some() && !self.is_complete.load(Ordering::Acquire)
    }

    /// Whether pages of registered regions may go through slots.
    pub(crate) fn coalesces(&self) -> bool {
        self.coalesces.load(Ordering::Acquire)
    }

    /// Whether requests and responses on this connection carry imms.
    pub(crate) fn uses_imms(&self) -> bool {
        self.remote_buffer().is_some_and(|buffer| buffer.imms.is_some())
    }

    /// Whether the receiver may take the imm of a work request for one of the endpoint's own: if this connection uses imms,
    /// or if another one to the same endpoint may do so.
    pub(crate) fn has_colliding_imm(&self, kind: WorkKind, imm: Option<u32>) -> bool {
        kind == WorkKind::Write && imm.is_some_and(is_reserved) && self.remote.get().is_some()
    }

    /// Lets the target serve no slot request any more. Returns whether no copy is under way.
    pub(crate) fn fence(&self) -> bool {
        let mut fence = self.locked_fence();
        if !matches!(*fence, Fence::Asked | Fence::Shut) {
            *fence = Fence::Asked;
            self.has_fence.store(true, Ordering::Release);
        }
        *fence == Fence::Shut
    }

    /// Lifts the fence, if there is one. Nothing of what the peer has posted before arrives any more.
    pub(crate) fn lift_fence(&self) {
        let mut fence = self.locked_fence();
        if *fence != Fence::Open {
            *fence = Fence::Lifted((0..SLOT_COUNT).map(|slot| self.buffer.sequence_in(slot)).collect());
        }
    }

    /// The fence. `None` if there is none, which is usual.
    #[inline]
    pub(crate) fn current_fence(&self) -> Option<Fence> {
        self.has_fence.load(Ordering::Acquire).then(|| self.locked_fence().clone())
    }

    /// Replaces the fence, unless it has changed since it was `seen`.
    pub(crate) fn move_fence(&self, seen: &Fence, to: Fence) {
        let mut fence = self.locked_fence();
        if *fence == *seen {
            self.has_fence.store(to != Fence::Open, Ordering::Release);
            *fence = to;
        }
    }

    fn locked_fence(&self) -> MutexGuard<'_, Fence> {
        self.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the connection as closing: the endpoint removes it once the inner endpoint reports the peer as gone.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }
}

/// The parts of an endpoint that an initiator or a target uses while it works on its connection.
pub(crate) struct EndpointContext<'a> {
    pub copies: &'a mut Copies,
    pub regions: &'a StagedRegions,
    pub gpu_memory: &'a RegisteredGpuMemory,
    /// Internal work requests that the endpoint posts to this connection's peer.
    pub outbox: &'a mut VecDeque<WorkRequest>,
    /// Events that the endpoint reports to the engine.
    pub events: &'a mut VecDeque<Event>,
    /// Set if anything changed, so that the worker polls again instead of sleeping.
    pub made_progress: &'a mut bool,
    /// Set if `events` reports an imm whose bytes the inner device wrote: the endpoint then flushes before the engine
    /// sees the imm.
    pub needs_flush: &'a mut bool,
}

/// All connections of a domain, by peer slot.
#[derive(Default)]
pub(crate) struct Connections {
    by_slot: SlotTable<Vec<Option<Arc<Connection>>>>,
    /// The tag after the one that was given last.
    next_tag: AtomicUsize,
}

impl Connections {
    /// Adds a connection. It offers to use imms if fewer than `max_imm_connections` connections do so already.
    pub(crate) fn insert(
        &self,
        peer: PeerSlot,
        buffer: StagingBuffer,
        max_imm_connections: u64,
    ) -> Arc<Connection> {
        let index = peer.0 as usize;
        let mut all = self.by_slot.lock();
        if all.len() <= index {
            all.resize(index + 1, None);
        }
        let imms = self.free_tag(&all, max_imm_connections);
        let connection = Arc::new(Connection::new(peer, buffer, imms));
        all[index] = Some(Arc::clone(&connection));
        self.by_slot.mark_changed();
        connection
    }

    /// A tag that no connection has. Tags are given in turn, so that a tag is not given again soon.
    fn free_tag(&self, all: &[Option<Arc<Connection>>], max_imm_connections: u64) -> Option<ImmTag> {
        let mut is_taken = [false; IMM_TAGS];
        let taken = all.iter().flatten().filter_map(|connection| connection.imms);
        taken.for_each(|tag| is_taken[tag.index()] = true);
        if is_taken.iter().filter(|taken| **taken).count() as u64 >= max_imm_connections {
            return None;
        }
        // The caller has locked the connections.
        let next = self.next_tag.load(Ordering::Relaxed);
        let free =
            (next..next + IMM_TAGS).map(|number| number % IMM_TAGS).find(|number| !is_taken[*number])?;
        self.next_tag.store(free + 1, Ordering::Relaxed);
        ImmTag::new(free)
    }

    pub(crate) fn of(&self, peer: PeerSlot) -> Option<Arc<Connection>> {
        self.by_slot.lock().get(peer.0 as usize).cloned().flatten()
    }

    pub(crate) fn clear(&self) {
        self.by_slot.lock().clear();
    }

    /// Removes a connection, unless its peer slot belongs to a newer connection already.
    pub(crate) fn remove(&self, connection: &Arc<Connection>) {
        let mut all = self.by_slot.lock();
        if let Some(entry) = all.get_mut(connection.peer.0 as usize)
            && entry.as_ref().is_some_and(|known| Arc::ptr_eq(known, connection))
        {
            *entry = None;
        }
    }

    /// Returns all connections if some were added since the last call with the same `seen`, which begins as
    /// [`u64::MAX`].
    #[inline]
    pub(crate) fn if_changed(&self, seen: &mut u64) -> Option<Vec<Option<Arc<Connection>>>> {
        self.by_slot.lock_if_changed(seen).map(|all| all.clone())
    }
}
