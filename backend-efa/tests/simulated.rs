//! Behaviour of cards alone, on two simulated cards in one process. `ci/efa-sim/check` runs these tests, each with the
//! settings that it needs.
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

/// Whether a setting of the simulated cards has this value. Prints that the test is skipped if not.
fn has_setting(name: &str, value: &str) -> bool {
    let is_set = std::env::var(name).is_ok_and(|set| set == value);
    if !is_set {
        eprintln!("skipped: this test needs simulated cards with {name}={value}");
    }
    is_set
}

/// Two cards that can reach each other.
fn cards(provider: &str) -> Option<(Side, Side)> {
    let card = |index| Side::of(EfaConfig::default().provider(provider), index);
    Some((card(0)?, card(1)?))
}

/// Memory that notes when it is freed.
struct TrackedMemory {
    buffer: HostBuffer,
    is_freed: Arc<AtomicBool>,
}

// SAFETY: the buffer keeps this contract.
unsafe impl Memory for TrackedMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl Drop for TrackedMemory {
    fn drop(&mut self) {
        self.is_freed.store(true, Ordering::Release);
    }
}

/// Polls both sides until an event of `side` matches. Returns false if none does within the limit.
fn reports(side: &mut Side, other: &mut Side, limit: Duration, is_it: impl Fn(&Event) -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < limit {
        other.endpoint.poll(&mut Completions::with_room(16));
        let mut completions = Completions::with_room(16);
        side.endpoint.poll(&mut completions);
        if completions.as_slice().iter().any(&is_it) {
            return true;
        }
    }
    false
}

/// The fault of [`Stuck`]: no message finds a receive after this number of them. The number is odd: first both providers
/// greet each other, and then each message has a receipt, so a message is the first that finds no receive, not a receipt.
const RNR: &str = "rnr=21";

/// A message that the first card repeats for ever, because its target has no receive for it; and the message's memory.
struct Stuck {
    here: Side,
    there: Side,
    region: Arc<dyn MemoryRegion>,
    memory: Arc<TrackedMemory>,
}

impl Stuck {
    /// Sends such a message. Returns `None`, and prints why, without cards that behave so.
    fn send(is_freed: &Arc<AtomicBool>) -> Option<Self> {
        if !has_setting("EFA_SIM_FAULTS", RNR) {
            return None;
        }
        let (mut here, mut there) = cards("efa")?;
        let buffer = HostBuffer::new(1 << 16).unwrap();
        let memory = Arc::new(TrackedMemory { buffer, is_freed: Arc::clone(is_freed) });
        // SAFETY: nobody holds references into the buffer.
        let region = unsafe { here.domain.register(memory.clone(), Access::all()) }.unwrap();
        let (peer, _) = here.connect(&there);
        let import = there.import_for(&here, peer);
        let (local, lkey) = (there.memory.as_ptr(), there.region.lkey());
        for id in 0..64 {
            // SAFETY: the memory outlives the endpoint.
            let posted =
                unsafe { there.endpoint.post_recv(&[ReceiveRequest { id, local, lkey, len: 1024 }]) };
            assert_eq!(posted.accepted, 1);
        }
        let (local, lkey) = (memory.as_ptr(), region.lkey());
        let request =
            WorkRequest { local, lkey, len: 1024, kind: WorkKind::Send, ..here.request(peer, &*import, 0) };
        let is_stuck = (0..40).any(|id| {
            let batch: Batch = [WorkRequest { id, ..request }].into_iter().collect();
            // SAFETY: a reaper keeps the memory as long as the endpoint is open, which these tests check.
            assert_eq!(unsafe { here.endpoint.post(&batch) }.accepted, 1);
            let is_done = |event: &Event| matches!(event, Event::Done { first, .. } if *first == id);
            !reports(&mut here, &mut there, Duration::from_secs(1), is_done)
        });
        assert!(is_stuck, "every message found a receive");
        Some(Self { here, there, region, memory })
    }
}

#[test]
fn closing_has_a_limit() {
    let is_freed = Arc::<AtomicBool>::default();
    let Some(Stuck { here, there, region, memory }) = Stuck::send(&is_freed) else { return };
    let Side { endpoint, domain, .. } = here;
    let start = Instant::now();
    drop(endpoint);
    assert!(start.elapsed() < LIMIT, "closing took {:?}", start.elapsed());
    assert_eq!(domain.unclosed_endpoints(), 1, "the domain does not count the open endpoint");
    drop((region, memory));
    assert!(!is_freed.load(Ordering::Acquire), "memory of an open endpoint was freed");
    let refusal = domain.endpoint(EndpointConfig::default()).err().expect("the device is lost");
    assert_eq!(refusal.kind(), ErrorKind::DeviceLost);

    // Once the target is gone, the message fails, and the endpoint is closed.
    drop(there);
    let start = Instant::now();
    while domain.unclosed_endpoints() > 0 || !is_freed.load(Ordering::Acquire) {
        assert!(
            start.elapsed() < LIMIT,
            "{} not closed, memory freed: {is_freed:?}",
            domain.unclosed_endpoints()
        );
        std::thread::yield_now();
    }
}

/// Runs `call` in a new thread. Panics if it does not return in time.
fn with_limit<T: Send + 'static>(name: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(call()));
    receiver
        .recv_timeout(Duration::from_secs(20))
        .unwrap_or_else(|why| panic!("{name} does not return: {why}"))
}

/// While an endpoint is overdue, the provider holds its lock, and reads the registrations of the posted requests. No
/// call waits for that lock, and no call closes such a registration.
#[test]
fn calls_on_memory_of_a_lost_device_do_not_block() {
    let Some(Stuck { here, there, region, memory }) = Stuck::send(&Arc::default()) else { return };
    let Side { endpoint, domain, region: other, .. } = here;
    drop(endpoint);
    assert_eq!(domain.unclosed_endpoints(), 1);
    let late = Arc::new(HostBuffer::new(4096).unwrap());
    let registered = {
        let domain = Arc::clone(&domain);
        // SAFETY: nobody holds references into the buffer.
        with_limit("register", move || unsafe { domain.register(late, Access::all()) }.map(drop))
    };
    registered.expect("the device registers memory, as with 2.1");
    let revoked = {
        let region = Arc::clone(&region);
        with_limit("revoke", move || region.revoke())
    };
    let Poll::Ready(Err(error)) = revoked else {
        panic!("revoke reports that the key is closed: {revoked:?}")
    };
    assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "revoke"));
    with_limit("dropping a region", move || drop(other));

    // Once the target is gone, the endpoint is closed, and then the registration.
    drop(there);
    let start = Instant::now();
    while !matches!(region.revoke(), Poll::Ready(Ok(()))) {
        assert!(
            start.elapsed() < LIMIT,
            "{} not closed, revoke: {:?}",
            domain.unclosed_endpoints(),
            region.revoke()
        );
        std::thread::yield_now();
    }
    // SAFETY: nobody holds references into the buffer.
    unsafe { domain.register(memory, Access::all()) }.expect("the device registers memory again");
}

/// The process that the next test starts.
#[test]
#[ignore = "started by a_process_can_exit_while_an_endpoint_is_overdue"]
fn exits_with_an_overdue_endpoint() {
    let Some(Stuck { here, there: _there, region: _region, .. }) = Stuck::send(&Arc::default()) else {
        return;
    };
    drop(here.endpoint);
    assert_eq!(here.domain.unclosed_endpoints(), 1);
    std::process::exit(7);
}

#[test]
fn a_process_can_exit_while_an_endpoint_is_overdue() {
    if !has_setting("EFA_SIM_FAULTS", RNR) {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args(["--exact", "exits_with_an_overdue_endpoint", "--ignored"])
        .spawn()
        .expect("itself");
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > 2 * LIMIT => {
                child.kill().unwrap();
                panic!("the process does not exit: {:?}", child.wait());
            }
            None => std::thread::yield_now(),
        }
    };
    // 0: the test was skipped, because there are no cards.
    assert!(matches!(status.code(), Some(0 | 7)), "{status}");
}

/// The offer of `connector.rs`.
#[derive(serde::Serialize, serde::Deserialize)]
struct Offer {
    version: u8,
    provider: String,
    process: u64,
    format: u32,
    address: Vec<u8>,
    peer_tag: u32,
    empty_write_target: (u64, u64),
}

/// With 4 bytes of completion data the address identifies the sender, so only one live process may have it.
#[test]
fn an_address_belongs_to_one_live_process() {
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
    let refusal = connector.complete(second, &forged).expect_err("the address of another process is refused");
    assert_eq!(refusal.kind(), ErrorKind::Busy);
    assert!(refusal.context().contains("another live peer"), "{refusal}");
    // The same process may connect twice.
    let (third, _) = connector.prepare().unwrap();
    connector.complete(third, &offer).unwrap();
    let refusal = connector.renew(third, &forged).expect_err("a peer may not change to this address either");
    assert_eq!(refusal.kind(), ErrorKind::Busy);

    // Once the former peer is gone, a new peer may have the address.
    for slot in [first, third] {
        connector.disconnect(slot);
    }
    let mut left = 2;
    let start = Instant::now();
    while left > 0 {
        assert!(start.elapsed() < LIMIT, "{left} peers are not gone");
        let mut completions = Completions::with_room(16);
        there.endpoint.poll(&mut completions);
        left -= completions.as_slice().iter().filter(|event| matches!(event, Event::PeerGone { .. })).count();
    }
    connector.complete(second, &forged).unwrap();
}

/// If a write with an imm consumes a receive: imms arrive although the user has posted no receive, messages arrive in
/// the user's receives, and a message without a receive of the user waits.
#[test]
fn imms_that_consume_receives() {
    let settings = ["FI_EFA_USE_UNSOLICITED_WRITE_RECV", "EFA_SIM_UNSOLICITED"];
    if !settings.iter().any(|name| std::env::var(name).is_ok_and(|set| set == "0")) {
        return eprintln!("skipped: this test needs simulated cards with 0 for one of {settings:?}");
    }
    let Some((mut here, mut there)) = cards("efa-direct") else { return };
    let (peer, slot) = here.connect(&there);
    let import = there.import_for(&here, peer);
    let plain = WorkRequest { len: 64, ..here.request(peer, &*import, 0) };
    let post = |here: &mut Side, there: &mut Side, request: WorkRequest| {
        let (batch, start): (Batch, _) = ([request].into_iter().collect(), Instant::now());
        let mut events = Vec::new();
        // SAFETY: memory and imports outlive the endpoint, in this test.
        while unsafe { here.endpoint.post(&batch) }.accepted == 0 {
            assert!(start.elapsed() < LIMIT, "no room");
            events.extend(polled(there));
            polled(here);
        }
        events
    };
    let message = |id| WorkRequest { id, kind: WorkKind::Send, imm: Some(7), ..plain };
    // A message, and then more imms than there are internal receives.
    let mut events = post(&mut here, &mut there, message(0));
    for imm in 0..1000 {
        events.extend(post(
            &mut here,
            &mut there,
            WorkRequest { id: 1 + u64::from(imm), imm: Some(imm), ..plain },
        ));
    }
    let is_imm = |event: &&Event| matches!(event, Event::Imm { .. });
    let start = Instant::now();
    while events.iter().filter(is_imm).count() < 1000 {
        assert!(start.elapsed() < LIMIT, "{} imms arrived", events.iter().filter(is_imm).count());
        polled(&mut here);
        events.extend(polled(&mut there));
    }
    assert!(events.iter().all(|event| is_imm(&event)), "{events:?}");

    // The first message has waited. The second one arrives in the next receive. The third one is too long for its
    // receive.
    let (local, lkey) = (there.memory.as_ptr().wrapping_add(4096), there.region.lkey());
    let receive = |id, len| ReceiveRequest { id, local, lkey, len };
    // SAFETY: the memory outlives the endpoint.
    let posted =
        unsafe { there.endpoint.post_recv(&[receive(1, 64), receive(2, 64), receive(3, 8), receive(4, 64)]) };
    assert_eq!(posted.accepted, 4);
    for id in [2000, 2001] {
        post(&mut here, &mut there, message(id));
    }
    let mut events = Vec::new();
    let start = Instant::now();
    while events.len() < 3 {
        assert!(start.elapsed() < LIMIT, "{events:?}");
        polled(&mut here);
        events.extend(polled(&mut there));
    }
    let received = |id| Event::Received { id, peer: slot, len: 64, imm: Some(7) };
    assert_eq!(events[..2], [received(1), received(2)]);
    assert!(
        matches!(events[2], Event::ReceiveFailed { id: 3, status } if status.kind == ErrorKind::TooLarge)
    );
    assert!(there.endpoint.cancel_recv(4));
    let events = polled(&mut there);
    assert!(
        matches!(events[..], [Event::ReceiveFailed { id: 4, status }] if status.kind == ErrorKind::Cancelled)
    );
}

fn polled(side: &mut Side) -> Vec<Event> {
    let mut completions = Completions::with_room(64);
    side.endpoint.poll(&mut completions);
    completions.as_slice().to_vec()
}
