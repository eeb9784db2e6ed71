//! Two processes of one host: this test, and the same executable as its peer.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod process;
#[path = "../common/stranger.rs"]
mod stranger;

use std::io::Write;
use std::time::{Duration, Instant};

use common::*;
use limit::Limit;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{Access, ErrorKind, Memory, *};
use process::{CHILD, ChildPeer, hex, parse_key, private, unhex};
use stranger::{Stranger, socket_of};

const LEN: usize = 6 << 20;
const PAGE: u64 = 4096;

/// The peer: runs the commands that it reads, and answers with lines that begin with `@`.
#[test]
#[ignore = "the other process of the tests below"]
fn peer() {
    let Ok(role) = std::env::var(CHILD) else { return };
    if let Some(place) = role.strip_prefix("exec ") {
        return next_program(place.parse().unwrap());
    }
    let mut lines = std::io::stdin().lines();
    let mut line = || lines.next().unwrap().unwrap();
    let say = |text: String| {
        println!("\n@{text}");
        std::io::stdout().flush().unwrap();
    };
    let mut b = node(LoopbackConfig::default(), 2);
    let (slot, offer) = b.domain.connector().prepare().unwrap();
    say(hex(&offer));
    b.domain.connector().complete(slot, &unhex(&line())).unwrap();
    let (shared, foreign) = (b.register(LEN, BOTH), private(LEN));
    // SAFETY: nobody refers to the bytes.
    let foreign_region = unsafe { b.domain.register(foreign.clone(), BOTH) }.unwrap();
    let (k, f) = (shared.region.key(), foreign_region.key());
    say(format!("{} {} {} {}", k.key, k.len, f.key, f.len));
    let inbox = b.register(65536, Access::LOCAL);
    let mut import = None;
    loop {
        let command = line();
        let words: Vec<&str> = command.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().filter_map(|word| word.parse().ok()).collect();
        match words[0] {
            "bytes" => {
                let at = numbers[0] as usize;
                // SAFETY: in bounds, volatile.
                let private = unsafe { foreign.as_ptr().add(at).read_volatile() };
                say(format!("{} {private}", shared.byte(at)));
            }
            "events" => {
                b.recv(1, &inbox);
                let events = b.wait(numbers[0] as usize);
                say(format!("{events:?} {}", inbox.byte(0)));
            }
            // Becomes another program, which maps memory of its own at the region's address.
            "exec" => {
                use std::os::unix::process::CommandExt;
                let place = format!("exec {}", foreign.as_ptr() as usize);
                let error = ChildPeer::command(&place).exec();
                panic!("{error}");
            }
            "revoke" => {
                let quiet =
                    [foreign_region.revoke(), shared.region.revoke()].iter().all(|poll| poll.is_ready());
                say(format!("{quiet}"));
            }
            "import" => {
                import = Some(b.try_import(slot, parse_key(&numbers)).unwrap());
                say("imported".into());
            }
            // Writes to the parent without end, until the parent kills this process.
            "hammer" => loop {
                shared.fill(0xaa);
                let request = write(1, slot, &shared, import.as_ref());
                b.post(&[request]);
                b.poll();
            },
            _ => return,
        }
    }
}

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn processes_reach_each_other_and_leave_nothing_behind() {
    let (files, threads) = (count("fd"), count("task"));
    moves_bytes();
    a_killed_writer_keeps_no_region_busy();
    importers_wait_for_a_stopped_peer_in_parallel();
    unauthenticated_connections_are_dropped();
    a_peer_that_became_another_program_is_gone();
    warm_memory_takes_no_page_fault();
    // The kernel lists a joined thread for a moment longer.
    let mut limit = Limit::of(TIME_LIMIT);
    while count("task") > threads && !limit.is_over() {
        std::thread::yield_now();
    }
    assert_eq!((count("fd"), count("task")), (files, threads));
}

fn moves_bytes() {
    let mut a = node(LoopbackConfig::default(), 1);
    let mut peer = ChildPeer::start(&a);
    let slot = peer.slot;
    let source = a.register(LEN, Access::LOCAL);
    let regions = [(peer.shared, false), (peer.foreign, true)];
    // On the portable path the peer copies foreign bytes, and this peer does not run turns for that.
    let reached = if is_portable() { &regions[..1] } else { &regions[..] };
    for &(key, other) in reached {
        let import = a.try_import(slot, key).unwrap();
        source.fill(if other { 9 } else { 8 });
        // More pages than one system call takes. The last one has an imm.
        let all = write(0, slot, &source, Some(&import));
        let page = |n: u64| WorkRequest {
            id: n,
            local: source.buffer.as_ptr().wrapping_add((n * PAGE) as usize),
            remote: n * PAGE,
            len: PAGE,
            imm: (n == 1499).then_some(77),
            ..all
        };
        let batch: Vec<_> = (0..1500).map(page).collect();
        assert_eq!(a.post(&batch).accepted, 1500);
        assert_eq!(a.wait(1500), [done(0, 1500)]);
        assert!(peer.ask("events 1").contains("imm: 77"));
        source.fill(0);
        assert_eq!(a.run(WorkRequest { kind: WorkKind::Read, len: 5000, ..all }), done(0, 1));
        assert_eq!((source.byte(4999), source.byte(5000)), (if other { 9 } else { 8 }, 0));
        let direct = a.domain.direct(slot).unwrap();
        source.fill(3);
        let small = WorkRequest { remote: LEN as u64 - 4, len: 4, imm: Some(5), ..all };
        // SAFETY: source and import outlive the call.
        unsafe { direct.run(&small, Some(&*import)) }.unwrap().unwrap();
        let over = WorkRequest { remote: LEN as u64 - 3, ..small };
        // SAFETY: as above.
        let refused = unsafe { direct.run(&over, Some(&*import)) };
        assert_eq!(refused.unwrap().unwrap_err().kind(), ErrorKind::RemoteAccess);
        assert!(peer.ask("events 1").contains("imm: 5"));
    }
    let mut bytes = |n: usize| {
        let both = peer.ask(&format!("bytes {n}"));
        both.split(' ').take(reached.len()).collect::<Vec<_>>().join(" ")
    };
    let expected = |both: &str| both[..2 * reached.len() - 1].to_owned();
    assert_eq!(bytes(0), expected("8 9"));
    assert_eq!(bytes(1500 * 4096 - 1), expected("8 9"));
    assert_eq!(bytes(1500 * 4096), expected("0 0"));
    assert_eq!(bytes(LEN - 1), expected("3 3"));
    let message = WorkRequest { kind: WorkKind::Send, len: 65536, ..write(7, slot, &source, None) };
    assert_eq!(a.run(message), done(7, 1));
    assert!(peer.ask("events 1").ends_with("len: 65536, imm: None }] 3"));
    let bad = RemoteKey { key: peer.shared.key + (7 << 32), ..peer.shared };
    assert_eq!(a.try_import(slot, bad).err().unwrap().kind(), ErrorKind::RemoteAccess);
    let imports = [peer.shared, peer.foreign].map(|key| a.try_import(slot, key).unwrap());
    assert_eq!(peer.ask("revoke"), "true");
    for import in &imports {
        assert_eq!(failed(a.run(write(1, slot, &source, Some(import)))), ErrorKind::Revoked);
    }
    assert_eq!(a.try_import(slot, peer.shared).err().unwrap().kind(), ErrorKind::Revoked);
    // This side notices at once that a peer has closed in order.
    let _ = writeln!(peer.input, "exit");
    peer.child.wait().unwrap();
    assert_eq!(failed(a.run(WorkRequest { len: 8, ..message })), ErrorKind::PeerDied);
}

/// The program that the peer becomes: maps memory at `place`, and says how many of its bytes were written.
fn next_program(place: usize) {
    use rustix::mm::{MapFlags, ProtFlags};
    let place = std::ptr::with_exposed_provenance_mut(place);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: the flag replaces nothing that is mapped.
    let own = unsafe { rustix::mm::mmap_anonymous(place, LEN, ProtFlags::READ | ProtFlags::WRITE, flags) };
    assert_eq!(own.unwrap(), place);
    println!("\n@executed");
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "written");
        // SAFETY: in bounds of the mapping made above; volatile, as others may write.
        let byte = |at: &usize| unsafe { place.cast::<u8>().add(*at).read_volatile() };
        println!("\n@{}", (0..LEN).filter(|at| byte(at) != 0).count());
    }
}

/// Runs a request that must fail. Returns the kind of the error.
type Failing = fn(&mut TestNode, &ChildPeer, WorkRequest, &dyn RemoteMemory) -> ErrorKind;

fn a_peer_that_became_another_program_is_gone() {
    if is_portable() {
        return println!("skipped: the portable path makes no calls on memory of other processes");
    }
    let kinds: [Failing; 3] = [
        |a, _, request, _| failed(a.run(request)),
        |a, _, request, _| failed(a.run(WorkRequest { kind: WorkKind::Read, ..request })),
        |a, peer, request, import| {
            let direct = a.domain.direct(peer.slot).unwrap();
            // SAFETY: source and import outlive the call.
            let outcome = unsafe { direct.run(&WorkRequest { len: 4096, ..request }, Some(import)) };
            outcome.unwrap().unwrap_err().kind()
        },
    ];
    for run in kinds {
        let mut a = node(LoopbackConfig::default(), 1);
        let mut peer = ChildPeer::start(&a);
        let source = a.register(LEN, Access::LOCAL);
        let import = a.try_import(peer.slot, peer.foreign).unwrap();
        source.fill(7);
        let request = write(1, peer.slot, &source, Some(&import));
        assert_eq!(a.run(request), done(1, 1));
        assert_eq!(peer.ask(&format!("bytes {}", LEN - 1)), "0 7");
        // The pid stays the same, but the memory belongs to another program.
        assert_eq!(peer.ask("exec"), "executed");
        let kind = run(&mut a, &peer, request, &*import);
        assert_eq!((kind, peer.ask("written").as_str()), (ErrorKind::PeerDied, "0"));
        assert_eq!((source.byte(0), source.byte(LEN - 1)), (7, 7), "bytes of another program were read");
    }
}

#[test]
#[ignore = "a measurement"]
fn foreign_pages() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    let mut a = node(LoopbackConfig::default(), 1);
    let peer = ChildPeer::start(&a);
    let source = a.register(LEN, Access::LOCAL);
    source.fill(1);
    for (name, key) in [("shared", peer.shared), ("foreign", peer.foreign)] {
        let import = a.try_import(peer.slot, key).unwrap();
        let page = |n: u64| WorkRequest {
            local: source.buffer.as_ptr().wrapping_add((n * PAGE) as usize),
            remote: n * PAGE,
            len: PAGE,
            ..write(n, peer.slot, &source, Some(&import))
        };
        let batch: Vec<_> = (0..1024).map(page).collect();
        let mut best = f64::MAX;
        for _ in 0..200 {
            let start = Instant::now();
            assert_eq!(a.post(&batch).accepted, 1024);
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / 1024.0);
            a.poll();
        }
        println!("{name}: {best:.3} us per 4 KiB page, 1024 pages a post");
    }
}

fn a_killed_writer_keeps_no_region_busy() {
    let mut pending = 0;
    for _ in 0..4 {
        let mut a = node(LoopbackConfig::default(), 1);
        let mut peer = ChildPeer::start(&a);
        let target = a.register(LEN, BOTH);
        let key = target.region.key();
        assert_eq!(peer.ask(&format!("import {} {}", key.key, key.len)), "imported");
        writeln!(peer.input, "hammer").unwrap();
        while target.byte(LEN - 1) == 0 {
            std::hint::spin_loop();
        }
        let import = a.try_import(peer.slot, peer.foreign).unwrap();
        peer.child.kill().unwrap();
        let mut limit = Limit::of(TIME_LIMIT);
        while target.region.revoke().is_pending() {
            pending += 1;
            assert!(!limit.is_over(), "a dead writer keeps the region busy");
        }
        peer.child.wait().unwrap();
        // Requests to foreign memory fail at once, requests through shared memory once the server has noticed the
        // death.
        let source = a.register(64, Access::LOCAL);
        assert_eq!(failed(a.run(write(1, peer.slot, &source, Some(&import)))), ErrorKind::PeerDied);
        let imm = WorkRequest { len: 0, imm: Some(1), ..write(2, peer.slot, &source, None) };
        assert_eq!(failed(a.run(imm)), ErrorKind::PeerDied);
        a.domain.connector().disconnect(peer.slot);
        assert_eq!(a.wait(1), [Event::PeerGone { peer: peer.slot }]);
    }
    println!("revoke was pending {pending} times");
}

fn importers_wait_for_a_stopped_peer_in_parallel() {
    use rustix::process::*;
    let a = node(LoopbackConfig::default(), 1);
    let peer = ChildPeer::start(&a);
    let child = Pid::from_child(&peer.child);
    kill_process(child, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(child), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
    const IMPORTERS: u32 = 16;
    const EACH: Duration = Duration::from_secs(1);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..IMPORTERS {
            scope.spawn(|| {
                let late = a.domain.import(peer.slot, &peer.shared, EACH).err().unwrap();
                assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");
            });
        }
    });
    // If the importers waited one after the other, they would take at least the sum.
    assert!(start.elapsed() < IMPORTERS * EACH, "one after the other waited for its own limit");
    kill_process(child, Signal::CONT).unwrap();
    a.try_import(peer.slot, peer.shared).unwrap();
}

fn unauthenticated_connections_are_dropped() {
    let a = node(LoopbackConfig::default(), 1);
    let (_, offer) = a.domain.connector().prepare().unwrap();
    let name = socket_of(&offer);
    for garbage in [&b"\xff\xff\xff"[..], &[0; 100], &[1, 0, 0], &[7; 4000], &[0, 1, 0, 0]] {
        let stranger = Stranger::connect(&name).unwrap();
        stranger.send(garbage).unwrap();
        stranger.receive_all();
    }
    if is_portable() {
        // In a stream, what is no length ends the connection, and what is no whole packet is waited for.
        let stranger = Stranger::connect(&name).unwrap();
        stranger.send_raw(b"\xff\xff").unwrap();
        assert_eq!(stranger.receive(), None);
        let slow: Vec<_> = (0..50).map(|_| Stranger::connect(&name).unwrap()).collect();
        slow.iter().for_each(|stranger| stranger.send_raw(&[20]).unwrap());
        let stranger = Stranger::connect(&name).unwrap();
        stranger.send(&[0; 100]).unwrap();
        assert_eq!(stranger.receive(), None);
    }
    let mut elsewhere = offer.clone();
    elsewhere[8] ^= 1;
    let error = a.domain.connector().complete(PeerSlot(0), &elsewhere).unwrap_err();
    assert!(error.kind() == ErrorKind::Unreachable && error.context().contains("another host"), "{error}");
}

/// The number of page faults of this thread while `run` ran.
fn page_faults(run: impl FnOnce()) -> u64 {
    let taken = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The tenth field, of which the second is the thread's name in parentheses.
        let rest = stat.rsplit_once(") ").unwrap().1;
        rest.split(' ').nth(7).unwrap().parse::<u64>().unwrap()
    };
    let before = taken();
    run();
    taken() - before
}

/// Memory that was warmed up takes no page fault at its first use. The test counts page faults, and measures no time.
/// It takes the best of several tries, because the kernel may take a page back at any time.
fn warm_memory_takes_no_page_fault() {
    const TRIES: usize = 3;
    let mut a = node(LoopbackConfig::default(), 1);
    let source = a.register(LEN, Access::LOCAL);
    source.fill(1);
    let small = a.register(65536, Access::LOCAL);
    small.fill(2);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for warmed in [false, true].repeat(TRIES) {
        let mut peer = ChildPeer::start(&a);
        let import = a.try_import(peer.slot, peer.shared).unwrap();
        if warmed {
            import.warm_up();
            let touch = WorkRequest { id: 1, len: 0, ..write(1, peer.slot, &source, None) };
            assert_eq!(a.run(touch), done(1, 1));
        }
        let bytes =
            page_faults(|| assert_eq!(a.run(write(2, peer.slot, &source, Some(&import))), done(2, 1)));
        let message = WorkRequest { kind: WorkKind::Send, ..write(3, peer.slot, &small, None) };
        let message = page_faults(|| assert_eq!(a.run(message), done(3, 1)));
        if warmed { &mut warm } else { &mut cold }.push((bytes, message));
        // The warm-up request delivered no event.
        assert!(peer.ask("events 1").ends_with("len: 65536, imm: None }] 2"));
        assert_eq!(peer.ask("bytes 0").split(' ').next(), Some("1"));
        a.domain.connector().disconnect(peer.slot);
        assert_eq!(a.wait(1), [Event::PeerGone { peer: peer.slot }]);
    }
    let none = |of: fn(&(u64, u64)) -> u64, counts: &[(u64, u64)]| counts.iter().any(|count| of(count) == 0);
    let what = format!("cold {cold:?}, warm {warm:?}");
    assert!(none(|count| count.0, &warm) && !none(|count| count.0, &cold), "bytes: {what}");
    // If the message ring is in a huge page, the connection has touched all of it.
    assert!(none(|count| count.1, &warm), "messages: {what}");
}
