//! Taking a dump of a whole fabric, whatever its workers are at.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::group::Group;
use super::{Fabric, FabricInner, Transport, lock};
use crate::engine::{Control, Snapshot};
use crate::observe::{Dump, PeerDump, RailDump, TransportDump, WorkerState};

/// How long a dump waits for all workers together. One that is awake answers within
/// a batch, tens of microseconds; a loaded machine may take a while to wake one.
const LIMIT: Duration = Duration::from_millis(500);

/// Between two tries to look into an engine that another thread is driving.
const RETRY_PAUSE: Duration = Duration::from_micros(200);

/// A fabric that is not kept open by this.
#[derive(Clone)]
pub struct WeakFabric(Weak<FabricInner>);

impl WeakFabric {
    /// The fabric, while somebody else has it.
    pub fn upgrade(&self) -> Option<Fabric> {
        self.0.upgrade().map(Fabric)
    }
}

impl Fabric {
    /// A handle that does not keep it open.
    pub fn downgrade(&self) -> WeakFabric {
        WeakFabric(Arc::downgrade(&self.0))
    }

    /// What is going on: counters, windows, operations and what each waits for, peers,
    /// and the flight recorder.
    ///
    /// Any thread may ask at any time, within half a second: a worker that sleeps is
    /// woken, and of one that is stuck inside a backend or a user's code the dump
    /// says so, with its counters and records.
    pub fn dump(&self) -> Dump {
        let fabric = &*self.0;
        let until = Instant::now() + LIMIT;
        let groups = fabric.transports.iter();
        let groups =
            groups.flat_map(|transport| transport.groups.iter().map(move |group| (transport, group)));
        let asked: Vec<_> = groups.clone().map(|(_, group)| group.request_dump()).collect();
        let parts = groups.zip(asked);
        let transports =
            parts.map(|((transport, group), asked)| transport.dump(group, asked, until)).collect();
        let name = |peer: &crate::Peer| PeerDump { name: peer.0.name(), heard: peer.0.silence() };
        let mut peers: Vec<_> = lock(&fabric.peers).values().map(name).collect();
        peers.sort_by_key(|peer| peer.name.id);
        Dump {
            host: fabric.identity.host.clone(),
            process: std::process::id(),
            incarnation: fabric.identity.incarnation,
            time: fabric.clock.now(),
            transports,
            peers,
        }
    }

    /// Peers that are connected.
    #[cfg(feature = "metrics")]
    pub(crate) fn peer_count(&self) -> usize {
        lock(&self.0.peers).len()
    }
}

/// An answer that is on its way, and whether the worker slept.
struct DumpRequest(Option<Receiver<Snapshot>>, bool);

impl Group {
    fn request_dump(&self) -> DumpRequest {
        if self.driven.is_some() {
            return DumpRequest(None, false);
        }
        let (answer, answered) = sync_channel(1);
        let parked = self.engine.parked.load(Ordering::Relaxed);
        self.engine.control(Control::Dump { reply: answer });
        DumpRequest(Some(answered), parked)
    }

    /// Reads a caller-driven engine between two turns, without taking one.
    fn snapshot_driven(&self, until: Instant) -> Option<Snapshot> {
        let engine = self.driven.as_ref()?;
        loop {
            match engine.try_lock() {
                Ok(engine) => return Some(engine.snapshot()),
                Err(TryLockError::Poisoned(engine)) => return Some(engine.into_inner().snapshot()),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }
}

impl Transport {
    fn dump(
        &self,
        group: &Group,
        DumpRequest(answered, parked): DumpRequest,
        until: Instant,
    ) -> TransportDump {
        let left = || until.saturating_duration_since(Instant::now());
        let (worker, snapshot) = match answered.map(|answered| answered.recv_timeout(left())) {
            Some(Ok(snapshot)) if parked => (WorkerState::Parked, Some(snapshot)),
            Some(Ok(snapshot)) => (WorkerState::Running, Some(snapshot)),
            Some(Err(RecvTimeoutError::Timeout)) => (WorkerState::Blocked, None),
            Some(Err(RecvTimeoutError::Disconnected)) => (WorkerState::Closed, None),
            None => match group.snapshot_driven(until) {
                Some(snapshot) => (WorkerState::Running, Some(snapshot)),
                None => (WorkerState::Blocked, None),
            },
        };
        let snapshot = snapshot.unwrap_or_default();
        let rails = self.counters_of(group).into_iter().enumerate().map(|(at, counters)| {
            let depth = u64::from(self.domains[group.rails.start + at].capabilities().send_depth);
            let (outstanding, depth, lost) = snapshot.rails.get(at).copied().unwrap_or((0, depth, false));
            RailDump { counters, outstanding, depth, lost }
        });
        TransportDump {
            label: group.engine.label.clone(),
            backend: self.backend.into(),
            worker,
            rails: rails.collect(),
            queued: group.engine.submissions.len() as u64,
            receives: snapshot.receives,
            operations: snapshot.operations,
            recent_failures: snapshot.recent_failures.into(),
            records: group.engine.flight_recorder.read(),
        }
    }
}
