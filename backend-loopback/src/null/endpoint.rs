//! The endpoint of a null device, which completes requests without moving bytes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use multirail_spi::{
    Armed, Batch, Clock, Completions, Endpoint, ErrorKind, Event, PeerSlot, PostResult, ReceiveRequest,
    Status, Time, WorkRequest,
};

use super::domain::NullState;
use super::switch::SwitchPort;
use crate::link_model::{DeviceModel, DueAction};
use crate::status::{describe, status};

pub(super) struct NullEndpoint {
    state: Arc<NullState>,
    clock: Arc<dyn Clock>,
    /// Says how long requests take. Without it, they complete at once.
    model: Option<DeviceModel>,
    depth: usize,
    /// Events that are not reported yet.
    completions: VecDeque<Event>,
    outstanding: usize,
    receives: VecDeque<u64>,
    cancelled: Vec<u64>,
    imms_per_poll: u32,
    /// The peer whose imms the endpoint reports.
    first: Option<PeerSlot>,
    gone: Vec<PeerSlot>,
    /// With a switch: the port of this device.
    port: Option<Arc<SwitchPort>>,
    /// With a switch: the port of each peer, and the peer's slot for this side.
    ports: HashMap<PeerSlot, (Arc<SwitchPort>, PeerSlot)>,
    in_switch: InSwitch,
}

impl NullEndpoint {
    pub(super) fn new(
        state: Arc<NullState>,
        clock: Arc<dyn Clock>,
        depth: usize,
        imms_per_poll: u32,
        model: Option<DeviceModel>,
        port: Option<Arc<SwitchPort>>,
    ) -> Self {
        Self {
            state,
            clock,
            model,
            depth,
            completions: VecDeque::with_capacity(64),
            outstanding: 0,
            receives: VecDeque::new(),
            cancelled: Vec::new(),
            imms_per_poll,
            first: None,
            gone: Vec::new(),
            port,
            ports: HashMap::new(),
            in_switch: InSwitch::default(),
        }
    }

    /// Reads the peers, which have changed.
    #[cold]
    fn read_peers(&mut self) {
        let mut peers = self.state.peers.lock().unwrap_or_else(PoisonError::into_inner);
        self.first = peers.first;
        self.ports.clone_from(&peers.ports);
        for peer in peers.gone.drain(..) {
            if let Some(model) = &mut self.model {
                model.abort(peer, |aborted| {
                    self.completions.push_back(failed(aborted.id, ErrorKind::PeerDied));
                });
            }
            self.in_switch.abort(peer, |id| self.completions.push_back(failed(id, ErrorKind::PeerDied)));
            self.gone.push(peer);
        }
    }

    /// Completes the requests that the link model says are due, or sends them through the switch.
    fn run_due(&mut self) {
        let Some(model) = &mut self.model else { return };
        let now = self.clock.now();
        while let Some((request, action)) = model.next(now, &[]) {
            if let (DueAction::Run, Some((port, _))) = (action, self.ports.get(&request.peer)) {
                self.in_switch.push(port.receive(request.len, now), &request);
                continue;
            }
            self.completions.push_back(match action {
                DueAction::Run => Event::Done { first: request.id, count: 1 },
                DueAction::Fail => failed(request.id, ErrorKind::Io),
                DueAction::PathBroken => failed(request.id, ErrorKind::Unreachable),
                DueAction::DeviceLost => failed(request.id, ErrorKind::DeviceLost),
            });
        }
        while let Some((id, peer, imm)) = self.in_switch.next(now) {
            if let (Some(imm), Some((port, own_slot))) = (imm, self.ports.get(&peer)) {
                port.deliver(*own_slot, imm);
            }
            self.completions.push_back(Event::Done { first: id, count: 1 });
        }
        if model.reports_loss() {
            self.completions.push_back(Event::DeviceLost { status: status(ErrorKind::DeviceLost) });
        }
    }
}

fn failed(id: u64, kind: ErrorKind) -> Event {
    Event::Failed { id, status: status(kind) }
}

impl Endpoint for NullEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        if let Some(model) = &mut self.model {
            let unreported = self.completions.len() + self.in_switch.len();
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
            self.completions.push_back(Event::Done { first: template.id, count: count as u32 });
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
        if self.state.changed.load(Ordering::Relaxed) && self.state.changed.swap(false, Ordering::Acquire) {
            self.read_peers();
        }
        self.run_due();
        while into.spare() > 0
            && let Some(event) = self.completions.pop_front()
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
        // `PeerGone` is the last event of a peer: the completions of its requests are reported before.
        while into.spare() > 0
            && self.completions.is_empty()
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
        let idle = self.completions.is_empty() && self.gone.is_empty() && self.cancelled.is_empty();
        if idle && self.imms_per_poll == 0 { Armed::Unsupported } else { Armed::Ready }
    }

    fn due(&self) -> Time {
        self.model.as_ref().map_or(Time::NEVER, DeviceModel::next_due).min(self.in_switch.due())
    }

    fn abort(&mut self, peer: PeerSlot) {
        let Self { model, completions, in_switch, .. } = self;
        if let Some(model) = model {
            model.abort(peer, |aborted| completions.push_back(failed(aborted.id, ErrorKind::Cancelled)));
        }
        in_switch.abort(peer, |id| completions.push_back(failed(id, ErrorKind::Cancelled)));
    }

    fn is_lost(&self) -> bool {
        self.model.as_ref().is_some_and(DeviceModel::is_lost)
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        if let Some(at) = self.receives.iter().position(|posted| *posted == id) {
            self.receives.remove(at);
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
        self.state.endpoint_open.store(false, Ordering::Release);
    }
}

/// The time of arrival, the order of leaving, the request's id, its peer and its imm.
type InFlight = (Time, u64, u64, PeerSlot, Option<u32>);

/// Requests that have left this device and have not arrived at their targets, by time of arrival.
#[derive(Debug, Default)]
struct InSwitch {
    heap: BinaryHeap<Reverse<InFlight>>,
    left: u64,
}

impl InSwitch {
    fn push(&mut self, at: Time, request: &WorkRequest) {
        self.left += 1;
        self.heap.push(Reverse((at, self.left, request.id, request.peer, request.imm)));
    }

    fn len(&self) -> usize {
        self.heap.len()
    }

    /// The time when the next request arrives.
    fn due(&self) -> Time {
        self.heap.peek().map_or(Time::NEVER, |Reverse((at, ..))| *at)
    }

    /// Takes the next request that has arrived by `now`: its id, peer and imm.
    fn next(&mut self, now: Time) -> Option<(u64, PeerSlot, Option<u32>)> {
        if self.due() > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, id, peer, imm))| (id, peer, imm))
    }

    /// Drops the requests to `peer`, and calls `each` with their ids.
    fn abort(&mut self, peer: PeerSlot, mut each: impl FnMut(u64)) {
        self.heap.retain(|Reverse((_, _, id, of, _))| *of != peer || (each(*id), false).1);
    }
}
