//! The endpoint: posts run at once (or when the link model says, or a GPU is done), polls report.

mod guests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use multirail_spi::{
    Armed, Batch, Completions, Endpoint, EndpointConfig, ErrorKind, Event, PeerSlot, PostResult,
    ReceiveRequest, Staging, Status, Time, WorkKind, WorkRequest,
};

use crate::attached::{self, Attached};
use crate::domain::Shared;
use crate::ended::Ended;
#[cfg(target_os = "linux")]
use crate::foreign::Vector;
use crate::gpu::{FAR, Gpus};
use crate::model::{Model, Verdict};
use crate::posted_writes::{PostedWrite, PostedWrites};
use crate::remote::{Import, Place};
use crate::runner::Runner;
use crate::shortcut::Shortcut;
use crate::staging::Outlets;
use crate::status::{self, status};

/// The domain's endpoint.
pub(crate) struct LoopbackEndpoint {
    shared: Arc<Shared>,
    depth: usize,
    ended: Ended,
    peers: Vec<Option<Attached>>,
    /// Slots whose `PeerGone` the last poll handed out.
    gone: Vec<PeerSlot>,
    seen: u64,
    turn: usize,
    receives: VecDeque<ReceiveRequest>,
    armed: bool,
    model: Option<Box<Model>>,
    posted_writes: Option<PostedWrites>,
    outlets: Outlets,
    gpus: Gpus,
    /// Peers that leave, and have requests with a GPU.
    parting: Vec<PeerSlot>,
    #[cfg(target_os = "linux")]
    vector: Vector,
}

// SAFETY: the raw pointers inside are those of accepted requests and receives;
// `Endpoint::post` binds their validity to the endpoint, not to a thread.
unsafe impl Send for LoopbackEndpoint {}

impl LoopbackEndpoint {
    pub(crate) fn new(shared: Arc<Shared>, config: &EndpointConfig) -> Self {
        let limit = shared.core.capabilities.send_depth;
        let depth = config.send_depth.unwrap_or(limit).clamp(1, limit) as usize;
        let model =
            shared.link.clone().map(|link| Box::new(Model::new(link, shared.setup.seed, shared.number)));
        Self {
            depth,
            ended: Ended::default(),
            peers: Vec::new(),
            gone: Vec::new(),
            seen: 0,
            turn: 0,
            receives: VecDeque::new(),
            armed: false,
            model,
            posted_writes: shared.link.as_ref().and_then(PostedWrites::of),
            outlets: Outlets::default(),
            gpus: Gpus::new(shared.gpus),
            parting: Vec::new(),
            #[cfg(target_os = "linux")]
            vector: Vector::default(),
            shared,
        }
    }

    fn runner(&mut self) -> Runner<'_> {
        Runner {
            imports: &self.shared.core.imports,
            peers: &self.peers,
            ended: &mut self.ended,
            #[cfg(target_os = "linux")]
            vector: &mut self.vector,
            held: None,
            short: Shortcut::default(),
            outlets: &mut self.outlets,
            regions: &self.shared.core.regions,
            gpus: &mut self.gpus,
        }
    }

    /// Runs what the link model has let through by now.
    fn run_due(&mut self) {
        let Some(mut model) = self.model.take() else { return };
        let now = self.shared.setup.clock.now();
        self.land(|writes| writes.visible(now));
        let mut full = Vec::new();
        while let Some((request, verdict)) = model.next(now, &full) {
            let refused = match verdict {
                Verdict::Run => {
                    // SAFETY: as below.
                    if unsafe { self.keeps_back(&request, now) } {
                        continue;
                    }
                    // SAFETY: accepted and not ended yet: valid by the contract of `post`.
                    if !unsafe { self.runner().run(&request) } {
                        full.push(request.peer);
                        model.put_back(request);
                    }
                    continue;
                }
                Verdict::Fail => ErrorKind::Io,
                Verdict::Lost => ErrorKind::DeviceLost,
            };
            self.ended.request(request.id, Err(status(refused)));
        }
        // What a GPU still moves would land in memory that its owner has taken back.
        if self.gpus.is_idle() && model.reports_loss() {
            // Their owner gives the memory away on this event: no message may land there.
            self.receives.clear();
            self.outlets.stop_all(ErrorKind::DeviceLost, &mut self.ended);
            self.gpus.stop_all(ErrorKind::DeviceLost, &mut self.ended);
            self.ended.event(Event::DeviceLost { status: status(ErrorKind::DeviceLost) });
        }
        self.model = Some(model);
    }

    /// Files the end of a write and keeps its bytes back, where the link model has them be visible later.
    /// Else what the card has kept back for the request's peer goes before it.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    unsafe fn keeps_back(&mut self, request: &WorkRequest, now: Time) -> bool {
        let Some(writes) = &mut self.posted_writes else { return false };
        let is_write = request.kind == WorkKind::Write && request.imm.is_none();
        let is_here = |import: &Import| {
            matches!(import.place, Place::Here(_))
                && import.check(request.kind, request.remote, request.len).is_ok()
        };
        let import = self.shared.core.imports.find(request.rkey);
        if is_write
            && request.len > 0
            && request.lkey & FAR == 0
            && import.is_some_and(|import| import.as_deref().is_some_and(is_here))
        {
            // SAFETY: by the caller.
            unsafe { writes.push(request, now) };
            self.ended.done(request.id, 1);
            return true;
        }
        // A warm-up is nothing that arrives.
        if !is_write || request.len > 0 {
            self.land(|writes| writes.pushed(request.peer));
        }
        false
    }

    /// Moves the bytes of posted writes, whose end was filed.
    fn land(&mut self, mut next: impl FnMut(&mut PostedWrites) -> Option<PostedWrite>) {
        let Some(mut writes) = self.posted_writes.take() else { return };
        let ended = std::mem::take(&mut self.ended);
        while let Some(mut write) = next(&mut writes) {
            // SAFETY: the local span is the write's own, which stays where it is, and the key is checked anew.
            unsafe { self.runner().run(&write.request()) };
        }
        self.ended = ended;
        self.posted_writes = Some(writes);
    }

    /// Moves filed events out.
    fn report(&mut self, into: &mut Completions) {
        while into.spare() > 0 {
            let next = match &mut self.model {
                Some(model) => self.ended.pop_one_of(|ends| model.pick(ends)),
                None => self.ended.pop(),
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
            self.shared.core.door.clear();
            self.peers.iter_mut().flatten().for_each(Attached::disarm);
        }
    }
}

impl Endpoint for LoopbackEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        self.refresh();
        let room =
            self.depth.saturating_sub(self.ended.requests() + self.outlets.requests() + self.gpus.requests());
        if let Some(model) = &mut self.model {
            return model.accept(batch, self.shared.setup.clock.now(), room);
        }
        let mut runner = self.runner();
        let (mut accepted, mut starved) = (0, None);
        for (template, pieces) in batch.runs() {
            let pieces = &pieces[..pieces.len().min(room - accepted)];
            // SAFETY: by the caller.
            let ran = unsafe { runner.run_all(template, pieces) };
            accepted += ran;
            if ran < pieces.len() {
                starved = Some((template.peer, template.kind));
            }
            if starved.is_some() || accepted == room {
                break;
            }
        }
        drop(runner);
        if let Some((peer, kind)) = starved
            && let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize)
        {
            peer.starved = Some(kind);
        }
        self.outlets.advance(&mut self.peers, &mut self.ended);
        self.gpus.posted(&mut self.ended);
        PostResult { accepted, error: None }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if self.model.as_ref().is_some_and(|model| model.is_lost()) {
            return PostResult { accepted: 0, error: Some(status(ErrorKind::DeviceLost)) };
        }
        let room = (self.shared.core.capabilities.recv_depth as usize).saturating_sub(self.receives.len());
        let accepted = room.min(batch.len());
        self.receives.extend(&batch[..accepted]);
        PostResult { accepted, error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        self.disarm();
        self.free_slots();
        self.refresh();
        self.run_due();
        self.outlets.advance(&mut self.peers, &mut self.ended);
        self.gpus.advance(&mut self.ended);
        self.part();
        self.shared.core.regions.sweep();
        self.report(into);
        if self.shared.core.staging != Staging::Never {
            self.peers.iter_mut().flatten().for_each(|peer| peer.serve(&self.shared.core.regions));
        }
        let regions = &self.shared.core.regions;
        attached::listen(&mut self.peers, &mut self.turn, &mut self.receives, regions, into);
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        let core = self.shared.core.clone();
        let Ok(door) = core.door.bell() else { return Armed::Unsupported };
        door.clear();
        self.armed = true;
        // A GPU does not ring.
        let mut quiet = self.ended.is_empty()
            && self.gone.is_empty()
            && self.gpus.is_idle()
            && self.parting.is_empty()
            && self.outlets.arm();
        for slot in self.gpus.starved() {
            if let Some(Some(peer)) = self.peers.get_mut(slot.0 as usize) {
                peer.starved = Some(WorkKind::Write);
            }
        }
        for peer in self.peers.iter_mut().flatten() {
            quiet &= peer.arm(!self.receives.is_empty());
        }
        // Who changed the table before this look is seen here; who does after it rings.
        if !quiet || self.shared.core.peers.version() != self.seen {
            self.disarm();
            return Armed::Ready;
        }
        #[cfg(unix)]
        return Armed::Fd(door.raw_fd());
        #[cfg(not(unix))]
        return Armed::Unsupported;
    }

    fn due(&self) -> Time {
        let writes = self.posted_writes.as_ref().map_or(Time::NEVER, PostedWrites::next_due);
        self.model.as_ref().map_or(Time::NEVER, |model| model.next_due()).min(writes)
    }

    fn abort(&mut self, peer: PeerSlot) {
        if let Some(model) = &mut self.model {
            model.abort(peer, |id| self.ended.request(id, Err(status(ErrorKind::Cancelled))));
        }
        self.outlets.stop(peer, ErrorKind::Cancelled, &mut self.ended);
        self.gpus.abort(peer, &mut self.ended);
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(at) = self.receives.iter().position(|receive| receive.id == id) {
            self.receives.remove(at);
            self.ended.event(Event::ReceiveFailed { id, status: status(ErrorKind::Cancelled) });
        }
        true
    }

    fn describe(&self, status: Status) -> String {
        status::describe(status)
    }
}

impl Drop for LoopbackEndpoint {
    fn drop(&mut self) {
        self.disarm();
        let core = &self.shared.core;
        self.peers.drain(..).flatten().for_each(Attached::detach);
        core.polled.store(false, Ordering::Release);
        // Those in `gone` among them.
        for (slot, peer) in core.peers.all().into_iter().filter(|(_, peer)| peer.leaving) {
            core.peers.remove(slot, &peer.inbound);
        }
    }
}
