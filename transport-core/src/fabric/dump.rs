//! What a whole fabric reports: dumps, whatever its workers do at the moment; stalled operations; metrics.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::group::Group;
use super::{Fabric, FabricInner, Transport, lock};
use crate::engine::index::{GroupIndex, Number};
use crate::engine::trace::Stall;
use crate::engine::{Control, Snapshot};
use crate::observe::{Dump, PeerDump, RailDump, TransportDump, WorkerState};

/// The most time that a dump waits for all workers together. A worker that is awake answers after its current batch,
/// within tens of microseconds. A loaded machine may need some time to wake a worker that sleeps.
const LIMIT: Duration = Duration::from_millis(500);

/// The pause between two tries to lock an engine that another thread drives.
const RETRY_PAUSE: Duration = Duration::from_micros(200);

/// A handle of a fabric that does not keep the fabric open.
#[derive(Clone)]
pub struct WeakFabric(Weak<FabricInner>);

impl WeakFabric {
    /// The fabric, while another handle keeps it open.
    pub fn upgrade(&self) -> Option<Fabric> {
        self.0.upgrade().map(Fabric)
    }
}

impl Fabric {
    /// A handle that does not keep the fabric open.
    pub fn downgrade(&self) -> WeakFabric {
        WeakFabric(Arc::downgrade(&self.0))
    }

    /// A snapshot of the fabric: counters, windows, operations with what each waits for, peers, and the flight
    /// recorder.
    ///
    /// Any thread may take a dump at any time. It takes half a second at most. The dump wakes a worker that sleeps. If
    /// a worker is stuck inside a backend or inside the user's code, the dump says so, and has the worker's counters
    /// and records only.
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
        let name = |peer: &crate::Peer| PeerDump { name: peer.0.name(), heard: peer.0.context.silence() };
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

    /// Publishes the counters of all rails to the installed recorder of the `metrics` crate. Call it before each
    /// scrape: the engines do not update metrics by themselves.
    ///
    /// The counters are `multirail_rail_*_total`, with the labels `transport`, `backend`, `rail` and `device`. The
    /// gauge `multirail_peers` is the number of connected peers. `multirail_operations_total` counts the operations that
    /// succeeded, by `transport` and `size`, and `multirail_operation_errors_total` those that failed, by `transport` and
    /// `kind` (an [`ErrorKind`](crate::ErrorKind)). The latencies are in [`Fabric::operation_counters`], the
    /// time that registrations took in [`Fabric::registration_counters`], and counts of each peer in
    /// [`Fabric::peer_counters`]. If a process has two fabrics, their transports need
    /// different labels.
    #[cfg(feature = "metrics")]
    pub fn publish_metrics(&self) {
        use metrics::{counter, gauge};

        for rail in self.counters() {
            let labels = [
                ("transport", rail.transport),
                ("backend", rail.backend),
                ("rail", rail.rail.to_string()),
                ("device", rail.device),
            ];
            counter!("multirail_rail_posts_total", &labels).absolute(rail.posts);
            counter!("multirail_rail_doorbells_total", &labels).absolute(rail.doorbells);
            counter!("multirail_rail_bytes_total", &labels).absolute(rail.bytes);
            counter!("multirail_rail_completions_total", &labels).absolute(rail.completions);
            counter!("multirail_rail_errors_total", &labels).absolute(rail.errors);
            counter!("multirail_rail_queue_full_total", &labels).absolute(rail.queue_full);
            counter!("multirail_rail_retries_total", &labels).absolute(rail.retries);
            counter!("multirail_rail_grant_waits_total", &labels).absolute(rail.grant_waits);
            counter!("multirail_rail_direct_total", &labels).absolute(rail.direct);
            counter!("multirail_rail_direct_bytes_total", &labels).absolute(rail.direct_bytes);
            counter!("multirail_rail_taken_over_total", &labels).absolute(rail.taken_over);
            counter!("multirail_rail_replayed_total", &labels).absolute(rail.replayed);
            counter!("multirail_rail_replayed_bytes_total", &labels).absolute(rail.replayed_bytes);
            counter!("multirail_rail_paths_broken_total", &labels).absolute(rail.paths_broken);
            counter!("multirail_rail_paths_mended_total", &labels).absolute(rail.paths_mended);
        }
        for transport in self.0.data_transports() {
            let groups = transport.groups.iter();
            for (rail, counts) in groups.flat_map(|group| group.rails.clone().zip(&group.engine.counts)) {
                let labels = [
                    ("transport", transport.label.clone()),
                    ("backend", transport.backend.into()),
                    ("rail", rail.to_string()),
                    ("device", transport.devices[rail].name.clone()),
                ];
                let is_in_service = !counts.is_lost() && !counts.is_retired();
                gauge!("multirail_rail_in_service", &labels).set(f64::from(u8::from(is_in_service)));
                gauge!("multirail_rail_outstanding", &labels).set(counts.outstanding() as f64);
            }
        }
        let registrations = self.registration_counters();
        counter!("multirail_registrations_total").absolute(registrations.regions);
        counter!("multirail_registered_bytes_total").absolute(registrations.bytes);
        for operations in self.operation_counters() {
            let transport = &operations.transport;
            for size in operations.sizes {
                let labels = [("transport", transport.clone()), ("size", size.name().into())];
                counter!("multirail_operations_total", &labels).absolute(size.count());
            }
            let label = [("transport", transport.clone())];
            counter!("multirail_staged_bytes_total", &label).absolute(operations.staged_bytes);
            counter!("multirail_coalesced_bytes_total", &label).absolute(operations.coalesced_bytes);
            for (kind, count) in operations.errors {
                let labels = [("transport", transport.clone()), ("kind", format!("{kind:?}"))];
                counter!("multirail_operation_errors_total", &labels).absolute(count);
            }
        }
        gauge!("multirail_peers").set(lock(&self.0.peers).len() as f64);
    }
}

/// A worker's answer to a dump command, still to be received, and whether the worker was asleep. There is no answer to
/// receive if the caller drives the engine.
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

    /// Reads a caller-driven engine between two steps.
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
            RailDump { counters, outstanding, depth, lost, retired: group.engine.counts[at].is_retired() }
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

/// The function that a user wants called when operations stall.
pub(crate) type StallHook = Arc<dyn Fn(&Dump) + Send + Sync>;

/// Logs stalled operations and calls the user's hook, each with a dump of the fabric. Does nothing once the fabric is
/// gone.
pub(crate) fn report_stalls(fabric: &Weak<FabricInner>, hook: Option<&StallHook>, stalls: &[Stall]) {
    let Some(fabric) = fabric.upgrade().map(Fabric) else { return };
    let dump = fabric.dump();
    // Dropped before the hook runs: the user may close the fabric there, or wait for its end.
    drop(fabric);
    // A dump has one part per rail group.
    for (index, part) in dump.transports.iter().enumerate() {
        let group = GroupIndex::new(index);
        for operation in part.operations.iter().filter(|op| stalls.contains(&(group, op.id))) {
            tracing::warn!(transport = %part.label, op = %operation.id, "stalled: {operation}");
        }
    }
    if let Some(hook) = hook {
        hook(&dump);
    }
}
