//! The endpoint. A post runs requests at once, or when the link model or a GPU is ready. A poll reports completions.

mod batch_runner;
mod fast_path;
mod peer_state;
mod watched_peers;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use multirail_spi::{
    Armed, Batch, Completions, Endpoint, EndpointConfig, ErrorKind, Event, PeerSlot, PostResult,
    ReceiveRequest, StagingPolicy, Status, TakeMessage, Time, WorkKind, WorkRequest,
};

use crate::completions::CompletionQueue;
use crate::domain_state::DomainState;
use crate::gpu::Gpus;
#[cfg(target_os = "linux")]
use crate::imports::foreign_copy::ForeignBatch;
use crate::imports::{Import, RegionLocation};
use crate::link_model::{DeviceModel, DueAction, LateWrites, PostedWrite, PostedWrites};
use crate::outbound::PeerLocation;
use crate::segment::lease_table::DEVICE_MEMORY;
use crate::staging::StagedRequests;
use crate::status::{describe, status};
use batch_runner::BatchRunner;
use fast_path::FastPath;
use peer_state::PeerState;
use watched_peers::WatchedPeers;

/// The shortest time between two looks at the peers that the endpoint does not watch. A look at 1,000 peers takes some
/// 0.1 ms.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// The endpoint of a domain.
pub(crate) struct LoopbackEndpoint {
    /// Keeps the domain open.
    _domain: Arc<dyn Any + Send + Sync>,
    state: Arc<DomainState>,
    depth: usize,
    completions: CompletionQueue,
    peers: Vec<Option<PeerState>>,
    /// Slots whose `PeerGone` the last poll reported.
    gone: Vec<PeerSlot>,
    /// The number of changes of the peer table that `peers` reflects.
    seen_peer_changes: u64,
    watched: WatchedPeers,
    receives: VecDeque<ReceiveRequest>,
    armed: bool,
    /// When the endpoint last looked whether a peer that it does not watch has written. `None` before the first time.
    looked_at: Option<Time>,
    /// When it must look again. [`Time::NEVER`] if it looked in the last [`arm`](Endpoint::arm), or need not.
    look_due: Time,
    model: Option<Box<DeviceModel>>,
    posted_writes: Option<PostedWrites>,
    late_writes: LateWrites,
    staged: StagedRequests,
    gpus: Gpus,
    /// Peers that leave while a GPU may still have requests to them.
    leaving: Vec<PeerSlot>,
    #[cfg(target_os = "linux")]
    foreign: ForeignBatch,
}

// SAFETY: the raw pointers inside are those of accepted requests and receives;
// `Endpoint::post` binds their validity to the endpoint, not to a thread.
unsafe impl Send for LoopbackEndpoint {}

impl LoopbackEndpoint {
    /// Opens the endpoint of a domain, which `domain` keeps open.
    pub(crate) fn new(
        state: &Arc<DomainState>,
        config: &EndpointConfig,
        domain: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let limit = state.capabilities.send_depth;
        state.peers.note_all();
        let depth = config.send_depth.unwrap_or(limit).clamp(1, limit) as usize;
        let model = |link| Box::new(DeviceModel::new(link, state.setup.seed, state.number));
        Self {
            _domain: domain,
            state: Arc::clone(state),
            depth,
            completions: CompletionQueue::default(),
            peers: Vec::new(),
            gone: Vec::new(),
            seen_peer_changes: 0,
            watched: WatchedPeers::default(),
            receives: VecDeque::new(),
            armed: false,
            looked_at: None,
            look_due: Time::NEVER,
            model: state.link.clone().map(model),
            posted_writes: state.link.as_ref().and_then(PostedWrites::of),
            late_writes: LateWrites::default(),
            staged: StagedRequests::default(),
            gpus: Gpus::new(state.gpus),
            leaving: Vec::new(),
            #[cfg(target_os = "linux")]
            foreign: ForeignBatch::default(),
        }
    }

    fn runner(&mut self) -> BatchRunner<'_> {
        BatchRunner {
            imports: &self.state.imports,
            peers: &self.peers,
            completions: &mut self.completions,
            #[cfg(target_os = "linux")]
            foreign: &mut self.foreign,
            lease: None,
            fast_path: FastPath::default(),
            staged: &mut self.staged,
            regions: &self.state.regions,
            gpus: &mut self.gpus,
        }
    }

    /// Runs the requests that the link model says are due.
    fn run_due(&mut self) {
        let Some(mut model) = self.model.take() else { return };
        let now = self.state.setup.clock.now();
        self.move_posted_writes(|writes| writes.visible(now));
        self.deliver_late_writes(now);
        let mut full = Vec::new();
        while let Some((request, action)) = model.next(now, &full) {
            let refused = match action {
                DueAction::Run => {
                    // SAFETY: as below.
                    if unsafe { self.delay_visibility(&request, now) } {
                        continue;
                    }
                    // SAFETY: accepted and not ended yet: valid by the contract of `post`.
                    if !unsafe { self.runner().run(&request) } {
                        full.push(request.peer);
                        model.put_back(request);
                    }
                    continue;
                }
                DueAction::Fail => ErrorKind::Io,
                DueAction::PathBroken | DueAction::DeviceLost => {
                    // SAFETY: accepted and not ended yet: valid by the contract of `post`.
                    unsafe { self.deliver_later(&mut model, &request, now) };
                    if action == DueAction::PathBroken {
                        ErrorKind::Unreachable
                    } else {
                        ErrorKind::DeviceLost
                    }
                }
            };
            self.completions.request(request.id, Err(status(refused)));
        }
        // Owners may reuse their memory once the loss is reported. So the event waits until no GPU copies into that
        // memory any more.
        if self.gpus.is_idle() && model.reports_loss() {
            // For the same reason no message may be copied into a receive any more.
            self.receives.clear();
            self.staged.stop_all(ErrorKind::DeviceLost, &mut self.completions);
            self.gpus.stop_all(ErrorKind::DeviceLost, &mut self.completions);
            self.completions.event(Event::DeviceLost { status: status(ErrorKind::DeviceLost) });
        }
        self.model = Some(model);
    }

    /// A lost device or a broken path has a write or a message, which may still arrive.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    unsafe fn deliver_later(&mut self, model: &mut DeviceModel, request: &WorkRequest, now: Time) {
        let may_be_late = request.kind != WorkKind::Read && request.lkey & DEVICE_MEMORY == 0;
        let peer = self.peers.get(request.peer.0 as usize).and_then(Option::as_ref);
        let outbound = peer.and_then(|peer| peer.outbound.as_ref()).filter(|_| may_be_late);
        if let Some(outbound) = outbound
            && let PeerLocation::ThisProcess { inbound, .. } = &outbound.location
            && let Some(arrival) = model.late_arrival(request.peer, now)
        {
            // SAFETY: by the caller.
            unsafe { self.late_writes.push(request, arrival, inbound.times_shut()) };
        }
    }

    /// If the link model makes writes visible later: completes a write, holds its bytes, and returns true. For any
    /// other request, first moves the held bytes to its peer, and returns false.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    unsafe fn delay_visibility(&mut self, request: &WorkRequest, now: Time) -> bool {
        let Some(writes) = &mut self.posted_writes else { return false };
        let is_write = request.kind == WorkKind::Write && request.imm.is_none();
        let is_mapped = |import: &Import| {
            matches!(import.location, RegionLocation::Mapped(_))
                && import.check(request.kind, request.remote, request.len).is_ok()
        };
        let import = self.state.imports.find(request.rkey);
        if is_write
            && request.len > 0
            && request.lkey & DEVICE_MEMORY == 0
            && import.is_some_and(|import| import.as_deref().is_some_and(is_mapped))
        {
            // SAFETY: by the caller.
            unsafe { writes.push(request, now) };
            self.completions.done(request.id, 1);
            return true;
        }
        // An empty write without an imm is a warm-up: nothing of it arrives at the peer.
        if !is_write || request.len > 0 {
            self.move_posted_writes(|writes| writes.next_to(request.peer));
        }
        false
    }

    /// Moves the bytes of posted writes, which are completed already.
    fn move_posted_writes(&mut self, mut next: impl FnMut(&mut PostedWrites) -> Option<PostedWrite>) {
        let Some(mut writes) = self.posted_writes.take() else { return };
        let completions = std::mem::take(&mut self.completions);
        while let Some(mut write) = next(&mut writes) {
            // SAFETY: the local span is the write's own, which stays where it is, and the key is checked anew.
            unsafe { self.runner().run(&write.request()) };
        }
        self.completions = completions;
        self.posted_writes = Some(writes);
    }

    /// Delivers what a lost device has sent, unless the peer has fenced it meanwhile.
    fn deliver_late_writes(&mut self, now: Time) {
        while let Some((mut write, times_shut)) = self.late_writes.next(now) {
            let request = write.request();
            let peer = self.peers.get(request.peer.0 as usize).and_then(Option::as_ref);
            let Some(outbound) = peer.and_then(|peer| peer.outbound.clone()) else { continue };
            let PeerLocation::ThisProcess { inbound, .. } = &outbound.location else { continue };
            let completions = std::mem::take(&mut self.completions);
            // SAFETY: the local span is the write's own, which stays where it is, and the key is checked anew.
            inbound.deliver_late(times_shut, || _ = unsafe { self.runner().run(&request) });
            self.completions = completions;
        }
    }

    /// Moves events from the completion queue into `into`.
    fn report(&mut self, into: &mut Completions) {
        while into.spare() > 0 {
            let next = match &mut self.model {
                Some(model) => self.completions.pop_one_of(|count| model.pick(count)),
                None => self.completions.pop(),
            };
            let Some(event) = next else { return };
            if let Event::PeerGone { peer } = event {
                self.gone.push(peer);
            }
            let _ = into.push(event);
        }
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.state.wakeup.clear();
            self.watched.for_each(&mut self.peers, PeerState::disarm);
        }
    }

    /// Watches the peers that have marked themselves ready. A peer that was marked and has not written stays as it is:
    /// a hostile process may have marked it.
    #[cold]
    fn watch_ready(&mut self) {
        let Self { state, peers, watched, .. } = self;
        state.wakeup.take_ready(|slot| {
            if let Some(Some(peer)) = peers.get_mut(slot as usize)
                && peer.has_written_unwatched()
            {
                watched.watch(peer);
            }
        });
    }

    /// Before the endpoint sleeps: looks at the rings of the peers that it does not watch, because a hostile process
    /// may have cleared their marks. If it looked a short time ago, it looks when [`Endpoint::due`] says.
    ///
    /// An endpoint that sleeps often would pay for all of its peers each time, so it looks once in [`LOOK_PERIOD`]. It
    /// never sleeps longer than that without a look: so a cleared mark delays an entry, but loses none.
    fn look_at_unwatched(&mut self) {
        self.look_due = Time::NEVER;
        if !self.state.wakeup.is_shared() || self.watched.are_all(&self.peers) {
            return;
        }
        let now = self.state.setup.clock.now();
        match self.looked_at.map(|at| at.after(LOOK_PERIOD)).filter(|due| *due > now) {
            Some(due) => self.look_due = due,
            None => {
                self.looked_at = Some(now);
                self.watched.watch_written(&mut self.peers);
            }
        }
    }

    /// Notes that the message ring of `peer` had no room for a request of that kind.
    #[cold]
    fn block(&mut self, peer: PeerSlot, kind: WorkKind) {
        if let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize) {
            peer.blocked = Some(kind);
            self.watched.watch(peer);
        }
    }

    /// Reads the peer table if it has changed.
    #[inline]
    fn refresh(&mut self) {
        if self.state.peers.changes() != self.seen_peer_changes {
            self.read_peer_table();
        }
    }

    /// Adds the peers that are new, and notes those that leave.
    #[cold]
    fn read_peer_table(&mut self) {
        let state = self.state.clone();
        self.seen_peer_changes = state.peers.changes();
        for (slot, peer) in state.peers.take_changed() {
            let at = slot.0 as usize;
            if self.peers.len() <= at {
                self.peers.resize_with(at + 1, || None);
            }
            if self.peers[at].is_none() {
                self.peers[at] = PeerState::new(slot, peer.inbound);
            }
            let Some(known) = &mut self.peers[at] else { continue };
            if known.leaving {
                continue;
            }
            // What it has written before has not marked it.
            self.watched.watch(known);
            known.outbound = peer.outbound;
            known.leaving = peer.leaving;
            if peer.leaving {
                self.leaving.push(slot);
            }
        }
    }

    /// Ends the peers that leave, once no GPU has requests to them.
    #[inline]
    fn end_leaving_peers(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        for slot in std::mem::take(&mut self.leaving) {
            match self.gpus.has_requests_to(slot) {
                true => self.leaving.push(slot),
                false => self.end_peer(slot),
            }
        }
    }

    /// Fails the requests to a peer, and adds what has arrived from it and then `PeerGone` to the events.
    fn end_peer(&mut self, slot: PeerSlot) {
        if let Some(model) = &mut self.model {
            model.abort(slot, |aborted| {
                self.completions.request(aborted.id, Err(status(ErrorKind::PeerDied)));
            });
        }
        self.staged.remove(slot, &mut self.completions);
        self.gpus.stop(slot, ErrorKind::PeerDied, &mut self.completions);
        if let Some(Some(peer)) = self.peers.get_mut(slot.0 as usize) {
            peer.outbound = None;
            let push = |event| self.completions.event(event);
            peer.remaining_arrivals(&mut self.receives, &self.state.regions, push);
        }
        self.completions.event(Event::PeerGone { peer: slot });
    }

    /// Frees the slots of the peers in `gone`. The engine has handled their `PeerGone`, because it polls again. If a
    /// slot were free before, the engine could take the event for the end of the slot's next peer.
    fn free_slots(&mut self) {
        for slot in self.gone.drain(..) {
            if let Some(gone) = self.peers.get_mut(slot.0 as usize).and_then(Option::take) {
                self.watched.remove(slot.0);
                self.state.peers.remove(slot, &gone.inbound);
            }
        }
    }

    /// Lets the staged requests advance.
    #[inline]
    fn advance_staged(&mut self) {
        let Self { staged, completions, peers, watched, .. } = self;
        staged.advance(completions, |peer, kind| {
            if let Some(Some(peer)) = peers.get_mut(peer.0 as usize) {
                peer.blocked = Some(kind);
                watched.watch(peer);
            }
        });
    }
}

impl Endpoint for LoopbackEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        let room = self
            .depth
            .saturating_sub(self.completions.requests() + self.staged.requests() + self.gpus.requests());
        if let Some(model) = &mut self.model {
            return model.accept(batch, self.state.setup.clock.now(), room);
        }
        let mut runner = self.runner();
        let (mut accepted, mut blocked) = (0, None);
        for (template, pieces) in batch.runs() {
            let pieces = &pieces[..pieces.len().min(room - accepted)];
            // SAFETY: by the caller.
            let ran = unsafe { runner.run_all(template, pieces) };
            accepted += ran;
            if ran < pieces.len() {
                blocked = Some((template.peer, template.kind));
            }
            if blocked.is_some() || accepted == room {
                break;
            }
        }
        drop(runner);
        if let Some((peer, kind)) = blocked {
            self.block(peer, kind);
        }
        self.advance_staged();
        self.gpus.after_post(&mut self.completions);
        PostResult { accepted, error: None }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if self.model.as_ref().is_some_and(|model| model.is_lost()) {
            return PostResult { accepted: 0, error: Some(status(ErrorKind::DeviceLost)) };
        }
        let room = (self.state.capabilities.recv_depth as usize).saturating_sub(self.receives.len());
        let accepted = room.min(batch.len());
        self.receives.extend(&batch[..accepted]);
        PostResult { accepted, error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        self.disarm();
        self.free_slots();
        self.refresh();
        self.run_due();
        self.advance_staged();
        self.gpus.advance(&mut self.completions);
        self.end_leaving_peers();
        self.state.regions.sweep();
        self.report(into);
        if self.state.wakeup.has_ready() {
            self.watch_ready();
        }
        let regions = &self.state.regions;
        if self.state.staging != StagingPolicy::Never {
            self.watched.for_each(&mut self.peers, |peer| peer.serve_staging(regions));
        }
        self.watched.receive_from_all(&mut self.peers, &mut self.receives, regions, into);
        self.watched.after_poll(&mut self.peers, &self.state.wakeup);
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        let state = self.state.clone();
        let Ok(pipe) = state.wakeup.pipe() else { return Armed::Unsupported };
        pipe.clear();
        self.armed = true;
        // A GPU does not wake the endpoint, which therefore must not sleep while a GPU has requests.
        let mut may_sleep = self.completions.is_empty()
            && self.gone.is_empty()
            && self.gpus.is_idle()
            && self.leaving.is_empty()
            && self.staged.arm();
        let Self { gpus, peers, watched, .. } = self;
        for slot in gpus.blocked_peers() {
            if let Some(Some(peer)) = peers.get_mut(slot.0 as usize) {
                peer.blocked = Some(WorkKind::Write);
                watched.watch(peer);
            }
        }
        self.look_at_unwatched();
        let can_receive = !self.receives.is_empty();
        self.watched.for_each(&mut self.peers, |peer| may_sleep &= peer.arm(can_receive));
        // A change of the peer table before this comparison is seen here, and a mark too. What comes later wakes the
        // endpoint.
        may_sleep &= !self.state.wakeup.has_ready();
        if !may_sleep || self.state.peers.changes() != self.seen_peer_changes {
            self.disarm();
            return Armed::Ready;
        }
        #[cfg(unix)]
        return Armed::Fd(pipe.raw_fd());
        #[cfg(not(unix))]
        return Armed::Unsupported;
    }

    fn due(&self) -> Time {
        let writes = self.posted_writes.as_ref().map_or(Time::NEVER, PostedWrites::next_due);
        let late = self.late_writes.next_due();
        let model = self.model.as_ref().map_or(Time::NEVER, |model| model.next_due());
        model.min(writes).min(late).min(self.look_due)
    }

    fn abort(&mut self, peer: PeerSlot) {
        if let Some(mut model) = self.model.take() {
            let now = self.state.setup.clock.now();
            let mut aborted = Vec::new();
            model.abort(peer, |request| aborted.push(*request));
            for request in aborted {
                if model.is_path_broken(peer, now) {
                    // SAFETY: accepted and not ended yet: valid by the contract of `post`.
                    unsafe { self.deliver_later(&mut model, &request, now) };
                }
                self.completions.request(request.id, Err(status(ErrorKind::Cancelled)));
            }
            self.model = Some(model);
        }
        self.staged.stop(peer, ErrorKind::Cancelled, &mut self.completions);
        self.gpus.abort(peer, &mut self.completions);
    }

    fn is_lost(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.is_lost())
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(at) = self.receives.iter().position(|receive| receive.id == id) {
            self.receives.remove(at);
            self.completions.event(Event::ReceiveFailed { id, status: status(ErrorKind::Cancelled) });
        }
        true
    }

    fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        let is_meant = |state: &&mut PeerState| peer.is_none_or(|peer| peer == state.slot());
        self.peers.iter_mut().flatten().filter(is_meant).for_each(|state| state.take_unclaimed(take));
    }

    fn describe(&self, status: Status) -> String {
        describe(status)
    }
}

impl Drop for LoopbackEndpoint {
    fn drop(&mut self) {
        self.disarm();
        let state = &self.state;
        self.peers.drain(..).flatten().for_each(PeerState::detach);
        state.endpoint_open.store(false, Ordering::Release);
        // The peers in `gone` are among them.
        for (slot, peer) in state.peers.all().into_iter().filter(|(_, peer)| peer.leaving) {
            state.peers.remove(slot, &peer.inbound);
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests;
