//! Staged requests within one process, through the SPI alone. Each test polls the two nodes itself.

mod common;

use std::task::Poll;

use common::*;
use limit::Limit;
use multirail_loopback::{LoopbackConfig, StagingPolicy};
use multirail_spi::{Access, ErrorKind, Memory, *};

/// More than a staging buffer holds.
const LEN: usize = 3 << 20;

fn staged() -> LoopbackConfig {
    LoopbackConfig::default().staging(StagingPolicy::Always)
}

/// Two connected nodes that stage everything.
fn pair() -> (TestNode, TestNode, PeerSlot, PeerSlot) {
    let (a, b) = (node(staged(), 1), node(staged(), 2));
    let (to_b, to_a) = connect(&a, &b);
    (a, b, to_b, to_a)
}

/// Polls both nodes until a has `count` events.
fn both(a: &mut TestNode, b: &mut TestNode, count: usize) -> (Vec<Event>, Vec<Event>) {
    let (mut ours, mut theirs, mut limit) = (Vec::new(), Vec::new(), Limit::of(TIME_LIMIT));
    while total(&ours) < count {
        theirs.extend(b.poll());
        ours.extend(a.poll());
        assert!(!limit.is_over(), "got only {ours:?}");
    }
    theirs.extend(b.poll());
    (ours, theirs)
}

/// Fills the buffer with bytes that differ by position and seed.
fn pattern(registered: &RegisteredBuffer, seed: usize) {
    for at in 0..LEN {
        // SAFETY: the buffer's own bytes, and nothing is under way.
        unsafe { registered.buffer.as_ptr().add(at).write(mark(at, seed)) };
    }
}

fn mark(at: usize, seed: usize) -> u8 {
    (at / 251 + at + seed) as u8
}

#[test]
fn whole_regions_are_written_and_read() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    assert_eq!(import.path(), "staged through shared memory");
    pattern(&source, 3);
    let all = WorkRequest { imm: Some(8), ..write(1, to_b, &source, Some(&import)) };
    let direct = a.domain.direct(to_b).unwrap();
    // SAFETY: source and import outlive the call.
    assert!(unsafe { direct.run(&WorkRequest { len: 8, ..all }, Some(&*import)) }.is_none());
    assert_eq!(a.post(&[all]).accepted, 1);
    assert!(a.poll().is_empty() && target.byte(0) == 0, "the target has not copied yet");
    // When b gets the imm, all bytes have arrived.
    let (mut arrived, mut limit) = (Vec::new(), Limit::of(TIME_LIMIT));
    while arrived.is_empty() {
        arrived = b.poll();
        if arrived.is_empty() {
            a.poll();
        } else {
            assert!((0..LEN).all(|at| target.byte(at) == mark(at, 3)));
        }
        assert!(!limit.is_over());
    }
    assert!(matches!(arrived[..], [Event::Imm { imm: 8, .. }]));
    pattern(&source, 0);
    let read = WorkRequest { kind: WorkKind::Read, id: 5, imm: None, ..all };
    assert_eq!(a.post(&[read]).accepted, 1);
    let (events, _) = both(&mut a, &mut b, 1);
    assert!(events.contains(&done(5, 1)), "{events:?}");
    assert!((0..LEN).all(|at| source.byte(at) == mark(at, 3)));
}

#[test]
fn each_page_completes_with_its_own_imm_or_failure() {
    let (mut a, mut b, to_b, to_a) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    pattern(&source, 1);
    let all = write(0, to_b, &source, Some(&import));
    let page = |n: u64| WorkRequest {
        id: n,
        local: source.buffer.as_ptr().wrapping_add((n * 4096) as usize),
        remote: (699 - n) * 4096,
        len: 4096,
        imm: Some(n as u32),
        ..all
    };
    let batch: Vec<_> = (0..700).map(page).collect();
    assert_eq!(a.post(&batch).accepted, 700);
    let over = WorkRequest { id: 900, remote: LEN as u64 - 7, len: 8, imm: Some(9), ..all };
    assert_eq!(failed(a.run(over)), ErrorKind::RemoteAccess, "not even staged");
    let (events, arrived) = both(&mut a, &mut b, 700);
    assert_eq!((total(&events), arrived.len()), (700, 700));
    let imms: Vec<_> = (0..700).map(|imm| Event::Imm { peer: to_a, imm }).collect();
    assert_eq!(arrived, imms);
    for n in 0..700 {
        assert!((0..4096).all(|at| target.byte((699 - n) * 4096 + at) == mark(n * 4096 + at, 1)), "page {n}");
    }
}

#[test]
fn no_byte_arrives_after_a_revoke() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    source.fill(5);
    assert_eq!(a.post(&[WorkRequest { imm: Some(1), ..write(1, to_b, &source, Some(&import)) }]).accepted, 1);
    for _ in 0..3 {
        b.poll();
        a.poll();
    }
    assert_eq!((target.byte(0), target.byte(LEN - 1)), (5, 0), "under way");
    assert!(matches!(target.region.revoke(), Poll::Ready(Ok(()))));
    target.fill(0);
    let (events, arrived) = both(&mut a, &mut b, 1);
    assert_eq!(failed(events[0]), ErrorKind::Revoked);
    assert!(arrived.is_empty() && (0..LEN).all(|at| target.byte(at) == 0));
    assert_eq!(failed(a.run(write(2, to_b, &source, Some(&import)))), ErrorKind::Revoked);
}

#[test]
fn no_byte_moves_after_an_abort_and_staging_continues() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    source.fill(5);
    for kind in [WorkKind::Write, WorkKind::Read] {
        let request = WorkRequest { kind, ..write(1, to_b, &source, Some(&import)) };
        assert_eq!(a.post(&[request, WorkRequest { id: 2, ..request }]).accepted, 2);
        for _ in 0..3 {
            b.poll();
            a.poll();
        }
        a.endpoint.abort(to_b);
        assert_eq!(a.wait(2).into_iter().map(failed).collect::<Vec<_>>(), [ErrorKind::Cancelled; 2]);
        target.fill(1);
        source.fill(2);
        for _ in 0..100 {
            b.poll();
            a.poll();
        }
        assert!((0..LEN).all(|at| (source.byte(at), target.byte(at)) == (2, 1)));
    }
    assert_eq!(a.post(&[write(3, to_b, &source, Some(&import))]).accepted, 1);
    assert_eq!(both(&mut a, &mut b, 1).0, [done(3, 1)]);
    assert!((0..LEN).all(|at| target.byte(at) == 2));
}

#[test]
fn a_new_endpoint_continues_where_the_last_one_stopped() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    for round in 0..5 {
        source.fill(round + 1);
        a.post(&[write(1, to_b, &source, Some(&import))]);
        b.poll();
        let TestNode { domain, endpoint, clock } = a;
        drop(endpoint);
        a = TestNode { endpoint: domain.endpoint(EndpointConfig::default()).unwrap(), domain, clock };
        source.fill(round + 100);
        assert_eq!(a.post(&[write(2, to_b, &source, Some(&import))]).accepted, 1);
        assert_eq!(both(&mut a, &mut b, 1).0, [done(2, 1)]);
        assert!((0..LEN).all(|at| target.byte(at) == round + 100));
        let TestNode { domain, endpoint, clock } = b;
        drop(endpoint);
        b = TestNode { endpoint: domain.endpoint(EndpointConfig::default()).unwrap(), domain, clock };
    }
}

#[test]
fn a_peer_that_leaves_fails_staged_requests() {
    let (mut a, b, to_b, to_a) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    let request = write(1, to_b, &source, Some(&import));
    assert_eq!(a.post(&[request, WorkRequest { id: 2, ..request }]).accepted, 2);
    b.domain.connector().disconnect(to_a);
    assert_eq!(a.wait(2).into_iter().map(failed).collect::<Vec<_>>(), [ErrorKind::PeerDied; 2]);
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    assert_eq!(a.post(&[write(1, to_b, &source, Some(&import))]).accepted, 1);
    a.domain.connector().disconnect(to_b);
    let events = a.wait(2);
    assert_eq!(failed(events[0]), ErrorKind::PeerDied);
    assert_eq!(events[1], Event::PeerGone { peer: to_b });
    target.fill(3);
    (0..100).for_each(|_| drop(b.poll()));
    assert!((0..LEN).all(|at| target.byte(at) == 3), "written after PeerGone");
}

#[test]
fn slots_and_requests_are_bounded() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(LEN, Access::LOCAL), b.register(LEN, BOTH));
    let import = a.import(to_b, &*target.region);
    let depth = a.domain.capabilities().send_depth as usize;
    let small = |n: usize| WorkRequest { id: n as u64, len: 8, ..write(0, to_b, &source, Some(&import)) };
    let batch: Vec<_> = (0..depth + 5).map(small).collect();
    assert_eq!(a.post(&batch), PostResult { accepted: depth, error: None });
    assert_eq!(a.post(&batch[..1]).accepted, 0, "none has ended");
    let (events, _) = both(&mut a, &mut b, depth);
    assert_eq!(total(&events), depth);
    assert_eq!(a.post(&batch[..1]).accepted, 1);
}

#[test]
fn both_sides_must_allow_it() {
    let (a, b) = (node(staged(), 1), node(LoopbackConfig::default().staging(StagingPolicy::Never), 2));
    let (to_b, to_a) = connect(&a, &b);
    let (ours, theirs) = (a.register(64, BOTH), b.register(64, BOTH));
    let refused = a.try_import(to_b, theirs.region.key()).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Permission);
    assert!(refused.context().contains("MULTIRAIL_LOOPBACK_STAGING=1"), "{refused}");
    assert_eq!(b.import(to_a, &*ours.region).path(), "mapped memory");
}
