//! Loopback with a link model: slow, reordering, with short queues, failing, and the same for one seed.

mod common;

use std::time::Duration;

use common::*;
use multirail_loopback::{LinkModel, LoopbackConfig};
use multirail_spi::{Access, Clock, ErrorKind, Memory, Time, *};

fn linked(link: LinkModel, seed: u64) -> (TestNode, TestNode, PeerSlot, PeerSlot) {
    let (a, b) = (node(LoopbackConfig::default().link(link), seed), node(LoopbackConfig::default(), 2));
    let (to_b, to_a) = connect(&a, &b);
    (a, b, to_b, to_a)
}

fn imms(to_b: PeerSlot, source: &RegisteredBuffer, count: u32) -> Vec<WorkRequest> {
    let request = WorkRequest { len: 0, ..write(0, to_b, source, None) };
    (0..count).map(|n| WorkRequest { id: n.into(), imm: Some(n), ..request }).collect()
}

/// Posts 200 imms to a device that reorders and refuses. Returns the events in order, and how many imms each post
/// accepted.
fn trace(seed: u64) -> (Vec<Event>, Vec<usize>) {
    let link = LinkModel {
        accept_at_most: Some(20),
        reorder: true,
        jitter: Duration::from_micros(5),
        fail_every: Some(7),
        ..LinkModel::default()
    };
    let (mut a, mut b, to_b, _) = linked(link, seed);
    assert!(a.domain.capabilities().ordering.is_empty() && a.domain.direct(to_b).is_none());
    let source = a.register(8, Access::LOCAL);
    let batch = imms(to_b, &source, 200);
    let (mut at, mut taken, mut events) = (0, Vec::new(), Vec::new());
    for _ in 0..1000 {
        if at < batch.len() {
            taken.push(a.post(&batch[at..]).accepted);
            at += taken.last().unwrap();
        }
        a.clock.advance(Duration::from_micros(1));
        events.extend(a.poll());
        events.extend(b.poll());
    }
    (events, taken)
}

#[test]
fn one_seed_gives_one_behaviour() {
    let (events, taken) = trace(42);
    assert_eq!((events.clone(), taken.clone()), trace(42));
    assert_ne!(events, trace(43).0);
    assert!(taken.contains(&0) && taken.iter().any(|n| *n > 1));
    let count = |pick: fn(&Event) -> bool| events.iter().filter(|event| pick(event)).count();
    assert_eq!(count(|event| matches!(event, Event::Failed { .. })), 200 / 7);
    let all_done: Vec<_> =
        events.iter().copied().filter(|event| matches!(event, Event::Done { .. })).collect();
    assert_eq!(total(&all_done), 200 - 200 / 7);
    assert_eq!(count(|event| matches!(event, Event::Imm { .. })), 200 - 200 / 7);
    let imms =
        events.iter().filter_map(|event| if let Event::Imm { imm, .. } = event { Some(imm) } else { None });
    assert!(!imms.is_sorted());
}

#[test]
fn a_burst_accepts_nothing_and_says_until_when() {
    const BURST: Duration = Duration::from_micros(100);
    let link = LinkModel { burst_one_in: Some(1), burst: BURST, ..LinkModel::default() };
    let mut lengths = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let (mut a, _b, to_b, _) = linked(link.clone(), seed);
        let source = a.register(8, Access::LOCAL);
        let batch = imms(to_b, &source, 10);
        let begun = a.clock.now();
        assert_eq!(a.post(&batch).accepted, 0);
        let over = a.endpoint.due();
        let length = over.since(begun);
        assert!(length > Duration::ZERO && length <= BURST.max(Duration::from_micros(1)), "{length:?}");
        lengths.insert(length);
        // An earlier post is not accepted.
        if length > Duration::from_micros(2) {
            a.clock.advance(length / 2);
            assert_eq!(a.post(&batch).accepted, 0);
            assert_eq!(a.endpoint.due(), over.max(a.clock.now().after(Duration::from_micros(1))));
        }
        a.clock.advance(length);
        assert_eq!(a.post(&batch).accepted, 10);
        assert_eq!(a.poll().len(), 1);
        assert_eq!(a.endpoint.due(), Time::NEVER);
    }
    assert!(lengths.len() > 10);
}

#[test]
fn a_refused_post_that_is_not_repeated_wakes_no_worker() {
    let link = LinkModel { burst_one_in: Some(1), burst: Duration::from_micros(9), ..LinkModel::default() };
    let (mut a, _b, to_b, _) = linked(link, 1);
    let source = a.register(8, Access::LOCAL);
    assert_eq!(a.post(&imms(to_b, &source, 1)).accepted, 0);
    assert_ne!(a.endpoint.due(), Time::NEVER);
    a.clock.advance(Duration::from_micros(20));
    assert!(a.poll().is_empty());
    assert_eq!(a.endpoint.due(), Time::NEVER);
}

#[test]
fn half_of_a_batch_is_accepted() {
    let (mut a, _b, to_b, _) = linked(LinkModel { half_one_in: Some(2), ..LinkModel::default() }, 3);
    let source = a.register(8, Access::LOCAL);
    let batch = imms(to_b, &source, 9);
    let taken: Vec<_> = (0..40)
        .map(|_| {
            let taken = a.post(&batch).accepted;
            a.poll();
            taken
        })
        .collect();
    assert!(taken.iter().all(|taken| [5, 9].contains(taken)), "{taken:?}");
    assert!(taken.contains(&5) && taken.contains(&9));
    assert!(
        (0..20).all(|_| a.post(&batch[..1]).accepted == 1 && a.poll().len() == 1),
        "one request cannot be halved"
    );
}

/// With a worker thread in real time: a device that refuses at random says when the worker should post again.
#[test]
fn a_worker_posts_again_after_a_burst() {
    use multirail_loopback::Loopback;
    use transport_core::{FabricBuilder, TransportConfig};
    let link = LinkModel {
        send_depth: Some(2),
        burst_one_in: Some(2),
        burst: Duration::from_millis(1),
        half_one_in: Some(2),
        accept_at_most: Some(1),
        ..LinkModel::default()
    };
    let open = || {
        let backend = Loopback::with(LoopbackConfig::default().link(link.clone()));
        FabricBuilder::new()
            .transport(TransportConfig::new("lo", std::sync::Arc::new(backend)))
            .open()
            .unwrap()
    };
    let (a, b) = (open(), open());
    let (to_b, to_a) = a.connect_local(&b).unwrap();
    let ops: Vec<_> = (0..50).map(|_| to_b.write_imm(1).unwrap()).collect();
    // The longer bursts are longer than a worker spins, so it sleeps in them.
    ops.into_iter().for_each(|mut op| assert_eq!(op.wait(limit::HANG).unwrap().bytes, 0));
    to_a.imm(1).expect(50).wait(TIME_LIMIT).unwrap();
}

#[test]
fn time_passes_only_by_the_clock() {
    let link = LinkModel {
        latency: Duration::from_micros(10),
        bits_per_s: Some(8_000_000_000),
        ..LinkModel::default()
    };
    let (mut a, b, to_b, _) = linked(link, 1);
    let (source, target) = (a.register(1000, Access::LOCAL), b.register(1000, BOTH));
    let import = a.import(to_b, &*target.region);
    source.fill(1);
    let request = write(1, to_b, &source, Some(&import));
    assert_eq!(a.post(&[request, WorkRequest { id: 2, ..request }]).accepted, 2);
    assert!(matches!(a.endpoint.arm(), Armed::Fd(_)));
    assert_eq!(a.endpoint.due(), Time::ZERO.after(Duration::from_micros(11)));
    a.clock.advance(Duration::from_micros(10));
    assert!(a.poll().is_empty() && target.byte(0) == 0);
    a.clock.advance(Duration::from_micros(1));
    assert_eq!(a.poll(), [done(1, 1)]);
    assert_eq!(target.byte(999), 1);
    a.clock.advance(Duration::from_micros(1));
    assert_eq!(a.poll(), [done(2, 1)]);
}

#[test]
fn small_requests_wait_for_the_device_and_large_ones_for_the_line() {
    // A byte takes 1 ns, and a request at least 1 µs.
    let link =
        LinkModel { bits_per_s: Some(8_000_000_000), ops_per_s: Some(1_000_000), ..LinkModel::default() };
    for (len, micros) in [(8, 1), (1000, 1), (4000, 4)] {
        let (mut a, b, to_b, _) = linked(link.clone(), 1);
        assert_eq!(a.domain.capabilities().requests_per_s, Some(1_000_000));
        let (source, target) = (a.register(len, Access::LOCAL), b.register(len, BOTH));
        let import = a.import(to_b, &*target.region);
        let request = write(0, to_b, &source, Some(&import));
        let batch: Vec<_> = (0..5).map(|id| WorkRequest { id, ..request }).collect();
        assert_eq!(a.post(&batch).accepted, 5);
        for id in 0..5 {
            a.clock.advance(Duration::from_nanos(micros * 1000 - 1));
            assert!(a.poll().is_empty(), "request {id} of {len} bytes is early");
            a.clock.advance(Duration::from_nanos(1));
            assert_eq!(a.poll(), [done(id, 1)]);
        }
    }
}

#[test]
fn depth_loss_and_abort() {
    let link = LinkModel {
        send_depth: Some(4),
        lose_device_after: Some(6),
        latency: Duration::from_micros(1),
        ..LinkModel::default()
    };
    let (mut a, _b, to_b, _) = linked(link, 1);
    let source = a.register(8, Access::LOCAL);
    let batch = imms(to_b, &source, 10);
    assert_eq!(a.post(&batch).accepted, 4);
    a.endpoint.abort(to_b);
    assert!(a.poll().iter().all(|event| failed(*event) == ErrorKind::Cancelled));
    for _ in 0..2 {
        assert_eq!(a.post(&batch).accepted, 4);
        a.clock.advance(Duration::from_micros(1));
        let events = a.poll();
        if total(&events) > 4 {
            assert_eq!([failed(events[1]), failed(events[2])], [ErrorKind::DeviceLost; 2]);
            assert!(matches!(events[3], Event::DeviceLost { .. }));
        }
    }
    assert_eq!(a.post(&batch).error.unwrap().kind, ErrorKind::DeviceLost);
    assert!(a.poll().is_empty());
}

#[test]
fn a_lost_device_touches_no_receive() {
    let (mut a, mut b, to_b, to_a) =
        linked(LinkModel { lose_device_after: Some(0), ..LinkModel::default() }, 1);
    let (source, target, message) =
        (a.register(8, Access::LOCAL), a.register(8, Access::LOCAL), b.register(8, Access::LOCAL));
    message.fill(1);
    a.recv(1, &target);
    let send = WorkRequest { kind: WorkKind::Send, ..write(2, to_a, &message, None) };
    assert_eq!(b.run(send), done(2, 1));
    // The message arrives before the loss. The poll that reports the loss must not take the message.
    assert_eq!(a.post(&imms(to_b, &source, 1)).accepted, 1);
    let events = a.poll();
    assert_eq!(failed(events[0]), ErrorKind::DeviceLost);
    assert!(matches!(events[1..], [Event::DeviceLost { .. }]), "{events:?}");
    assert_eq!(b.run(send), done(2, 1));
    assert!(a.poll().is_empty() && target.byte(0) == 0);
    let (local, lkey) = (target.buffer.as_ptr(), target.region.lkey());
    // SAFETY: the buffer outlives the endpoint.
    let posted = unsafe { a.endpoint.post_recv(&[ReceiveRequest { id: 3, local, lkey, len: 8 }]) };
    assert_eq!((posted.accepted, posted.error.unwrap().kind), (0, ErrorKind::DeviceLost));
    assert!(a.poll().is_empty() && target.byte(0) == 0);
}

#[test]
fn a_disconnect_fails_the_requests_under_way() {
    let (mut a, _b, to_b, _) =
        linked(LinkModel { latency: Duration::from_secs(1), ..LinkModel::default() }, 1);
    let source = a.register(8, Access::LOCAL);
    assert_eq!(a.post(&imms(to_b, &source, 2)).accepted, 2);
    a.domain.connector().disconnect(to_b);
    let events = a.poll();
    assert_eq!([failed(events[0]), failed(events[1])], [ErrorKind::PeerDied; 2]);
    assert_eq!(events[2], Event::PeerGone { peer: to_b });
}
