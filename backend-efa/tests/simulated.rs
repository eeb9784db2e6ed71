//! What only cards do, on two simulated ones in one process: `ci/efa-sim/check` runs it, each trial with the
//! settings that it asks for.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::{Duration, Instant};

use multirail_efa::EfaConfig;
use multirail_spi::{
    Access, Batch, Completions, EndpointConfig, ErrorKind, Event, HostBuffer, Memory, MemoryRegion,
    ReceiveRequest, WorkKind, WorkRequest,
};
use side::{LIMIT, Side};

/// Whether a setting of the simulated cards is so; a word about it if not.
fn asks_for(name: &str, value: &str) -> bool {
    let is_set = std::env::var(name).is_ok_and(|set| set == value);
    if !is_set {
        eprintln!("skipped: it is for simulated cards with {name}={value}");
    }
    is_set
}

/// Two cards, each reached from the other.
fn cards(provider: &str) -> Option<(Side, Side)> {
    let card = |index| Side::of(EfaConfig::default().provider(provider), index);
    Some((card(0)?, card(1)?))
}

/// Memory that tells when it is let go.
struct Told {
    buffer: HostBuffer,
    is_gone: Arc<AtomicBool>,
}

// SAFETY: the buffer's.
unsafe impl Memory for Told {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.is_gone.store(true, Ordering::Release);
    }
}

/// Polls until `is_it` says so of an event; whether one came before the limit.
fn comes(side: &mut Side, other: &mut Side, limit: Duration, is_it: impl Fn(&Event) -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        other.endpoint.poll(&mut Completions::with_room(16));
        let mut told = Completions::with_room(16);
        side.endpoint.poll(&mut told);
        if told.as_slice().iter().any(&is_it) {
            return true;
        }
    }
    false
}

/// A message that the first card repeats for ever, as it finds no receive there, and what it is sent from.
struct Stuck {
    here: Side,
    there: Side,
    region: Arc<dyn MemoryRegion>,
    memory: Arc<Told>,
}

impl Stuck {
    /// `None`, and a word about it, where the cards do not do that.
    fn make(is_gone: &Arc<AtomicBool>) -> Option<Self> {
        if !asks_for("EFA_SIM_FAULTS", "rnr=20") {
            return None;
        }
        let (mut here, mut there) = cards("efa")?;
        let buffer = HostBuffer::new(1 << 16).unwrap();
        let memory = Arc::new(Told { buffer, is_gone: Arc::clone(is_gone) });
        // SAFETY: nobody holds references into the buffer.
        let region = unsafe { here.domain.register(memory.clone(), Access::all()) }.unwrap();
        let (peer, _) = here.meet(&there);
        let far = there.import_for(&here, peer);
        let (local, lkey) = (there.memory.as_ptr(), there.region.lkey());
        for id in 0..64 {
            // SAFETY: the memory outlives the endpoint.
            let posted =
                unsafe { there.endpoint.post_recv(&[ReceiveRequest { id, local, lkey, len: 1024 }]) };
            assert_eq!(posted.accepted, 1);
        }
        let (local, lkey) = (memory.as_ptr(), region.lkey());
        let request =
            WorkRequest { local, lkey, len: 1024, kind: WorkKind::Send, ..here.request(peer, &*far, 0) };
        let is_stuck = (0..40).any(|id| {
            let batch: Batch = [WorkRequest { id, ..request }].into_iter().collect();
            // SAFETY: a reaper keeps the memory as long as it is needed, by what these tests are about.
            assert_eq!(unsafe { here.endpoint.post(&batch) }.accepted, 1);
            let is_done = |event: &Event| matches!(event, Event::Done { first, .. } if *first == id);
            !comes(&mut here, &mut there, Duration::from_secs(1), is_done)
        });
        assert!(is_stuck, "every message found a receive");
        Some(Self { here, there, region, memory })
    }
}

#[test]
fn closing_has_a_limit() {
    let is_gone = Arc::<AtomicBool>::default();
    let Some(Stuck { here, there, region, memory }) = Stuck::make(&is_gone) else { return };
    let Side { endpoint, domain, .. } = here;
    let begun = Instant::now();
    drop(endpoint);
    assert!(begun.elapsed() < LIMIT, "closing took {:?}", begun.elapsed());
    assert_eq!(domain.unclosed(), 1, "nobody says that it is not closed");
    drop((region, memory));
    assert!(!is_gone.load(Ordering::Acquire), "memory of an open endpoint is gone");
    let refusal = domain.endpoint(EndpointConfig::default()).err().expect("the device is lost");
    assert_eq!(refusal.kind(), ErrorKind::DeviceLost);

    // Once its target is gone the message fails, and the endpoint is closed.
    drop(there);
    let begun = Instant::now();
    while domain.unclosed() > 0 || !is_gone.load(Ordering::Acquire) {
        assert!(begun.elapsed() < LIMIT, "{} not closed, memory gone: {is_gone:?}", domain.unclosed());
        std::thread::yield_now();
    }
}

/// What `call` answers, in a thread of its own: one that hangs is not waited for.
fn answers<T: Send + 'static>(name: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(call()));
    told.recv_timeout(Duration::from_secs(20))
        .unwrap_or_else(|why| panic!("{name} does not come back: {why}"))
}

/// While an endpoint is overdue the provider holds its lock, and reads the registrations of what is posted there: no
/// call waits for that, nor takes a registration away.
#[test]
fn memory_of_a_lost_device_holds_up_nobody() {
    let Some(Stuck { here, there, region, memory }) = Stuck::make(&Arc::default()) else { return };
    let Side { endpoint, domain, region: other, .. } = here;
    drop(endpoint);
    assert_eq!(domain.unclosed(), 1);
    let late = Arc::new(HostBuffer::new(4096).unwrap());
    let registered = {
        let domain = Arc::clone(&domain);
        // SAFETY: nobody holds references into the buffer.
        answers("register", move || unsafe { domain.register(late, Access::all()) }.map(drop))
    };
    registered.expect("the device takes memory, as 2.1 does");
    let revoked = {
        let region = Arc::clone(&region);
        answers("revoke", move || region.revoke())
    };
    let Poll::Ready(Err(error)) = revoked else { panic!("it says that the key is gone: {revoked:?}") };
    assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "revoke"));
    answers("dropping a region", move || drop(other));

    // Once its target is gone the endpoint is closed, and then the registration.
    drop(there);
    let begun = Instant::now();
    while !matches!(region.revoke(), Poll::Ready(Ok(()))) {
        assert!(begun.elapsed() < LIMIT, "{} not closed, revoke: {:?}", domain.unclosed(), region.revoke());
        std::thread::yield_now();
    }
    // SAFETY: nobody holds references into the buffer.
    unsafe { domain.register(memory, Access::all()) }.expect("the device takes memory again");
}

/// The process of the test below.
#[test]
#[ignore = "started by a_process_exits_meanwhile"]
fn exits_meanwhile() {
    let Some(Stuck { here, there: _there, region: _region, .. }) = Stuck::make(&Arc::default()) else {
        return;
    };
    drop(here.endpoint);
    assert_eq!(here.domain.unclosed(), 1);
    std::process::exit(7);
}

#[test]
fn a_process_exits_meanwhile() {
    if !asks_for("EFA_SIM_FAULTS", "rnr=20") {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut child =
        Command::new(program).args(["--exact", "exits_meanwhile", "--ignored"]).spawn().expect("itself");
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begun.elapsed() > 2 * LIMIT => {
                child.kill().unwrap();
                panic!("it does not exit: {:?}", child.wait());
            }
            None => std::thread::yield_now(),
        }
    };
    // 0: there are no cards, which it says.
    assert!(matches!(status.code(), Some(0 | 7)), "{status}");
}

/// An offer, as `connector.rs` has it.
#[derive(serde::Serialize, serde::Deserialize)]
struct Offer {
    version: u8,
    provider: String,
    process: u64,
    format: u32,
    address: Vec<u8>,
    seat: u32,
    landing: (u64, u64),
}

/// With 4 bytes of completion data the address says who sent something: of two processes one may have it.
#[test]
fn an_address_is_one_live_process() {
    let Some((here, mut there)) = cards("efa") else { return };
    if multirail_efa::libfabric_version().is_ok_and(|version| version < (1, 18)) {
        return eprintln!("skipped: libfabric 1.17 emulates writes, with 8 bytes of completion data");
    }
    let connector = there.domain.connector();
    let (_, offer) = here.domain.connector().prepare().unwrap();
    let mut forged: Offer = postcard::from_bytes(&offer).unwrap();
    forged.process ^= 1;
    let forged = postcard::to_stdvec(&forged).unwrap();

    let (first, _) = connector.prepare().unwrap();
    connector.complete(first, &offer).unwrap();
    let (second, _) = connector.prepare().unwrap();
    let refusal = connector.complete(second, &forged).expect_err("another's address is refused");
    assert_eq!(refusal.kind(), ErrorKind::Busy);
    assert!(refusal.context().contains("another live peer"), "{refusal}");
    // The process itself may connect twice.
    let (third, _) = connector.prepare().unwrap();
    connector.complete(third, &offer).unwrap();
    let refusal = connector.renew(third, &forged).expect_err("nor may a peer move there");
    assert_eq!(refusal.kind(), ErrorKind::Busy);

    // A peer that comes to the address once the former peer is gone is let in.
    for slot in [first, third] {
        connector.disconnect(slot);
    }
    let mut left = 2;
    let begun = Instant::now();
    while left > 0 {
        assert!(begun.elapsed() < LIMIT, "{left} peers are not gone");
        let mut told = Completions::with_room(16);
        there.endpoint.poll(&mut told);
        left -= told.as_slice().iter().filter(|event| matches!(event, Event::PeerGone { .. })).count();
    }
    connector.complete(second, &forged).unwrap();
}

/// Where a write with an imm takes a posted receive, imms come though the user has posted none, messages find the
/// user's, and one that nobody wants yet waits.
#[test]
fn imms_that_take_receives() {
    let settings = ["FI_EFA_USE_UNSOLICITED_WRITE_RECV", "EFA_SIM_UNSOLICITED"];
    if !settings.iter().any(|name| std::env::var(name).is_ok_and(|set| set == "0")) {
        return eprintln!("skipped: it is for simulated cards with 0 for one of {settings:?}");
    }
    let Some((mut here, mut there)) = cards("efa-direct") else { return };
    let (peer, slot) = here.meet(&there);
    let far = there.import_for(&here, peer);
    let plain = WorkRequest { len: 64, ..here.request(peer, &*far, 0) };
    let posts = |here: &mut Side, there: &mut Side, request: WorkRequest| {
        let (batch, begun): (Batch, _) = ([request].into_iter().collect(), Instant::now());
        let mut heard = Vec::new();
        // SAFETY: memory and imports outlive the endpoint, in this test.
        while unsafe { here.endpoint.post(&batch) }.accepted == 0 {
            assert!(begun.elapsed() < LIMIT, "no room");
            heard.extend(polled(there));
            polled(here);
        }
        heard
    };
    let message = |id| WorkRequest { id, kind: WorkKind::Send, imm: Some(7), ..plain };
    // More than there are receives of the backend's, and a message in between.
    let mut heard = posts(&mut here, &mut there, message(0));
    for imm in 0..1000 {
        heard.extend(posts(
            &mut here,
            &mut there,
            WorkRequest { id: 1 + u64::from(imm), imm: Some(imm), ..plain },
        ));
    }
    let is_imm = |event: &&Event| matches!(event, Event::Imm { .. });
    let begun = Instant::now();
    while heard.iter().filter(is_imm).count() < 1000 {
        assert!(begun.elapsed() < LIMIT, "{} imms came", heard.iter().filter(is_imm).count());
        polled(&mut here);
        heard.extend(polled(&mut there));
    }
    assert!(heard.iter().all(|event| is_imm(&event)), "{heard:?}");

    // The message has waited; the next one comes into the receive behind, and a third is too long for its own.
    let (local, lkey) = (there.memory.as_ptr().wrapping_add(4096), there.region.lkey());
    let receive = |id, len| ReceiveRequest { id, local, lkey, len };
    // SAFETY: the memory outlives the endpoint.
    let posted =
        unsafe { there.endpoint.post_recv(&[receive(1, 64), receive(2, 64), receive(3, 8), receive(4, 64)]) };
    assert_eq!(posted.accepted, 4);
    for id in [2000, 2001] {
        posts(&mut here, &mut there, message(id));
    }
    let mut heard = Vec::new();
    let begun = Instant::now();
    while heard.len() < 3 {
        assert!(begun.elapsed() < LIMIT, "{heard:?}");
        polled(&mut here);
        heard.extend(polled(&mut there));
    }
    let received = |id| Event::Received { id, peer: slot, len: 64, imm: Some(7) };
    assert_eq!(heard[..2], [received(1), received(2)]);
    assert!(matches!(heard[2], Event::ReceiveFailed { id: 3, status } if status.kind == ErrorKind::TooLarge));
    assert!(there.endpoint.cancel_recv(4));
    let heard = polled(&mut there);
    assert!(
        matches!(heard[..], [Event::ReceiveFailed { id: 4, status }] if status.kind == ErrorKind::Cancelled)
    );
}

fn polled(side: &mut Side) -> Vec<Event> {
    let mut told = Completions::with_room(64);
    side.endpoint.poll(&mut told);
    told.as_slice().to_vec()
}
