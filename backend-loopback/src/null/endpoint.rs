//! The endpoint of a null device: what is posted is done.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use multirail_spi::{
    Armed, Batch, Clock, Completions, Endpoint, ErrorKind, Event, PeerSlot, PostResult, ReceiveRequest,
    Status, Time,
};

use super::domain::Shared;
use super::landing::Landing;
use super::switch::Port;
use crate::model::{Model, Verdict};
use crate::status::{describe, status};

pub(super) struct NullEndpoint {
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    /// How long requests take; without one they are done when they are posted.
    model: Option<Model>,
    depth: usize,
    /// What happened and is not reported.
    ended: VecDeque<Event>,
    outstanding: usize,
    receives: VecDeque<u64>,
    cancelled: Vec<u64>,
    imms_per_poll: u32,
    /// The peer whose imms arrive.
    first: Option<PeerSlot>,
    gone: Vec<PeerSlot>,
    /// Behind a switch: where requests arrive here, and at each peer.
    port: Option<Arc<Port>>,
    ports: HashMap<PeerSlot, (Arc<Port>, PeerSlot)>,
    landing: Landing,
}

impl NullEndpoint {
    pub(super) fn new(
        shared: Arc<Shared>,
        clock: Arc<dyn Clock>,
        depth: usize,
        imms_per_poll: u32,
        model: Option<Model>,
        port: Option<Arc<Port>>,
    ) -> Self {
        Self {
            shared,
            clock,
            model,
            depth,
            ended: VecDeque::with_capacity(64),
            outstanding: 0,
            receives: VecDeque::new(),
            cancelled: Vec::new(),
            imms_per_poll,
            first: None,
            gone: Vec::new(),
            port,
            ports: HashMap::new(),
            landing: Landing::default(),
        }
    }

    #[cold]
    fn look_again(&mut self) {
        let mut peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        self.first = peers.first;
        self.ports.clone_from(&peers.ports);
        for peer in peers.gone.drain(..) {
            if let Some(model) = &mut self.model {
                model.abort(peer, |id| self.ended.push_back(failed(id, ErrorKind::PeerDied)));
            }
            self.landing.abort(peer, |id| self.ended.push_back(failed(id, ErrorKind::PeerDied)));
            self.gone.push(peer);
        }
    }

    /// Ends what the link model has let through by now.
    fn run_due(&mut self) {
        let Some(model) = &mut self.model else { return };
        let now = self.clock.now();
        while let Some((request, verdict)) = model.next(now, &[]) {
            if let (Verdict::Run, Some((port, _))) = (verdict, self.ports.get(&request.peer)) {
                self.landing.push(port.takes(request.len, now), &request);
                continue;
            }
            self.ended.push_back(match verdict {
                Verdict::Run => Event::Done { first: request.id, count: 1 },
                Verdict::Fail => failed(request.id, ErrorKind::Io),
                Verdict::Lost => failed(request.id, ErrorKind::DeviceLost),
            });
        }
        while let Some((id, peer, imm)) = self.landing.next(now) {
            if let (Some(imm), Some((port, us))) = (imm, self.ports.get(&peer)) {
                port.arrives(*us, imm);
            }
            self.ended.push_back(Event::Done { first: id, count: 1 });
        }
        if model.reports_loss() {
            self.ended.push_back(Event::DeviceLost { status: status(ErrorKind::DeviceLost) });
        }
    }
}

fn failed(id: u64, kind: ErrorKind) -> Event {
    Event::Failed { id, status: status(kind) }
}

impl Endpoint for NullEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        if let Some(model) = &mut self.model {
            let unreported = self.ended.len() + self.landing.len();
            let result = model.accept(batch, self.clock.now(), self.depth.saturating_sub(unreported));
            self.outstanding += result.accepted;
            return result;
        }
        let mut room = self.depth - self.outstanding;
        let mut accepted = 0;
        for (template, pieces) in batch.runs() {
            let count = pieces.len().min(room);
            if count == 0 {
                break;
            }
            self.ended.push_back(Event::Done { first: template.id, count: count as u32 });
            room -= count;
            accepted += count;
        }
        self.outstanding += accepted;
        PostResult { accepted, error: None }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        self.receives.extend(batch.iter().map(|receive| receive.id));
        PostResult { accepted: batch.len(), error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        if self.shared.changed.load(Ordering::Relaxed) && self.shared.changed.swap(false, Ordering::Acquire) {
            self.look_again();
        }
        self.run_due();
        while into.spare() > 0
            && let Some(event) = self.ended.pop_front()
        {
            self.outstanding -= match event {
                Event::Done { count, .. } => count as usize,
                Event::Failed { .. } => 1,
                _ => 0,
            };
            let _ = into.push(event);
        }
        while into.spare() > 0
            && let Some(id) = self.cancelled.pop()
        {
            let _ = into.push(Event::ReceiveFailed { id, status: status(ErrorKind::Cancelled) });
        }
        // Last of a peer: what was posted to it has been reported by now.
        while into.spare() > 0
            && self.ended.is_empty()
            && let Some(peer) = self.gone.pop()
        {
            let _ = into.push(Event::PeerGone { peer });
        }
        if let Some(port) = &self.port {
            while into.spare() > 0
                && let Some(event) = port.next()
            {
                let _ = into.push(event);
            }
        }
        if let Some(peer) = self.first {
            for imm in 0..self.imms_per_poll.min(into.spare() as u32) {
                let _ = into.push(Event::Imm { peer, imm });
            }
        }
    }

    fn arm(&mut self) -> Armed {
        let idle = self.ended.is_empty() && self.gone.is_empty() && self.cancelled.is_empty();
        if idle && self.imms_per_poll == 0 { Armed::Unsupported } else { Armed::Ready }
    }

    fn due(&self) -> Time {
        self.model.as_ref().map_or(Time::NEVER, Model::next_due).min(self.landing.due())
    }

    fn abort(&mut self, peer: PeerSlot) {
        let Self { model, ended, landing, .. } = self;
        if let Some(model) = model {
            model.abort(peer, |id| ended.push_back(failed(id, ErrorKind::Cancelled)));
        }
        landing.abort(peer, |id| ended.push_back(failed(id, ErrorKind::Cancelled)));
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(place) = self.receives.iter().position(|posted| *posted == id) {
            self.receives.remove(place);
            self.cancelled.push(id);
        }
        true
    }

    fn describe(&self, status: Status) -> String {
        describe(status)
    }
}

impl Drop for NullEndpoint {
    fn drop(&mut self) {
        self.shared.open.store(false, Ordering::Release);
    }
}
