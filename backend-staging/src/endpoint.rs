//! The endpoint: posts unstaged work requests to the inner endpoint, and passes staged ones to the initiator of their
//! connection.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    Armed, Batch, Completions, DeliveredScope, Endpoint, ErrorKind, Event, PeerSlot, Piece, PostResult,
    ReceiveRequest, RemoteKey, Status, TakeMessage, Time, WorkKind, WorkRequest,
};

use crate::connection::{Connection, EndpointContext};
use crate::copies::{Copies, CopyTag};
use crate::domain::DomainState;
use crate::initiator::{MAX_COALESCED, SlotInitiator};
use crate::page_table::alike;
use crate::receives::StagedReceives;
use crate::staging_buffer::SLOT_COUNT;
use crate::target::SlotTarget;
use crate::wire::{ImmTag, SlotImm, SlotImmKind, is_reserved};
use crate::wr_id::{InternalWrId, WrRole, describe_staging_status, staging_status};

/// The most events that wait to be reported. With so many, the endpoint takes no more from the inner endpoint.
const MAX_QUEUED_EVENTS: usize = 256;
/// The most polls of the inner endpoint in one poll of this one, even if all events are imms of slots.
const INNER_POLLS: usize = 16;
/// The most imms of a connection that wait until the peer's offer is known: more than the slots of a peer send.
const MAX_EARLY_IMMS: usize = 4 * SLOT_COUNT;
/// The most internal work requests in one batch.
const INTERNAL_BATCH: usize = 32;

/// The endpoint of a staged domain.
///
/// The order of its fields is the order in which they are dropped: `copies` waits for all copies that are under way,
/// and `inner` stops all work requests. Nothing accesses the memory behind the other fields after that.
pub(crate) struct StagedEndpoint {
    copies: Copies,
    inner: Box<dyn Endpoint>,
    receives: StagedReceives,
    /// The connected peers, by peer slot.
    peers: Vec<Option<PeerState>>,
    domain: Arc<DomainState>,
    /// The number of changes of the domain's connections that `peers` reflects.
    seen_changes: u64,
    /// Events to be reported.
    events: VecDeque<Event>,
    /// Whether anything has changed since the last poll.
    made_progress: bool,
    /// Whether the events to be reported include an imm that arrived in a slot request. The inner device wrote the
    /// imm's bytes directly into their region, which may have to be flushed ([`Flushes`](multirail_spi::Flushes)). The
    /// inner endpoint flushes for the imms that it reports itself, but not for this one.
    needs_flush: bool,
    /// Whether the inner device was lost.
    is_lost: bool,
    /// Kept for reuse.
    polled: Completions,
    internal_batch: Batch,
    unstaged_batch: Batch,
}

/// The endpoint's state for one connected peer.
struct PeerState {
    connection: Arc<Connection>,
    initiator: SlotInitiator,
    target: SlotTarget,
    /// Internal work requests to be posted.
    outbox: VecDeque<WorkRequest>,
    /// Imms that arrived before the peer's offer was known: they are the user's, or those of slots.
    early_imms: Vec<u32>,
}

impl Endpoint for StagedEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        if self.is_lost || !batch.runs().any(|(run, pieces)| self.is_staged(run, pieces)) {
            // SAFETY: by the caller.
            return unsafe { self.inner.post(batch) };
        }
        self.add_new_peers();
        let mut accepted = 0;
        let mut error = None;
        for (run, pieces) in batch.runs() {
            // SAFETY: by the caller, for a part of the batch.
            let PostResult { accepted: taken, error: failed } = unsafe { self.post_run(run, pieces) };
            accepted += taken;
            error = failed;
            if taken < pieces.len() {
                break;
            }
        }
        self.advance(true);
        PostResult { accepted, error }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if batch.iter().all(|receive| receive.lkey & RemoteKey::STAGED == 0) {
            // SAFETY: by the caller.
            return unsafe { self.inner.post_recv(batch) };
        }
        for (accepted, receive) in batch.iter().enumerate() {
            let mut posted = *receive;
            if let Some(region) = self.domain.regions.by_lkey(receive.lkey) {
                posted = match self.receives.add(&*self.domain.inner, receive, region) {
                    Ok(posted) => posted,
                    Err(why) => {
                        tracing::warn!(%why, "staging: there is no bounce buffer for a receive");
                        return PostResult { accepted, error: Some(staging_status(why.kind())) };
                    }
                };
            }
            // SAFETY: by the caller; a bounce buffer belongs to `receives` until the receive has ended.
            let PostResult { accepted: taken, error } = unsafe { self.inner.post_recv(&[posted]) };
            if taken == 0 {
                self.receives.remove(receive.id);
                return PostResult { accepted, error };
            }
        }
        PostResult { accepted: batch.len(), error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        // Several polls of the inner endpoint take all imms of slots at once, so that they do not fill the completion
        // queue. Nothing else has to be done for a wake imm, because each poll reads the staging buffers anyway. But
        // after a `PeerGone` the endpoint must not poll the inner endpoint before the engine has acted on that event.
        for _ in 0..INNER_POLLS {
            let is_peer_gone = self.events.iter().any(|event| matches!(event, Event::PeerGone { .. }));
            if is_peer_gone || self.events.len() >= MAX_QUEUED_EVENTS || !self.poll_inner(into) {
                break;
            }
        }
        self.advance(false);
        while into.spare() > 0
            && let Some(event) = self.events.pop_front()
        {
            let _ = into.push(event);
        }
        if std::mem::take(&mut self.needs_flush) {
            self.domain.flushes.flush_if_arrivals(into);
        }
        if std::mem::take(&mut self.made_progress) {
            into.note_progress();
        }
    }

    fn arm(&mut self) -> Armed {
        self.add_new_peers();
        if self.is_busy() {
            return Armed::Ready;
        }
        match self.inner.arm() {
            #[cfg(unix)]
            Armed::Fd(fd) if !self.is_woken_by_all_peers() => Armed::FdOrTimeout(fd),
            armed => armed,
        }
    }

    fn due(&self) -> Time {
        self.inner.due()
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.with_peer(peer, |initiator, _, context| initiator.stop(ErrorKind::Cancelled, context));
        self.inner.abort(peer);
    }

    fn peer_fenced(&mut self, peer: PeerSlot) {
        let must_abort = self.with_peer(peer, |initiator, _, context| initiator.on_peer_fenced(context));
        if must_abort == Some(true) {
            self.inner.abort(peer);
        }
        self.made_progress = true;
        self.inner.peer_fenced(peer);
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        self.inner.cancel_recv(id)
    }

    fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        self.inner.take_unclaimed(peer, take);
    }

    fn describe(&self, status: Status) -> String {
        describe_staging_status(status).unwrap_or_else(|| self.inner.describe(status))
    }
}

impl StagedEndpoint {
    pub(crate) fn new(domain: Arc<DomainState>, inner: Box<dyn Endpoint>) -> Self {
        Self {
            copies: Copies::default(),
            inner,
            receives: StagedReceives::default(),
            peers: Vec::new(),
            domain,
            seen_changes: u64::MAX,
            events: VecDeque::new(),
            made_progress: false,
            needs_flush: false,
            is_lost: false,
            polled: Completions::with_room(MAX_QUEUED_EVENTS),
            internal_batch: Batch::with_capacity(INTERNAL_BATCH),
            unstaged_batch: Batch::default(),
        }
    }

    /// Creates the state of peers that have connected.
    #[inline]
    fn add_new_peers(&mut self) {
        if self.is_lost {
            return;
        }
        let Some(connections) = self.domain.connections.if_changed(&mut self.seen_changes) else { return };
        self.peers.resize_with(connections.len().max(self.peers.len()), || None);
        for (peer, connection) in self.peers.iter_mut().zip(connections) {
            // The previous peer of this slot keeps its state until its `PeerGone`.
            if let (None, Some(connection)) = (&peer, connection) {
                *peer = Some(PeerState {
                    initiator: SlotInitiator::new(Arc::clone(&connection)),
                    target: SlotTarget::new(Arc::clone(&connection)),
                    outbox: VecDeque::new(),
                    early_imms: Vec::new(),
                    connection,
                });
            }
        }
    }

    /// Calls `act` with the initiator and the target of a peer. Returns `None` if there is no such peer.
    fn with_peer<T>(
        &mut self,
        peer: PeerSlot,
        act: impl FnOnce(&mut SlotInitiator, &mut SlotTarget, &mut EndpointContext<'_>) -> T,
    ) -> Option<T> {
        let peer = self.peers.get_mut(peer.0 as usize)?.as_mut()?;
        let mut context = EndpointContext {
            copies: &mut self.copies,
            regions: &self.domain.regions,
            gpu_memory: &self.domain.gpu_memory,
            outbox: &mut peer.outbox,
            events: &mut self.events,
            made_progress: &mut self.made_progress,
            needs_flush: &mut self.needs_flush,
        };
        Some(act(&mut peer.initiator, &mut peer.target, &mut context))
    }

    /// Advances all copies, targets and initiators in a post or in a poll, and posts their internal work requests.
    fn advance(&mut self, is_post: bool) {
        self.advance_copies();
        if self.is_lost {
            return;
        }
        for index in 0..self.peers.len() {
            if self.peers[index].as_ref().is_some_and(|peer| !peer.early_imms.is_empty()) {
                self.take_early_imms(PeerSlot(index as u32));
            }
            self.with_peer(PeerSlot(index as u32), |initiator, target, context| {
                if context.events.len() < MAX_QUEUED_EVENTS {
                    context.copies.make_room();
                    target.advance(context);
                }
                context.copies.make_room();
                initiator.advance(is_post, context);
            });
            self.finish_copies();
            self.post_outbox(index);
        }
        self.made_progress |= self.copies.take_refused();
        self.advance_copies();
    }

    /// Launches copies, and continues with the slots and receives whose copies have completed.
    fn advance_copies(&mut self) {
        self.copies.launch();
        self.finish_copies();
    }

    /// Continues with the slots and receives whose copies have completed.
    fn finish_copies(&mut self) {
        while let Some((tag, result)) = self.copies.take_completed() {
            self.made_progress = true;
            match tag {
                CopyTag::Receive { id } => self.events.extend(self.receives.on_copied(id, result)),
                CopyTag::Initiator { peer, slot, page, count } => {
                    self.with_peer(peer, |initiator, _, context| {
                        initiator.on_copied(slot, page..page + count, result, context);
                    });
                }
                CopyTag::Target { peer, slot, copy, count } => {
                    self.with_peer(peer, |_, target, context| {
                        target.on_copied(slot, copy..copy + count, result, context);
                    });
                }
            }
        }
    }

    /// Posts the internal work requests of a peer, as far as the inner endpoint has room.
    fn post_outbox(&mut self, index: usize) {
        while let Some(peer) = self.peers[index].as_mut().filter(|peer| !peer.outbox.is_empty()) {
            self.internal_batch.clear();
            peer.outbox.iter().take(INTERNAL_BATCH).for_each(|work| self.internal_batch.push(*work));
            // SAFETY: their local spans are in the staging buffer, which stays until the inner endpoint reports
            // `PeerGone`, or belong to a work request that has not ended. The connection keeps the import of the peer's
            // buffer.
            let PostResult { accepted, error } = unsafe { self.inner.post(&self.internal_batch) };
            let offered = self.internal_batch.len();
            peer.outbox.drain(..accepted.min(offered));
            if let Some((refused, status)) = error.and_then(|status| Some((peer.outbox.pop_front()?, status)))
            {
                self.on_completed(refused.id, Err(status), false);
                // What `on_completed` has done depends on the role of the refused request. If the request carried data
                // of the initiator, the engine's work request has failed. If it was a slot request, the work request
                // has failed too, and the next poll posts the slot request again, as a `Cancel`. The next poll also
                // posts data and responses of the target again. `made_progress` makes the worker poll at once. A
                // closing connection does not need that: all work requests of its peer end soon.
                let is_open = |peer: &PeerState| !peer.connection.is_closing();
                self.made_progress |= self.peers[index].as_ref().is_some_and(is_open);
            } else if accepted < offered {
                return;
            }
        }
    }

    /// Continues with the slot of an internal work request that has completed or failed. Returns false if the ID is not
    /// internal.
    fn on_completed(&mut self, id: u64, result: Result<(), Status>, is_unconfirmed: bool) -> bool {
        let Some(id) = InternalWrId::decode(id) else { return false };
        self.with_peer(id.peer, |initiator, target, context| match id.role {
            WrRole::InitiatorData | WrRole::Request => {
                initiator.on_completed(id, result, is_unconfirmed, context);
            }
            WrRole::TargetData | WrRole::Response => target.on_completed(id, result, context),
        });
        true
    }

    /// Polls the inner endpoint once. Returns true if it may have more events.
    fn poll_inner(&mut self, into: &mut Completions) -> bool {
        self.inner.poll(&mut self.polled);
        // Not before the poll: its events may belong to a peer that has just connected.
        self.add_new_peers();
        if self.polled.made_progress() {
            into.note_progress();
        }
        let is_full = self.polled.spare() == 0;
        for index in 0..self.polled.as_slice().len() {
            self.on_event(self.polled.as_slice()[index]);
        }
        self.polled.clear();
        self.made_progress |= is_full;
        is_full
    }

    /// Handles an event of the inner endpoint: keeps it to itself, or queues it for the engine.
    fn on_event(&mut self, event: Event) {
        match event {
            Event::Done { first, count } if InternalWrId::decode(first).is_some() => {
                for id in first..first + u64::from(count) {
                    self.on_completed(id, Ok(()), false);
                }
            }
            Event::Imm { peer, imm } if is_reserved(imm) && self.take_imm(peer, imm) => {}
            Event::Failed { id, status } if self.on_completed(id, Err(status), false) => {}
            Event::FailedUnconfirmed { id, status, .. } if self.on_completed(id, Err(status), true) => {}
            Event::PeerGone { peer } => {
                self.remove_peer(peer);
                self.events.push_back(event);
            }
            Event::DeviceLost { .. } => {
                // The engine ends all posted work requests now, so nothing may access their memory any more.
                self.wait_for_copies();
                self.is_lost = true;
                for peer in self.peers.drain(..).flatten() {
                    self.domain.connections.remove(&peer.connection);
                }
                self.events.push_back(event);
            }
            // The engine has ended this receive: the message must not be copied into the user's memory.
            Event::Received { .. } if self.is_lost => {}
            other => self.events.extend(self.receives.on_event(other, &mut self.copies)),
        }
    }

    /// Acts on an imm [of the range](is_reserved) that this crate uses. Returns false if the imm is the user's.
    fn take_imm(&mut self, peer: PeerSlot, imm: u32) -> bool {
        // After the loss of the device, the connections are gone, and with them the knowledge whether this peer uses
        // imms of the range. They are then always dropped.
        if self.is_lost {
            return true;
        }
        let slot_imm = SlotImm::decode(imm);
        let peer = slot_imm.and_then(|slot_imm| self.receiver_of(peer, slot_imm.tag)).unwrap_or(peer);
        let Some(state) = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut) else { return false };
        if state.connection.may_use_imms() && state.early_imms.len() < MAX_EARLY_IMMS {
            state.early_imms.push(imm);
            return true;
        }
        if !state.connection.uses_imms() {
            return false;
        }
        // A wake imm tells nothing: the same poll reads the peer's requests and responses from the staging buffer.
        // One with another tag is late: its connection has ended.
        if let Some(imm) = slot_imm.filter(|imm| state.connection.imms == Some(imm.tag)) {
            self.with_peer(peer, |initiator, target, context| match imm.kind {
                SlotImmKind::Request => target.on_announced(imm),
                SlotImmKind::Data => initiator.on_data_arrived(imm, context),
            });
        }
        true
    }

    /// The connection that a slot imm with this tag belongs to, if the device says that it is from `named`. A device that
    /// knows a sender only by its endpoint may name another connection of the same endpoint. `None` if there is no such
    /// connection. The tag of another peer's connection leads nowhere: a peer cannot announce bytes of others.
    fn receiver_of(&self, named: PeerSlot, tag: ImmTag) -> Option<PeerSlot> {
        let has_tag = |state: &&PeerState| state.connection.imms == Some(tag);
        if self.peers.get(named.0 as usize).and_then(Option::as_ref).as_ref().is_some_and(has_tag) {
            return Some(named);
        }
        let other = self.peers.iter().flatten().find(has_tag)?.connection.peer;
        self.domain.inner.connector().is_same_sender(named, other).then_some(other)
    }

    /// Acts on the imms that arrived before the peer's offer was known, if it is known now.
    #[cold]
    fn take_early_imms(&mut self, peer: PeerSlot) {
        let state = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        let Some(state) = state.filter(|state| !state.connection.may_use_imms()) else { return };
        for imm in std::mem::take(&mut state.early_imms) {
            if !self.take_imm(peer, imm) {
                self.events.push_back(Event::Imm { peer, imm });
            }
        }
    }

    /// Ends all work requests of a peer that is gone, and drops its connection.
    fn remove_peer(&mut self, peer: PeerSlot) {
        self.wait_for_copies();
        let state = self.peers.get_mut(peer.0 as usize);
        match state.and_then(|state| state.take_if(|state| state.connection.is_closing())) {
            Some(mut state) => {
                state.initiator.fail(ErrorKind::PeerDied, &mut self.events);
                self.domain.connections.remove(&state.connection);
            }
            // The peer connected and closed between two polls, so it has no state here.
            None => {
                let connection = self.domain.connections.of(peer);
                if let Some(connection) = connection.filter(|connection| connection.is_closing()) {
                    self.domain.connections.remove(&connection);
                }
            }
        }
    }

    /// Waits until no copy is under way. This takes some tens of microseconds, at the end of a connection.
    fn wait_for_copies(&mut self) {
        while self.copies.is_busy() {
            self.advance_copies();
            std::hint::spin_loop();
        }
    }

    /// Posts a run: stages it, posts it to the inner endpoint, or coalesces its small pieces and posts the others.
    ///
    /// # Safety
    /// As [`Endpoint::post`].
    unsafe fn post_run(&mut self, run: &WorkRequest, pieces: &[Piece]) -> PostResult {
        let coalesces = run.coalesces();
        let mut run = WorkRequest { lkey: run.lkey & !WorkRequest::COALESCE, ..*run };
        let find = || self.domain.imports.find(run.peer, run.rkey, pieces[0].remote);
        let region = coalesces.then(find).flatten();
        if self.has_staged_end(&run, &pieces[0]) || self.has_colliding_imm(&run) {
            let local = self.domain.regions.by_lkey(run.lkey);
            return self.stage(&run, |initiator| initiator.push(&run, pieces, local.as_ref(), region));
        }
        if region.is_none() {
            // SAFETY: by the caller.
            return unsafe { self.post_unstaged(&run, pieces) };
        }
        let mut accepted = 0;
        while accepted < pieces.len() {
            let rest = &pieces[accepted..];
            let small = alike(rest, MAX_COALESCED);
            let (part, result) = if small > 0 {
                let push =
                    |initiator: &mut SlotInitiator| initiator.push_pages(&run, &rest[..small], None, region);
                (small, self.stage(&run, push))
            } else {
                let is_small = |piece: &Piece| (1..=MAX_COALESCED).contains(&piece.len);
                let large = rest.iter().position(is_small).unwrap_or(rest.len());
                // SAFETY: by the caller.
                (large, unsafe { self.post_unstaged(&run, &rest[..large]) })
            };
            accepted += result.accepted;
            run.id += result.accepted as u64;
            if result.accepted < part {
                return PostResult { accepted, error: result.error };
            }
        }
        PostResult { accepted, error: None }
    }

    /// Posts pieces of a run to the inner endpoint. `run` has the ID of the first one.
    ///
    /// # Safety
    /// As [`Endpoint::post`].
    unsafe fn post_unstaged(&mut self, run: &WorkRequest, pieces: &[Piece]) -> PostResult {
        self.unstaged_batch.clear();
        self.unstaged_batch.push_run(*run, |all| all.extend_from_slice(pieces));
        // SAFETY: by the caller.
        unsafe { self.inner.post(&self.unstaged_batch) }
    }

    /// Passes pieces of a run to the peer's initiator by `push`, which returns how many it took.
    fn stage(&mut self, run: &WorkRequest, push: impl FnOnce(&mut SlotInitiator) -> usize) -> PostResult {
        match self.with_peer(run.peer, |initiator, _, _| push(initiator)) {
            Some(accepted) => PostResult { accepted, error: None },
            None => PostResult { accepted: 0, error: Some(staging_status(ErrorKind::PeerDied)) },
        }
    }

    /// Whether a run needs the initiator: because one end is staged, because it may be coalesced, or because the peer
    /// would take its imm for that of a slot.
    fn is_staged(&self, run: &WorkRequest, pieces: &[Piece]) -> bool {
        run.coalesces()
            || pieces.first().is_some_and(|first| self.has_staged_end(run, first))
            || self.has_colliding_imm(run)
    }

    /// Whether the local or the remote key of a run is that of a staged region.
    fn has_staged_end(&self, run: &WorkRequest, first: &Piece) -> bool {
        // A run without bytes and imm has no meaningful keys: it warms up a connection, or flushes the device.
        if first.len == 0 && run.imm.is_none() && (run.kind == WorkKind::Write || self.is_flush(run)) {
            return false;
        }
        let is_remote_staged = run.kind != WorkKind::Send && first.remote & RemoteKey::STAGED != 0;
        run.lkey & RemoteKey::STAGED != 0 || is_remote_staged
    }

    /// Whether the peer would take the imm of a run for that of a slot.
    fn has_colliding_imm(&self, run: &WorkRequest) -> bool {
        let collides = |connection: Arc<Connection>| connection.has_colliding_imm(run.kind, run.imm);
        // The comparison avoids the lock of the connections.
        run.imm.is_some_and(is_reserved) && self.domain.connections.of(run.peer).is_some_and(collides)
    }

    /// Whether a run without bytes and without an imm is a flush. The engine posts flushes only on a device with
    /// [`DeliveredScope::Device`].
    fn is_flush(&self, run: &WorkRequest) -> bool {
        let scope = self.domain.inner.capabilities().delivered_scope;
        run.kind == WorkKind::Read && scope == DeliveredScope::Device
    }

    /// Whether each peer that stages wakes this worker when it writes into the staging buffer.
    #[cfg(unix)]
    fn is_woken_by_all_peers(&self) -> bool {
        let mut remotes = self.peers.iter().flatten().filter_map(|peer| peer.connection.remote_buffer());
        remotes.all(|remote| remote.imms.is_some())
    }

    /// Whether the endpoint has work that no event of the inner endpoint will announce.
    fn is_busy(&self) -> bool {
        self.made_progress
            || !self.events.is_empty()
            || self.copies.is_busy()
            || self.peers.iter().flatten().any(|peer| !(peer.outbox.is_empty() && peer.early_imms.is_empty()))
    }
}

impl Drop for StagedEndpoint {
    fn drop(&mut self) {
        // The domain's next endpoint must not serve requests that peers sent to this one.
        self.domain.connections.clear();
    }
}
