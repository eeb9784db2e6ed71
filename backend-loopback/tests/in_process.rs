//! Two domains of one process, through the SPI alone.

mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Instant;

use common::*;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{Access, ErrorKind, Locality, Memory, RemoteKey, copy, *};

#[test]
fn writes_reads_and_imms() {
    let (mut a, mut b, to_b, to_a) = pair();
    let (source, target) = (a.register(100_000, Access::LOCAL), b.register(200_000, BOTH));
    let import = a.import(to_b, &*target.region);
    source.fill(7);
    let request = write(1, to_b, &source, Some(&import));
    assert_eq!(a.run(WorkRequest { remote: import.base() + 50, imm: Some(u32::MAX), ..request }), done(1, 1));
    assert_eq!(b.poll(), [Event::Imm { peer: to_a, imm: u32::MAX }]);
    assert_eq!([target.byte(49), target.byte(50), target.byte(100_049), target.byte(100_050)], [0, 7, 7, 0]);
    target.fill(9);
    assert_eq!(a.run(WorkRequest { kind: WorkKind::Read, id: 2, ..request }), done(2, 1));
    assert_eq!(source.byte(99_999), 9);
    let empty = WorkRequest { id: 3, len: 0, rkey: 0, imm: Some(0), ..request };
    assert_eq!(a.run(empty), done(3, 1));
    assert_eq!(b.poll(), [Event::Imm { peer: to_a, imm: 0 }]);
}

#[test]
fn every_bound_and_right_is_checked() {
    let (mut a, b, to_b, _) = pair();
    let (source, target) = (a.register(64, Access::LOCAL), b.register(64, Access::REMOTE_WRITE));
    let import = a.import(to_b, &*target.region);
    let request = write(1, to_b, &source, Some(&import));
    let bad = [
        WorkRequest { remote: 1, ..request },
        WorkRequest { remote: u64::MAX - 10, ..request },
        WorkRequest { len: u64::MAX, remote: 2, ..request },
        WorkRequest { kind: WorkKind::Read, ..request },
        WorkRequest { rkey: request.rkey + 1, ..request },
        WorkRequest { rkey: request.rkey ^ (1 << 32), ..request },
        WorkRequest { rkey: u64::MAX, ..request },
    ];
    for request in bad {
        assert_eq!(failed(a.run(request)), ErrorKind::RemoteAccess, "{request:?}");
    }
    assert_eq!(failed(a.run(WorkRequest { peer: PeerSlot(77), ..request })), ErrorKind::PeerDied);
    drop(import);
    assert_eq!(failed(a.run(request)), ErrorKind::RemoteAccess);
    let (key, local) = (target.region.key(), b.register(64, Access::LOCAL));
    for bad in [
        local.region.key(),
        RemoteKey { key: key.key + 1, ..key },
        RemoteKey { key: key.key + (1 << 32), ..key },
        RemoteKey { key: u64::MAX, ..key },
        RemoteKey { len: 65, ..key },
        RemoteKey { base: 1, ..key },
    ] {
        assert_eq!(a.try_import(to_b, bad).err().unwrap().kind(), ErrorKind::RemoteAccess);
    }
}

#[test]
fn a_revoked_key_is_never_used_for_another_region() {
    let (mut a, b, to_b, _) = pair();
    let (source, target) = (a.register(64, Access::LOCAL), b.register(64, BOTH));
    let (key, import) = (target.region.key(), a.import(to_b, &*target.region));
    assert!(matches!(target.region.revoke(), Poll::Ready(Ok(()))));
    assert_eq!(failed(a.run(write(1, to_b, &source, Some(&import)))), ErrorKind::Revoked);
    assert_eq!(a.try_import(to_b, key).err().unwrap().kind(), ErrorKind::Revoked);
    drop(target);
    let next = b.register(64, BOTH);
    assert_ne!(next.region.key().key, key.key);
    source.fill(1);
    assert_eq!(failed(a.run(write(2, to_b, &source, Some(&import)))), ErrorKind::Revoked);
    let direct = a.domain.direct(to_b).unwrap();
    // SAFETY: source and import outlive the call.
    let refused = unsafe { direct.run(&write(3, to_b, &source, Some(&import)), Some(&*import)) };
    assert_eq!(refused.unwrap().unwrap_err().kind(), ErrorKind::Revoked);
    assert_eq!(next.byte(0), 0);
}

#[test]
fn no_byte_arrives_after_a_revoke() {
    let (mut a, b, to_b, _) = pair();
    let stop = AtomicBool::new(false);
    for round in 0..50 {
        let (source, target) = (a.register(16 << 10, Access::LOCAL), b.register(16 << 10, BOTH));
        source.fill(1);
        let import = a.import(to_b, &*target.region);
        stop.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let (a, source, import, stop) = (&mut a, &source, &import, &stop);
            scope.spawn(move || {
                let batch: Vec<_> = (0..8).map(|id| write(id, to_b, source, Some(import))).collect();
                while !stop.load(Ordering::Relaxed) {
                    a.post(&batch);
                    a.poll();
                }
            });
            while target.byte(0) == 0 {
                std::thread::yield_now();
            }
            if round % 2 == 0 {
                while target.region.revoke().is_pending() {
                    std::thread::yield_now();
                }
                target.fill(2);
                std::thread::sleep(std::time::Duration::from_micros(200));
                assert!((0..16 << 10).all(|at| target.byte(at) == 2));
            } else {
                // Dropped while the peer writes: the memory must stay allocated until the writer has left.
                drop(target);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn messages_wait_for_receives_and_must_fit() {
    let (mut a, mut b, to_b, to_a) = pair();
    let (source, small, large) =
        (a.register(65536, BOTH), b.register(100, Access::LOCAL), b.register(65536, Access::LOCAL));
    source.fill(5);
    let message = WorkRequest { kind: WorkKind::Send, imm: Some(3), ..write(1, to_b, &source, None) };
    assert_eq!(a.run(message), done(1, 1));
    assert_eq!(a.run(message), done(1, 1));
    assert!(b.poll().is_empty());
    b.recv(10, &small);
    b.recv(11, &large);
    let events = b.wait(2);
    assert_eq!((failed(events[0]), small.byte(0)), (ErrorKind::TooLarge, 0));
    assert_eq!(events[1], Event::Received { id: 11, peer: to_a, len: 65536, imm: Some(3) });
    assert_eq!(large.byte(65535), 5);
    b.recv(12, &small);
    b.endpoint.cancel_recv(12);
    assert_eq!(failed(b.wait(1)[0]), ErrorKind::Cancelled);
    let batch: Vec<_> = (0..100).map(|id| WorkRequest { id, ..message }).collect();
    assert_eq!(a.post(&batch).accepted, 32);
    let direct = a.domain.direct(to_b).unwrap();
    // SAFETY: the source outlives the call.
    assert!(unsafe { direct.run(&message, None) }.is_none());
    // SAFETY: as above.
    let too_large = unsafe { direct.run(&WorkRequest { len: 65537, ..message }, None) };
    assert_eq!(too_large.unwrap().unwrap_err().kind(), ErrorKind::TooLarge);
    b.recv(13, &large);
    b.wait(1);
    // SAFETY: as above.
    assert!(unsafe { direct.run(&message, None) }.unwrap().is_ok());
}

#[test]
fn full_queues_accept_no_more() {
    let (mut a, mut b, to_b, _) = pair();
    let (source, target) = (a.register(8, Access::LOCAL), b.register(8, BOTH));
    let import = a.import(to_b, &*target.region);
    let request = write(0, to_b, &source, Some(&import));
    let batch: Vec<_> = (0..20_000).map(|id| WorkRequest { id, ..request }).collect();
    assert_eq!(a.post(&batch).accepted, 16384);
    assert_eq!(a.post(&batch).accepted, 0);
    assert_eq!(total(&a.poll()), 16384);
    let batch: Vec<_> = batch.iter().map(|request| WorkRequest { imm: Some(1), ..*request }).collect();
    assert_eq!(a.post(&batch).accepted, 1024);
    assert_eq!(total(&a.poll()), 1024);
    assert_eq!(a.post(&batch), PostResult { accepted: 0, error: None });
    assert_eq!(b.poll().len(), 1024);
    assert_eq!(a.post(&batch).accepted, 1024);
}

#[test]
fn a_domain_reaches_itself() {
    let mut a = node(LoopbackConfig::default(), 1);
    let (slot, offer) = a.domain.connector().prepare().unwrap();
    a.domain.connector().complete(slot, &offer).unwrap();
    assert_eq!(a.domain.connector().complete(slot, &offer).unwrap_err().kind(), ErrorKind::Busy);
    let (source, target) = (a.register(8, Access::LOCAL), a.register(8, BOTH));
    let import = a.import(slot, &*target.region);
    source.fill(4);
    assert_eq!(a.post(&[WorkRequest { imm: Some(1), ..write(1, slot, &source, Some(&import)) }]).accepted, 1);
    assert_eq!(a.wait(2), [done(1, 1), Event::Imm { peer: slot, imm: 1 }]);
    assert_eq!(target.byte(7), 4);
    let (other, _) = a.domain.connector().prepare().unwrap();
    assert_eq!(a.domain.connector().complete(other, &offer).unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(a.domain.connector().complete(other, b"junk").unwrap_err().kind(), ErrorKind::Protocol);
    assert_eq!(a.domain.connector().complete(PeerSlot(9), &offer).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn the_slot_of_a_gone_peer_is_used_again() {
    let (mut a, mut b, to_b, to_a) = pair();
    let (source, target) = (a.register(8, Access::LOCAL), b.register(8, BOTH));
    let import = a.import(to_b, &*target.region);
    let request = write(1, to_b, &source, Some(&import));
    let direct = a.domain.direct(to_b).unwrap();
    assert_eq!(a.post(&[request, WorkRequest { imm: Some(6), ..request }]).accepted, 2);
    a.domain.connector().disconnect(to_b);
    assert!(a.domain.direct(to_b).is_none());
    assert_ne!(a.domain.connector().prepare().unwrap().0, to_b);
    let done = done(1, 1);
    assert_eq!(a.wait(3), [done, done, Event::PeerGone { peer: to_b }]);
    // Until the engine polls again, it may not have handled the event, and could take it for the end of the slot's
    // next peer.
    assert_ne!(a.domain.connector().prepare().unwrap().0, to_b);
    assert_eq!(a.endpoint.arm(), Armed::Ready);
    assert_eq!(failed(a.run(request)), ErrorKind::PeerDied);
    // SAFETY: source and import outlive the call.
    let refused = unsafe { direct.run(&request, Some(&*import)) };
    assert_eq!(refused.unwrap().unwrap_err().kind(), ErrorKind::PeerDied);
    assert_eq!(a.domain.connector().prepare().unwrap().0, to_b);
    // The other side learns of it when it posts. Imms that were sent before still arrive.
    assert_eq!(b.poll(), [Event::Imm { peer: to_a, imm: 6 }]);
    let back = WorkRequest { len: 0, imm: Some(1), ..write(2, to_a, &target, None) };
    assert_eq!(failed(b.run(back)), ErrorKind::PeerDied);
}

#[test]
fn a_closed_domain_is_a_dead_peer() {
    let (mut a, b, to_b, _) = pair();
    let source = a.register(8, Access::LOCAL);
    let target = b.register(8, BOTH);
    let import = a.import(to_b, &*target.region);
    drop(target);
    drop(b);
    assert_eq!(failed(a.run(write(1, to_b, &source, Some(&import)))), ErrorKind::PeerDied);
}

#[test]
fn an_armed_endpoint_is_woken() {
    let (mut a, mut b, to_b, to_a) = pair();
    let source = a.register(8, Access::LOCAL);
    b.poll();
    let Armed::Fd(fd) = b.endpoint.arm() else { panic!("there is no event yet") };
    let readable = || is_readable(fd);
    assert!(!readable());
    let imm = WorkRequest { len: 0, imm: Some(1), ..write(1, to_b, &source, None) };
    a.run(imm);
    assert!(readable());
    assert_eq!(b.poll(), [Event::Imm { peer: to_a, imm: 1 }]);
    assert!(!readable());
    a.run(imm);
    assert_eq!(b.endpoint.arm(), Armed::Ready);
    assert!(!readable());
    assert_eq!(b.poll().len(), 1);
}

#[test]
fn a_blocked_sender_is_woken_when_there_is_room() {
    let (mut a, mut b, to_b, _) = pair();
    // Too long to lie in their entries: so many payloads are there.
    let (source, target) = (a.register(64, Access::LOCAL), b.register(64, Access::LOCAL));
    let message = WorkRequest { kind: WorkKind::Send, len: 64, ..write(1, to_b, &source, None) };
    let batch: Vec<_> = (0..33).map(|id| WorkRequest { id, ..message }).collect();
    assert_eq!(a.post(&batch).accepted, 32);
    a.wait(1);
    assert!(b.poll().is_empty());
    let Armed::Fd(fd) = a.endpoint.arm() else {
        panic!("the message ring is full and there is no other event")
    };
    assert!(b.poll().is_empty() && !is_readable(fd), "there is no room yet");
    b.recv(1, &target);
    assert_eq!(b.wait(1).len(), 1);
    assert!(is_readable(fd));
    assert_eq!(a.post(&batch[32..]).accepted, 1);
}

/// The endpoint looks at the rings of silent peers no more, and is told when one of them writes again.
#[test]
fn silent_peers_are_heard_again() {
    const PEERS: u64 = 40;
    /// The endpoint leaves a peer that was silent for this many polls.
    const SILENCE: u32 = 3000;
    let mut target = node(LoopbackConfig::default(), 1);
    let landing = target.register(64, BOTH);
    let mut peers: Vec<_> = (0..PEERS)
        .map(|seed| {
            let peer = node(LoopbackConfig::default(), 2 + seed);
            let (to_target, to_peer) = connect(&peer, &target);
            (peer, to_target, to_peer)
        })
        .collect();
    for round in 0..3 {
        (0..SILENCE).for_each(|_| assert!(target.poll().is_empty()));
        // Some write to an endpoint that is awake, some to one that sleeps.
        let sleeps = round != 1;
        if sleeps {
            let Armed::Fd(fd) = target.endpoint.arm() else { panic!("there is no event yet") };
            assert!(!is_readable(fd));
            let (peer, to_target, to_peer) = &mut peers[usize::from(round == 2) * 30];
            let source = peer.register(8, Access::LOCAL);
            let imm = WorkRequest { len: 0, imm: Some(9), ..write(1, *to_target, &source, None) };
            peer.run(imm);
            assert!(is_readable(fd));
            assert_eq!(target.poll(), [Event::Imm { peer: *to_peer, imm: 9 }]);
        }
        for (number, (peer, to_target, to_peer)) in peers.iter_mut().enumerate().rev() {
            let source = peer.register(64, Access::LOCAL);
            let number = number as u32;
            peer.run(WorkRequest { len: 0, imm: Some(number), ..write(1, *to_target, &source, None) });
            assert_eq!(target.poll(), [Event::Imm { peer: *to_peer, imm: number }]);
            let message = WorkRequest { kind: WorkKind::Send, ..write(2, *to_target, &source, None) };
            peer.run(WorkRequest { len: u64::from(number), ..message });
            target.recv(7, &landing);
            let received = Event::Received { id: 7, peer: *to_peer, len: number.into(), imm: None };
            assert_eq!(target.poll(), [received]);
        }
    }
    // A message that waits keeps its peer in sight.
    let (peer, to_target, to_peer) = &mut peers[20];
    let source = peer.register(64, Access::LOCAL);
    peer.run(WorkRequest { kind: WorkKind::Send, len: 5, ..write(2, *to_target, &source, None) });
    (0..SILENCE).for_each(|_| assert!(target.poll().is_empty()));
    target.recv(8, &landing);
    assert_eq!(target.poll(), [Event::Received { id: 8, peer: *to_peer, len: 5, imm: None }]);
    // A silent peer that leaves is gone.
    (0..SILENCE).for_each(|_| assert!(target.poll().is_empty()));
    target.domain.connector().disconnect(peers[3].2);
    assert_eq!(target.wait(1), [Event::PeerGone { peer: peers[3].2 }]);
}

/// Returns true if a thread that sleeps on `fd` would wake.
fn is_readable(fd: std::os::fd::RawFd) -> bool {
    // SAFETY: the endpoint that gave it keeps its descriptor open.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&at_once)).unwrap() == 1
}

#[test]
fn one_endpoint_at_a_time() {
    let TestNode { domain, endpoint, .. } = node(LoopbackConfig::default(), 1);
    let again = || domain.endpoint(EndpointConfig::default());
    assert_eq!(again().err().unwrap().kind(), ErrorKind::Busy);
    drop(endpoint);
    assert!(again().is_ok());
}

/// Two domains of one process belong to two tenants: a peer of one domain cannot reach the memory of the other, with
/// any key.
#[test]
fn keys_mean_nothing_in_another_domain() {
    let [a, b] = [1, 2].map(|seed| node(LoopbackConfig::default(), seed));
    let mut peer = node(LoopbackConfig::default(), 3);
    let (to_a, _) = connect(&peer, &a);
    let theirs: Vec<_> = (0..3).map(|_| b.register(4096, BOTH)).collect();
    let source = peer.register(4096, BOTH);
    source.fill(7);
    // While `a` has no region, it knows no key of `b`.
    for registered in &theirs {
        let error = peer.try_import(to_a, registered.region.key()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::RemoteAccess, "{error}");
    }
    // If `a` has a region with the same key, the key means that region.
    let own = a.register(4096, BOTH);
    assert_eq!(own.region.key().key, theirs[0].region.key().key);
    for number in 0..1 << 12 {
        let key = RemoteKey { key: theirs[0].region.key().key ^ number, ..own.region.key() };
        if let Ok(import) = peer.try_import(to_a, key) {
            assert_eq!(peer.run(write(number, to_a, &source, Some(&import))), done(number, 1));
        }
    }
    assert_eq!(own.byte(0), 7);
    assert!(theirs.iter().all(|registered| (0..4096).all(|at| registered.byte(at) == 0)));
}

/// The nanoseconds of one call of `run`: the best of several tries, because other programs use the machine too.
fn nanoseconds_per_call(calls: usize, mut run: impl FnMut()) -> f64 {
    let mut one = || {
        let start = Instant::now();
        (0..calls).for_each(|_| run());
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..7).map(|_| one()).fold(f64::MAX, f64::min)
}

/// The time that loopback adds to its copies. Run it alone and optimised:
/// `cargo test --release -p multirail-loopback --test in_process -- --ignored --nocapture overhead`
#[test]
#[ignore = "a measurement"]
fn overhead_beyond_the_copy() {
    const ROUNDS: usize = 200_000;
    let (mut a, b, to_b, _) = pair();
    let (source, target) = (a.register(4096, Access::LOCAL), b.register(4096, BOTH));
    let import = a.import(to_b, &*target.region);
    let direct = a.domain.direct(to_b).unwrap();
    for len in [8, 4096] {
        let request = WorkRequest { len, ..write(1, to_b, &source, Some(&import)) };
        let (to, from) = (target.buffer.as_ptr(), source.buffer.as_ptr());
        let copied = nanoseconds_per_call(ROUNDS, || {
            let strategy = copy::strategy(black_box(len), Locality::Auto);
            // SAFETY: both buffers hold a page.
            unsafe { copy::copy(strategy, black_box(to), black_box(from), len as usize) };
            copy::finish(strategy);
        });
        let directly = nanoseconds_per_call(ROUNDS, || {
            // SAFETY: buffers and import outlive the call.
            unsafe { direct.run(black_box(&request), Some(&*import)) }.unwrap().unwrap();
        });
        let batch: Vec<_> = (0..256).map(|id| WorkRequest { id, ..request }).collect();
        let mut events = Completions::with_room(256);
        let batched = nanoseconds_per_call(ROUNDS / 256, || {
            assert_eq!(a.post(black_box(&batch)).accepted, 256);
            events.clear();
            a.endpoint.poll(&mut events);
            assert_eq!(events.as_slice(), [done(0, 256)]);
        }) / 256.0;
        println!(
            "{len} B: copy {copied:.1} ns; direct +{:.1} ns; batch of 256 +{:.1} ns per request, polled",
            directly - copied,
            batched - copied
        );
    }
}
