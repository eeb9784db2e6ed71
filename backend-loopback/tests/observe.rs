//! Dumps, stalls and records of fabrics that run in virtual time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use limit::Limit;
use multirail_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail_spi::{Access, ErrorKind, VirtualClock};
use transport_core::observe::{Dump, OperationKind, Recording, TraceEvent, WaitReason, WorkerState};
use transport_core::{Fabric, FabricBuilder, Op, Peer, Region, RemoteRegion, TransportConfig, WriteOptions};

/// Latency of the slow link.
const SLOW: Duration = Duration::from_secs(10);
const STALL: Duration = Duration::from_secs(1);

struct TestBed {
    clock: VirtualClock,
    here: Fabric,
    there: Fabric,
    peer: Peer,
    source: Region,
    /// Kept for `remote`.
    _target: Region,
    remote: RemoteRegion,
    reports: Arc<Mutex<Vec<Dump>>>,
}

fn setting(link: LinkModel, settings: impl Fn(FabricBuilder) -> FabricBuilder) -> TestBed {
    let clock = VirtualClock::default();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let open = |link: Option<LinkModel>| {
        let config = link.into_iter().fold(LoopbackConfig::default(), LoopbackConfig::link);
        let loopback = TransportConfig::new("t", Arc::new(Loopback::with(config)));
        let told = Arc::clone(&reports);
        let builder = FabricBuilder::new().transport(loopback).caller_driven().seed(1).incarnation(1);
        let builder = builder.clock(Arc::new(clock.clone())).stall_after(STALL).deadline(4 * SLOW);
        let builder = builder.on_stall(Arc::new(move |dump: &Dump| told.lock().unwrap().push(dump.clone())));
        settings(builder).open().unwrap()
    };
    let (here, there) = (open(Some(link)), open(None));
    let (peer, _) = here.connect_local(&there).unwrap();
    let source = here.alloc(1 << 16, Access::LOCAL).unwrap();
    let target = there.alloc(1 << 16, Access::REMOTE_WRITE).unwrap();
    let remote = peer.import(&target.descriptor()).unwrap();
    TestBed { clock, here, there, peer, source, _target: target, remote, reports }
}

fn slow() -> LinkModel {
    LinkModel { latency: SLOW, ..LinkModel::default() }
}

impl TestBed {
    fn write(&self) -> Op {
        let options = WriteOptions::new().imm(9);
        self.peer.write_with(&self.source, 0..1 << 16, &self.remote, 0, &options).unwrap()
    }

    fn step_both(&self) {
        for _ in 0..4 {
            self.here.step();
            self.there.step();
        }
    }

    fn after(&self, span: Duration) {
        self.clock.advance(span);
        self.step_both();
    }

    fn reported(&self) -> usize {
        self.reports.lock().unwrap().len()
    }
}

#[test]
fn a_stall_is_reported_once_and_says_what_it_waits_for() {
    let setting = setting(slow(), |builder| builder);
    let mut op = setting.write();
    setting.step_both();
    setting.after(STALL / 2);
    assert_eq!(setting.reported(), 0);
    setting.after(STALL);
    assert_eq!(setting.reported(), 1);
    {
        let reports = setting.reports.lock().unwrap();
        let stalled: Vec<_> = reports[0].stalled().collect();
        assert_eq!(stalled.len(), 1);
        let stalled = stalled[0];
        assert_eq!((Some(stalled.id), stalled.kind), (op.id(), OperationKind::Write));
        assert_eq!((stalled.bytes, stalled.imm), (1 << 16, Some(9)));
        assert_eq!((stalled.age, stalled.idle), (STALL * 3 / 2, STALL * 3 / 2));
        assert_eq!(stalled.left, Some(4 * SLOW - STALL * 3 / 2));
        assert_eq!(stalled.peer.as_ref().unwrap().id, reports[0].peers[0].name.id);
        assert_eq!(stalled.rails[0].outstanding, 1);
        assert_eq!(stalled.waits, [WaitReason::Completion { rail: 0, device: "lo0".into(), requests: 1 }]);
        let words = stalled.to_string();
        assert!(
            words.contains("1.5 s old") && words.contains("completion of 1 posted on rail 0 (lo0)"),
            "{words}"
        );
        assert_eq!(reports[0].transports[0].rails[0].outstanding, 1);
    }
    // The same stall is not reported again.
    for _ in 0..5 {
        setting.after(STALL);
    }
    assert_eq!(setting.reported(), 1);
    setting.after(SLOW);
    assert!(op.try_result().unwrap().is_ok());
    assert_eq!(setting.here.dump().operations().count(), 0);
}

#[test]
fn an_operation_that_waits_for_its_trigger_does_not_stall() {
    let setting = setting(slow(), |builder| builder);
    let word = Arc::new(AtomicU32::new(0));
    let options = WriteOptions::new().when(word.clone(), 1);
    let op = setting.peer.write_with(&setting.source, 0..4096, &setting.remote, 0, &options).unwrap();
    setting.step_both();
    (0..5).for_each(|_| setting.after(STALL));
    assert_eq!(setting.reported(), 0);
    word.store(1, Ordering::Release);
    setting.step_both();
    setting.after(STALL * 2);
    assert_eq!(setting.reported(), 1);
    let dump = setting.here.dump();
    let triggered = TraceEvent::Triggered { op: op.id().unwrap() };
    assert!(dump.transports[0].records.iter().any(|record| record.event == triggered));
    assert!(triggered.to_string().contains("was triggered"));
}

#[test]
fn progress_is_no_stall_and_a_second_stall_is_one() {
    // One request at a time: each completion is progress.
    let link = LinkModel { latency: STALL * 3 / 4, accept_at_most: Some(1), ..LinkModel::default() };
    let setting = setting(link, |builder| builder.deadline(1000 * SLOW));
    let ops: Vec<_> = (0..8).map(|_| setting.write()).collect();
    setting.step_both();
    for _ in 0..40 {
        setting.after(STALL / 4);
    }
    assert!(ops.into_iter().all(|mut op| op.try_result().is_some_and(|result| result.is_ok())));
    assert_eq!(setting.reported(), 0);
    setting.write().detach();
    for _ in 0..40 {
        setting.after(STALL / 4);
    }
    assert_eq!(setting.reported(), 0);
}

#[test]
fn a_revoked_or_cancelled_operation_is_described_and_the_end_recorded() {
    let setting = setting(slow(), |builder| builder);
    let op = setting.write();
    let id = op.id().unwrap();
    setting.step_both();
    drop(op);
    setting.step_both();
    let dump = setting.here.dump();
    let cancelled = dump.operations().next().unwrap();
    assert_eq!((cancelled.id, cancelled.ending), (id, Some(ErrorKind::Cancelled)));
    assert!(cancelled.to_string().contains("ends with: cancelled"));
    setting.after(STALL * 2);
    setting.after(SLOW * 2);
    let whats: Vec<_> = setting.here.dump().transports[0].records.iter().map(|record| record.event).collect();
    let place = |wanted: fn(&TraceEvent) -> bool| {
        whats.iter().position(wanted).unwrap_or_else(|| panic!("{whats:?}"))
    };
    let order = [
        place(|what| matches!(what, TraceEvent::PeerLinked { .. })),
        place(|what| matches!(what, TraceEvent::Started { bytes: 65536, .. })),
        place(|what| matches!(what, TraceEvent::Posted { rail: 0, requests: 1, bytes: 65536, .. })),
        place(|what| matches!(what, TraceEvent::Cancelled { .. })),
        place(|what| matches!(what, TraceEvent::Stalled { .. })),
        place(|what| matches!(what, TraceEvent::Completed { requests: 1, failed: 0, .. })),
        place(|what| matches!(what, TraceEvent::Ended { error: Some(ErrorKind::Cancelled), .. })),
    ];
    assert!(order.is_sorted(), "{whats:?}");
}

#[test]
fn a_posted_receive_waits_for_a_message_and_is_no_stall() {
    let setting = setting(slow(), |builder| builder);
    let op = setting.here.recv(&setting.source, 0..100).unwrap();
    setting.step_both();
    setting.after(STALL * 5);
    let dump = setting.here.dump();
    let receive = dump.operations().next().unwrap();
    assert_eq!((receive.kind, receive.bytes, receive.left), (OperationKind::Receive, 100, None));
    assert_eq!((receive.age, Some(receive.id)), (STALL * 5, op.id()));
    assert_eq!(receive.waits, [WaitReason::Message { rail: 0, device: "lo0".into() }]);
    assert_eq!((setting.reported(), dump.transports[0].receives), (0, 1));
}

#[test]
fn the_waits_for_a_peer_that_takes_nothing_are_distinguished() {
    let setting = setting(LinkModel::default(), |builder| builder);
    // No thread polls the other side, so its message ring is full soon.
    let ops: Vec<_> = (0..3000).map(|imm| setting.peer.write_imm(imm).unwrap()).collect();
    while setting.here.step().events > 0 {
        setting.clock.advance(Duration::from_micros(100));
    }
    setting.clock.advance(STALL * 2);
    setting.here.step();
    assert_eq!(setting.reported(), 1);
    let dump = setting.here.dump();
    let waits: Vec<_> = dump.stalled().flat_map(|operation| &operation.waits).collect();
    assert!(!waits.is_empty());
    let told = waits.iter().all(|wait| match wait {
        WaitReason::Completion { requests, .. } => *requests > 0,
        WaitReason::PeerQueue { rail, .. }
        | WaitReason::Turn { rail, .. }
        | WaitReason::SendQueue { rail, .. } => *rail == 0,
        _ => false,
    });
    assert!(told, "{waits:?}");
    drop(ops);
}

#[test]
fn records_and_stalls_change_no_event_hash() {
    let hash = |records: usize, stall: Duration| {
        let setting = setting(slow(), |builder| builder.flight_recorder(records).stall_after(stall));
        let ops: Vec<_> = (0..20).map(|_| setting.write()).collect();
        setting.step_both();
        for _ in 0..30 {
            setting.after(STALL);
            setting.here.dump();
        }
        assert!(ops.into_iter().all(|mut op| op.try_result().is_some_and(|result| result.is_ok())));
        (setting.here.event_hash(), setting.there.event_hash(), setting.reported() > 0)
    };
    let (here, there, stalled) = hash(4096, STALL);
    assert!(stalled);
    assert_eq!(hash(0, Duration::MAX), (here, there, false));
    assert_eq!(hash(3, Duration::from_millis(1)), (here, there, true));
}

#[test]
fn a_dump_parses_back_from_its_bytes() {
    let setting = setting(slow(), |builder| builder);
    let op = setting.write();
    setting.step_both();
    let dump = setting.here.dump();
    assert!(dump.transports[0].records.len() > 2);
    let bytes = [Recording::header(), &dump.to_bytes().unwrap()].concat();
    assert_eq!(Recording::from_bytes(&bytes).unwrap().dumps, [dump]);
    for end in Recording::header().len() + 1..bytes.len() {
        let cut = Recording::from_bytes(&bytes[..end]).unwrap();
        assert!(cut.cut_off && cut.dumps.is_empty());
    }
    drop(op);
}

#[test]
fn a_parked_worker_answers_and_a_blocked_one_is_distinguished() {
    let loopback = || TransportConfig::new("t", Arc::new(Loopback::new()));
    let fabric = FabricBuilder::new().transport(loopback()).open().unwrap();
    let (peer, _) = fabric.connect_local(&fabric).unwrap();
    let region = fabric.alloc(4096, Access::LOCAL).unwrap();
    let op = fabric.recv(&region, 0..4096).unwrap();
    // A dump waits for a worker for half a second. On a busy machine, the worker may get no core for longer.
    let answered = || Some(fabric.dump()).filter(|dump| dump.transports[0].worker != WorkerState::Blocked);
    let dump = Limit::of(limit::HANG).ask(answered).expect("the worker answers");
    assert!(matches!(dump.transports[0].worker, WorkerState::Running | WorkerState::Parked));
    assert_eq!((dump.operations().count(), dump.peers.len()), (1, 2));
    // Until the worker has taken the receive back, it would get the message that the next receive is for.
    assert_eq!(op.cancel().wait(limit::HANG).unwrap_err().kind(), ErrorKind::Cancelled);
    // This waker does not return, so it blocks the worker.
    let (entered, in_waker) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    let waker = std::task::Waker::from(Arc::new(BlockingWaker(Mutex::new(Some((entered, released))))));
    let mut op = Box::pin(fabric.recv(&region, 0..4096).unwrap());
    let polled = op.as_mut().poll(&mut std::task::Context::from_waker(&waker));
    assert!(polled.is_pending());
    peer.send(&region, 0..8).unwrap().detach();
    in_waker.recv_timeout(limit::HANG).unwrap();
    let dump = fabric.dump();
    release.send(()).unwrap();
    assert_eq!(dump.transports[0].worker, WorkerState::Blocked);
    assert!(
        dump.transports[0].records.iter().any(|record| matches!(record.event, TraceEvent::Message { .. }))
    );
    fabric.close();
    assert_eq!(fabric.dump().transports[0].worker, WorkerState::Closed);
}

type WakerChannel = (std::sync::mpsc::Sender<()>, std::sync::mpsc::Receiver<()>);

struct BlockingWaker(Mutex<Option<WakerChannel>>);

impl std::task::Wake for BlockingWaker {
    fn wake(self: Arc<Self>) {
        if let Some((entered, released)) = self.0.lock().unwrap().take() {
            entered.send(()).unwrap();
            let _ = released.recv_timeout(limit::HANG);
        }
    }
}
