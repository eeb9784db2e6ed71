//! Operations whose rail group is lost whole, while another rail group carries their rest: what ends them early, what they
//! report, and which kinds go on. `lost_devices` has the loss at random times. Nearly everything runs in virtual time.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::observe::{OperationDump, TraceEvent, WaitReason};
use multirail::{
    Access, Clock, ErrorKind, Fabric, FabricBuilder, Grant, GrantPolicy, GrantRequest, LocalList, Op,
    Outcome, Pages, Peer, ReadOptions, Region, RemoteList, RemoteRegion, SystemClock, Time, TransportConfig,
    VirtualClock, WriteOptions,
};

const PAGE: usize = 4096;
const PAGES: u32 = 512;
const LEN: usize = PAGES as usize * PAGE;
const DEADLINE: Duration = Duration::from_secs(1);
/// When the first rail group is lost.
const LOST_AT: Time = Time::from_nanos(100_000);
const OVERWRITTEN: u8 = 0xa5;

/// Groups of two devices. The first group of the initiator is lost.
fn model(groups: u32) -> LinkModel {
    let lose_devices_at = vec![(0, LOST_AT), (1, LOST_AT)];
    let late_after = Duration::from_micros(300);
    assert!(groups > 1);
    LinkModel { send_depth: Some(16), lose_devices_at, late_after, ..LinkModel::p5() }
}

/// Grants so many imms at once.
struct ImmsAtOnce(u64);

impl GrantPolicy for ImmsAtOnce {
    fn grant(&self, _: &GrantRequest<'_>) -> Grant {
        Grant { imms: self.0, ..Grant::UNLIMITED }
    }
}

struct Hosts {
    clock: VirtualClock,
    initiator: Fabric,
    target: Fabric,
    to_target: Peer,
    to_initiator: Peer,
    source: Region,
    written: Region,
    remote: RemoteRegion,
    content: Vec<u8>,
}

impl Hosts {
    fn new(groups: u32, initiator: LinkModel) -> Self {
        Self::granting(groups, initiator, u64::MAX)
    }

    fn granting(groups: u32, initiator: LinkModel, imms: u64) -> Self {
        let clock = VirtualClock::default();
        let open = |link, seed| {
            let cards = LoopbackConfig::default().devices(2 * groups).groups(groups).link(link);
            let transport = TransportConfig::new("cards", Arc::new(Loopback::with(cards)));
            let builder = FabricBuilder::new().transport(transport).clock(Arc::new(clock.clone()));
            builder.seed(seed).grant_policy(Arc::new(ImmsAtOnce(imms))).caller_driven().open().unwrap()
        };
        let (initiator, target) = (open(initiator, 1), open(LinkModel::p5(), 2));
        let (to_target, to_initiator) = initiator.connect_local(&target).unwrap();
        let source = initiator.alloc(LEN, Access::all()).unwrap();
        let written = target.alloc(LEN, Access::all()).unwrap();
        let mut content = vec![0; LEN];
        fastrand::Rng::with_seed(7).fill(&mut content);
        source.copy_in(0, &content).unwrap();
        let remote = to_target.import(&written.descriptor()).unwrap();
        Self { clock, initiator, target, to_target, to_initiator, source, written, remote, content }
    }

    fn turn(&self, limit: Time) -> bool {
        if self.initiator.step().events + self.target.step().events == 0 {
            let due = self.initiator.due().min(self.target.due()).min(limit);
            if due >= limit {
                self.clock.advance(limit.since(self.clock.now()));
                return false;
            }
            self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        }
        true
    }

    fn write(&self, options: &WriteOptions) -> Op {
        let pages = Pages::new((0..PAGES).rev().collect::<Vec<_>>());
        self.to_target.write_pages_with(&self.source, &pages, &self.remote, &pages, PAGE, options).unwrap()
    }

    /// The operations of the initiator's rail groups that wait for their rest.
    fn continued(&self) -> Vec<OperationDump> {
        let dump = self.initiator.dump();
        let waits = |operation: &&OperationDump| {
            operation.waits.iter().any(|wait| matches!(wait, WaitReason::OtherGroup { .. }))
        };
        dump.operations().filter(waits).cloned().collect()
    }

    /// Runs until another rail group carries the rest of an operation.
    fn until_continued(&self) -> OperationDump {
        loop {
            if let Some(operation) = self.continued().pop() {
                return operation;
            }
            assert!(self.turn(Time::ZERO.after(DEADLINE)), "nothing was handed to another rail group");
        }
    }

    fn result(&self, op: &mut Op) -> multirail::Result<Outcome> {
        loop {
            if let Some(result) = op.try_result() {
                return result;
            }
            assert!(self.turn(Time::ZERO.after(DEADLINE * 4)), "the operation hangs");
        }
    }

    fn resolve<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = poll_once(future.as_mut()) {
                return output;
            }
            assert!(self.turn(Time::ZERO.after(DEADLINE * 4)), "the future hangs");
        }
    }

    fn check_written(&self) {
        let mut arrived = vec![0; LEN];
        self.written.copy_out(0, &mut arrived).unwrap();
        assert!(arrived == self.content, "wrong bytes");
    }

    /// From now on no byte may land.
    fn check_quiet(&self) {
        self.written.copy_in(0, &vec![OVERWRITTEN; LEN]).unwrap();
        let end = self.clock.now().after(Duration::from_millis(10));
        while self.turn(end) {}
        let mut now = vec![0; LEN];
        self.written.copy_out(0, &mut now).unwrap();
        assert!(now.iter().all(|byte| *byte == OVERWRITTEN), "bytes landed after the end");
        assert_eq!(self.initiator.dump().operations().count(), 0, "an operation is left");
    }
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn imm() -> WriteOptions {
    WriteOptions::new().imm(3).deadline(DEADLINE)
}

#[test]
fn dumps_records_and_receipts_show_both_groups() {
    let hosts = Hosts::new(2, model(2));
    let mut op = hosts.write(&imm());
    let shown = hosts.until_continued();
    assert_eq!(Some(shown.id), op.id());
    assert!(shown.to_string().contains("its rest, op 0.0 of cards/1"), "{shown}");
    let outcome = hosts.result(&mut op).unwrap();
    hosts.check_written();
    assert_eq!((outcome.bytes, hosts.to_initiator.imm(3).count()), (LEN as u64, 1));
    let receipt = op.receipt().unwrap();
    let of_group = |rails: [u32; 2]| -> u64 {
        let rails = receipt.rails.iter().filter(|rail| rails.contains(&rail.rail));
        rails.map(|rail| rail.bytes).sum()
    };
    let (first, second) = (of_group([0, 1]), of_group([2, 3]));
    assert!(first > 0 && second > 0 && first + second == LEN as u64, "{receipt:?}");
    assert!(receipt.work_requests > PAGES && receipt.transfer >= receipt.post, "{receipt:?}");
    let dump = hosts.initiator.dump();
    let records: Vec<_> = dump.transports.iter().flat_map(|transport| &transport.records).collect();
    let continued = records.iter().filter(|record| matches!(record.event, TraceEvent::Continued { .. }));
    assert_eq!(
        continued.map(|record| record.event.to_string()).collect::<Vec<_>>(),
        ["op 0.0: the rail group of rail 2 carries the rest, as op 0.0"]
    );
    // The next operation has the same slot, and its receipt has its own rails alone.
    drop(op);
    let mut next = hosts.write(&imm());
    hosts.result(&mut next).unwrap();
    let receipt = next.receipt().unwrap();
    assert_eq!(receipt.rails.iter().map(|rail| rail.bytes).sum::<u64>(), LEN as u64, "{receipt:?}");
    hosts.check_quiet();
}

#[test]
fn a_cancel_reaches_the_other_group() {
    let hosts = Hosts::new(2, model(2));
    let op = hosts.write(&imm());
    hosts.until_continued();
    let error = hosts.resolve(op.cancel()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(hosts.clock.now() < Time::ZERO.after(DEADLINE / 10));
    hosts.check_quiet();
    assert_eq!(hosts.to_initiator.imm(3).count(), 0);
}

#[test]
fn a_dropped_operation_is_cancelled_and_a_drain_waits_for_both_groups() {
    let hosts = Hosts::new(2, model(2));
    let op = hosts.write(&imm());
    hosts.until_continued();
    drop(op);
    hosts.resolve(hosts.to_target.drain().unwrap()).unwrap();
    hosts.check_quiet();
}

#[test]
fn the_deadline_ends_both() {
    // The other group needs longer than the deadline.
    let slow = LinkModel { bits_per_s: Some(50_000_000), ..model(2) };
    let hosts = Hosts::new(2, LinkModel { lose_devices_at: vec![(0, LOST_AT), (1, LOST_AT)], ..slow });
    let deadline = Duration::from_millis(50);
    let mut op = hosts.write(&imm().deadline(deadline));
    hosts.until_continued();
    let error = hosts.result(&mut op).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(hosts.clock.now(), Time::ZERO.after(deadline));
    // The memory stays in use until the devices have released it.
    hosts.resolve(hosts.to_target.drain().unwrap()).unwrap();
    hosts.check_quiet();
    // A cancel that takes until the deadline.
    let op = hosts.write(&imm().deadline(deadline));
    assert!(hosts.resolve(op.cancel()).is_err());
    hosts.check_quiet();
}

#[test]
fn a_third_group_goes_on_if_the_second_one_is_lost_too() {
    let mut link = model(3);
    let later = LOST_AT.after(Duration::from_micros(120));
    link.lose_devices_at.extend([(2, later), (3, later)]);
    let hosts = Hosts::new(3, link);
    let mut op = hosts.write(&imm());
    while hosts.continued().len() < 2 {
        assert!(hosts.turn(Time::ZERO.after(DEADLINE)), "no third group");
    }
    hosts.result(&mut op).unwrap();
    hosts.check_written();
    let receipt = op.receipt().unwrap();
    assert_eq!(receipt.rails.len(), 6, "{receipt:?}");
    assert_eq!(receipt.rails.iter().map(|rail| rail.bytes).sum::<u64>(), LEN as u64);
    assert_eq!(hosts.to_initiator.imm(3).count(), 1);
    hosts.check_quiet();
}

#[test]
fn without_another_group_the_error_is_as_before() {
    let mut link = model(2);
    link.lose_devices_at.extend([(2, LOST_AT), (3, LOST_AT)]);
    let hosts = Hosts::new(2, link);
    let error = hosts.result(&mut hosts.write(&imm())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    hosts.check_quiet();
}

#[test]
fn who_wants_no_replay_stays_in_its_group() {
    let hosts = Hosts::new(2, model(2));
    let error = hosts.result(&mut hosts.write(&imm().no_replay())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    assert!(hosts.continued().is_empty());
    hosts.check_quiet();
}

#[test]
fn reads_imms_alone_and_imms_per_request_go_on() {
    let hosts = Hosts::new(2, model(2));
    hosts.written.copy_in(0, &hosts.content).unwrap();
    hosts.source.copy_in(0, &vec![0; LEN]).unwrap();
    let pages = Pages::new((0..PAGES).collect::<Vec<_>>());
    let options = ReadOptions::new().deadline(DEADLINE);
    let mut read = hosts
        .to_target
        .read_pages_with(&hosts.source, &pages, &hosts.remote, &pages, PAGE, &options)
        .unwrap();
    hosts.until_continued();
    assert_eq!(hosts.result(&mut read).unwrap().bytes, LEN as u64);
    let mut arrived = vec![0; LEN];
    hosts.source.copy_out(0, &mut arrived).unwrap();
    assert!(arrived == hosts.content, "wrong bytes");
    // Imms without bytes go over the first group, which is lost.
    hosts.result(&mut hosts.to_target.write_imm(9).unwrap()).unwrap();
    assert_eq!(hosts.to_initiator.imm(9).count(), 1);
    let hosts = Hosts::new(2, model(2));
    let mut each = hosts.write(&imm().per_wr());
    match hosts.result(&mut each) {
        Ok(_) => assert_eq!(hosts.to_initiator.imm(3).count(), u64::from(PAGES)),
        // The target counts imms, and the count does not tell which of those that were under way have arrived.
        Err(error) => assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}"),
    }
    assert!(hosts.to_initiator.imm(3).count() <= u64::from(PAGES));
    hosts.check_quiet();
}

/// A list of many regions, some entries of which are delivered when the group is lost.
#[test]
fn the_rest_of_a_list_keeps_its_regions() {
    const REGIONS: usize = 7;
    let hosts = Hosts::new(2, model(2));
    let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
    let part = LEN / REGIONS / PAGE * PAGE;
    let mut regions = Vec::new();
    for number in 0..REGIONS {
        let source = hosts.initiator.alloc(part, Access::LOCAL).unwrap();
        let target = hosts.target.alloc(part, Access::REMOTE_WRITE).unwrap();
        source.copy_in(0, &hosts.content[number * part..(number + 1) * part]).unwrap();
        let imported = hosts.to_target.import(&target.descriptor()).unwrap();
        for page in (0..part / PAGE).rev() {
            // Entries of different lengths.
            let len = PAGE - page % 5 * 64;
            local.push(&source, page * PAGE, len).unwrap();
            remote.push(&imported, page * PAGE, len).unwrap();
        }
        regions.push((source, target));
    }
    let mut op = hosts.to_target.write_list(&local, .., &remote, .., &imm()).unwrap();
    hosts.until_continued();
    hosts.result(&mut op).unwrap();
    for (number, (_, target)) in regions.iter().enumerate() {
        let mut arrived = vec![0; part];
        target.copy_out(0, &mut arrived).unwrap();
        for page in 0..part / PAGE {
            let len = PAGE - page % 5 * 64;
            let (at, want) = (page * PAGE, number * part + page * PAGE);
            assert!(arrived[at..at + len] == hosts.content[want..want + len], "region {number}, page {page}");
            assert!(arrived[at + len..at + PAGE].iter().all(|byte| *byte == 0));
        }
    }
    assert_eq!(hosts.to_initiator.imm(3).count(), 1);
}

/// An operation that several groups share: one of them is lost, and the imm comes once, after all bytes.
#[test]
fn the_share_of_a_lost_group_goes_on() {
    const LARGE: usize = 12 << 20;
    for at in (0..20).map(|step| Time::from_nanos(step * 60_000)) {
        let lose_devices_at = vec![(0, at), (1, at)];
        let hosts = Hosts::new(3, LinkModel { lose_devices_at, ..model(3) });
        let source = hosts.initiator.alloc(LARGE, Access::LOCAL).unwrap();
        let target = hosts.target.alloc(LARGE, Access::all()).unwrap();
        let content: Vec<u8> = (0..LARGE).map(|byte| (byte / 251) as u8).collect();
        source.copy_in(0, &content).unwrap();
        let remote = hosts.to_target.import(&target.descriptor()).unwrap();
        let mut op = hosts.to_target.write_with(&source, 0..LARGE, &remote, 0, &imm()).unwrap();
        let early = |op: &mut Op| {
            while hosts.to_initiator.imm(3).count() == 0 {
                if let Some(result) = op.try_result() {
                    return Some(result);
                }
                assert!(hosts.turn(Time::ZERO.after(DEADLINE)), "the operation hangs");
            }
            None
        };
        let result = early(&mut op);
        if result.is_none() {
            // The imm has come: so have the bytes.
            let mut arrived = vec![0; LARGE];
            target.copy_out(0, &mut arrived).unwrap();
            assert!(arrived == content, "the imm came before the bytes");
        }
        let outcome = result.unwrap_or_else(|| hosts.result(&mut op)).unwrap();
        assert_eq!((outcome.bytes, hosts.to_initiator.imm(3).count()), (LARGE as u64, 1), "lost at {at:?}");
    }
}

/// Bytes become visible a while after their completion, and an imm of another device does not wait for them. What the lost
/// group has delivered can not be flushed any more, so no other group may announce it.
#[test]
fn bytes_that_nobody_can_flush_are_not_announced() {
    let (mut done, mut lost) = (0, 0);
    for at in (0..24).map(|step| Time::from_nanos(step * 10_000)) {
        let lose_devices_at = vec![(0, at), (1, at)];
        let visible_after = Duration::from_micros(40);
        let hosts = Hosts::new(2, LinkModel { lose_devices_at, visible_after, ..model(2) });
        let mut op = hosts.write(&imm());
        let result = hosts.result(&mut op);
        match result {
            Ok(_) => {
                hosts.check_written();
                done += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
                lost += 1;
            }
        }
        let imms = hosts.to_initiator.imm(3).count();
        assert_eq!(imms, u64::from(op.receipt().is_some()), "lost at {at:?}");
        if imms == 1 {
            hosts.check_quiet();
        }
    }
    assert!(done > 0 && lost > 0, "{done} done, {lost} lost");
}

/// While an operation waits for its trigger, its group is lost.
#[test]
fn a_trigger_that_is_due_after_the_loss() {
    let hosts = Hosts::new(2, model(2));
    let word = Arc::new(AtomicU32::new(0));
    let mut op = hosts.write(&imm().when(word.clone(), 1));
    let later = LOST_AT.after(Duration::from_millis(1));
    while hosts.turn(later) {}
    assert!(op.try_result().is_none());
    assert!(hosts.continued().is_empty());
    word.store(1, Ordering::Release);
    hosts.result(&mut op).unwrap();
    hosts.check_written();
    // Cancelled before it is due.
    let op = hosts.write(&imm().when(Arc::new(AtomicU32::new(0)), 1));
    assert_eq!(hosts.resolve(op.cancel()).unwrap_err().kind(), ErrorKind::Cancelled);
    hosts.check_quiet();
}

#[test]
fn a_revoked_region_ends_both() {
    let hosts = Hosts::new(2, model(2));
    let mut op = hosts.write(&imm());
    hosts.until_continued();
    let mut revoke = hosts.source.revoke().unwrap();
    hosts.result(&mut revoke).unwrap();
    assert_eq!(hosts.result(&mut op).unwrap_err().kind(), ErrorKind::Revoked);
    hosts.check_quiet();
}

/// Grants of a few imms: the rest takes credit of its own, and what was posted in vain gives its credit back.
#[test]
fn a_grant_is_not_used_up_twice() {
    let hosts = Hosts::granting(2, model(2), 2);
    let mut ops: Vec<_> = (0..6).map(|_| hosts.write(&imm())).collect();
    for op in &mut ops {
        hosts.result(op).unwrap();
    }
    assert_eq!(hosts.to_initiator.imm(3).count(), 6);
    hosts.check_quiet();
}

#[test]
fn a_peer_that_dies_ends_both() {
    let mut hosts = Hosts::new(2, model(2));
    let mut op = hosts.write(&imm());
    hosts.until_continued();
    let other = Hosts::new(2, model(2));
    drop(std::mem::replace(&mut hosts.target, other.target.clone()));
    hosts.to_initiator = other.to_initiator.clone();
    let error = loop {
        if let Some(result) = op.try_result() {
            break result.unwrap_err();
        }
        hosts.initiator.step();
        hosts.clock.advance(Duration::from_micros(1));
        assert!(hosts.clock.now() < Time::ZERO.after(DEADLINE), "the operation hangs");
    };
    assert!(matches!(error.kind(), ErrorKind::PeerDied | ErrorKind::Closed), "{error}");
}

/// The engine of the lost group closes first. It does not wait for the other one, which no thread drives meanwhile.
#[test]
fn a_fabric_closes_at_once() {
    let hosts = Hosts::new(2, model(2));
    let mut op = hosts.write(&imm());
    let cancelled = hosts.write(&imm());
    hosts.until_continued();
    let mut cancel = cancelled.cancel();
    let begun = Instant::now();
    hosts.initiator.close();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(op.try_result().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert!(poll_once(Pin::new(&mut cancel)).is_ready(), "bytes may still move");
}

/// In real time, by workers on the target's side: a thread that waits for an operation drives all engines that carry it.
#[test]
fn a_waiting_thread_drives_both_groups() {
    let open = |link: LinkModel, is_driven: bool| {
        let cards = LoopbackConfig::default().devices(2).groups(2).link(link);
        let transport = TransportConfig::new("cards", Arc::new(Loopback::with(cards)));
        let builder = FabricBuilder::new().transport(transport);
        if is_driven { builder.caller_driven().open().unwrap() } else { builder.open().unwrap() }
    };
    for is_driven in [true, false] {
        let lose_devices_at = vec![(0, LOST_AT)];
        let link = LinkModel { lose_devices_at, ..LinkModel::p5() };
        let (initiator, target) = (open(link, is_driven), open(LinkModel::p5(), false));
        let (to_target, to_initiator) = initiator.connect_local(&target).unwrap();
        let (from, into) =
            (initiator.alloc(LEN, Access::LOCAL).unwrap(), target.alloc(LEN, Access::REMOTE_WRITE).unwrap());
        from.copy_in(0, &vec![7; LEN]).unwrap();
        let remote = to_target.import(&into.descriptor()).unwrap();
        let pages = Pages::new((0..PAGES).rev().collect::<Vec<_>>());
        let limit = Duration::from_secs(20);
        let write = || {
            to_target.write_pages_with(&from, &pages, &remote, &pages, PAGE, &imm().deadline(limit)).unwrap()
        };
        let mut ops: Vec<_> = (0..4).map(|_| write()).collect();
        for op in &mut ops {
            op.wait(limit).unwrap();
        }
        let mut arrived = vec![0; LEN];
        into.copy_out(0, &mut arrived).unwrap();
        assert!(arrived.iter().all(|byte| *byte == 7));
        // The target's worker counts them.
        multirail::wait(to_initiator.imm(3).expect(4), limit).unwrap().unwrap();
        // By a future, and a cancel.
        multirail::wait(write(), limit).unwrap().unwrap();
        drop(write().cancel().wait(limit));
    }
}

/// Each rail group has a thread, and the groups are lost while operations begin, end and are cancelled.
#[test]
fn groups_are_lost_under_workers() {
    const PARTS: usize = 6;
    const PART: usize = LEN / 8;
    let (mut done, mut cancelled, mut lost, mut continued) = (0, 0, 0, 0);
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let at = |micros| Time::from_nanos(micros * 1000);
        let (first, second) = (random.u64(60_000..90_000), random.u64(60_000..120_000));
        let lose_devices_at = [(0, first), (1, first), (2, second), (3, second)];
        let lose_devices_at = lose_devices_at.map(|(device, micros)| (device, at(micros))).to_vec();
        // Slow, so that operations are nearly always under way.
        let link = LinkModel { lose_devices_at, bits_per_s: Some(4_000_000_000), ..model(3) };
        let clock = Arc::new(SystemClock::default());
        let open = |link| {
            let cards = LoopbackConfig::default().devices(6).groups(3).link(link);
            let transport = TransportConfig::new("cards", Arc::new(Loopback::with(cards)));
            FabricBuilder::new().transport(transport).clock(clock.clone()).open().unwrap()
        };
        let (initiator, target) = (open(link), open(LinkModel::p5()));
        let (to_target, _to_initiator) = initiator.connect_local(&target).unwrap();
        let (source, written) =
            (initiator.alloc(LEN, Access::all()).unwrap(), target.alloc(LEN, Access::all()).unwrap());
        let remote = to_target.import(&written.descriptor()).unwrap();
        source.copy_in(0, &vec![7; LEN]).unwrap();
        let limit = Duration::from_secs(20);
        let start = |part: usize| {
            let pages = Pages::new((0..(PART / PAGE) as u32).rev().collect::<Vec<_>>()).offset(part * PART);
            let options = WriteOptions::new().imm(part as u32).deadline(limit);
            to_target.write_pages_with(&source, &pages, &remote, &pages, PAGE, &options).unwrap()
        };
        let overwrite = |part: usize| written.copy_in(part * PART, &vec![OVERWRITTEN; PART]).unwrap();
        while clock.now() < at(first.max(second) + 2000) {
            let mut ops: Vec<_> = (0..PARTS).map(|part| (part, start(part))).collect();
            random.shuffle(&mut ops);
            for (part, mut op) in ops {
                if random.u8(..4) == 0 {
                    drop(op.cancel().wait(limit));
                    cancelled += 1;
                } else {
                    match op.wait(limit) {
                        Ok(_) => {
                            let mut arrived = vec![0; PART];
                            written.copy_out(part * PART, &mut arrived).unwrap();
                            assert!(arrived.iter().all(|byte| *byte == 7), "seed {seed}: wrong bytes");
                            done += 1;
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::DeviceLost, "seed {seed}: {error}");
                            lost += 1;
                        }
                    }
                }
                overwrite(part);
            }
            let mut now = vec![0; PARTS * PART];
            written.copy_out(0, &mut now).unwrap();
            assert!(now.iter().all(|byte| *byte == OVERWRITTEN), "seed {seed}: bytes landed late");
        }
        let dump = initiator.dump();
        let records = dump.transports.iter().flat_map(|transport| &transport.records);
        continued += records.filter(|record| matches!(record.event, TraceEvent::Continued { .. })).count();
        assert_eq!(dump.operations().count(), 0, "seed {seed}: {dump}");
    }
    println!("{done} done, {cancelled} cancelled, {lost} lost, {continued} went on over another group");
    assert!(done > 4 * lost && continued > 0, "{done} done, {lost} lost, {continued} went on");
}
