use multirail_spi::{Clock, Connector, DomainSetup, VirtualClock};

use multirail_spi::staging::{SlotRequest, SlotRequestKind};

use super::*;
use crate::config::LoopbackConfig;
use crate::domain::LoopbackDomain;
use crate::outbound::Outbound;
use crate::segment::message_ring;

/// More than are watched when they are silent.
const PEERS: usize = 40;

/// An endpoint, and its peers, which write to it.
struct Crowd {
    endpoint: LoopbackEndpoint,
    clock: VirtualClock,
    peers: Vec<(LoopbackDomain, PeerSlot)>,
}

fn domain(clock: &VirtualClock) -> LoopbackDomain {
    let setup = DomainSetup { clock: Arc::new(clock.clone()), seed: 1, incarnation: 1, worker_sleeps: true };
    LoopbackDomain::open(0, &setup, &LoopbackConfig::default()).unwrap()
}

impl Crowd {
    /// Connects the peers, and polls until the silent ones are not watched. Marks are shared with other processes.
    fn new() -> Self {
        let clock = VirtualClock::default();
        let own = Arc::new(domain(&clock));
        let state = own.state().clone();
        state.wakeup.shared_ready().unwrap();
        let config = EndpointConfig::default();
        let mut endpoint = LoopbackEndpoint::new(&state, &config, own.clone());
        let peers = (0..PEERS).map(|_| {
            let peer = domain(&clock);
            let ((slot, offer), (to_own, answer)) = (own.prepare().unwrap(), peer.prepare().unwrap());
            own.complete(slot, &answer).unwrap();
            peer.complete(to_own, &offer).unwrap();
            (peer, to_own)
        });
        let peers = peers.collect();
        let mut into = Completions::with_room(64);
        (0..5000).for_each(|_| endpoint.poll(&mut into));
        let mut crowd = Self { endpoint, clock, peers };
        assert!(crowd.unwatched() > PEERS / 2, "{} peers are not watched", crowd.unwatched());
        assert!(crowd.imms().is_empty());
        crowd
    }

    fn unwatched(&self) -> usize {
        self.endpoint.peers.iter().flatten().filter(|peer| !peer.is_watched).count()
    }

    /// Writes from the peers `numbers`, with their numbers as imms.
    fn write(&self, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let (peer, slot) = &self.peers[number];
            let outbound = peer.state().peers.find(*slot).unwrap().outbound.unwrap();
            assert!(outbound.send_imm(number as u32));
        }
    }

    /// What a hostile process does: clears all marks.
    fn clear_marks(&self) {
        self.endpoint.state.wakeup.take_ready(|_| {});
    }

    /// The imms that one poll finds.
    fn imms(&mut self) -> Vec<u32> {
        let mut into = Completions::with_room(2 * PEERS);
        self.endpoint.poll(&mut into);
        let imm = |event: &Event| match event {
            Event::Imm { imm, .. } => *imm,
            other => panic!("{other:?}"),
        };
        let mut imms: Vec<_> = into.as_slice().iter().map(imm).collect();
        imms.sort_unstable();
        imms
    }

    fn sleeps(&mut self) -> bool {
        matches!(self.endpoint.arm(), Armed::Fd(_))
    }
}

#[test]
fn marks_lead_to_peers_that_are_not_watched() {
    let mut crowd = Crowd::new();
    crowd.write(5..9);
    assert_eq!(crowd.imms(), [5, 6, 7, 8]);
}

#[test]
fn an_endpoint_that_goes_to_sleep_finds_entries_whose_marks_were_cleared() {
    let mut crowd = Crowd::new();
    crowd.write(0..PEERS);
    crowd.clear_marks();
    assert!(!crowd.sleeps());
    assert_eq!(crowd.imms(), Vec::from_iter(0..PEERS as u32));
}

#[test]
fn an_endpoint_that_has_just_looked_sleeps_until_it_looks_again() {
    let mut crowd = Crowd::new();
    assert!(crowd.sleeps() && crowd.endpoint.due() == Time::NEVER, "it has just looked");
    // A hostile process clears the marks, marks a peer of its own, and wakes the endpoint.
    crowd.write(1..PEERS);
    crowd.clear_marks();
    crowd.write(0..1);
    let mut found = crowd.imms();
    assert!(crowd.sleeps());
    let due = crowd.endpoint.due();
    assert!(due > crowd.clock.now() && due <= crowd.clock.now().after(LOOK_PERIOD));
    crowd.clock.advance(LOOK_PERIOD);
    found.extend(crowd.imms());
    assert!(!crowd.sleeps());
    found.extend(crowd.imms());
    found.sort_unstable();
    assert_eq!(found, Vec::from_iter(0..PEERS as u32));
}

#[test]
fn an_endpoint_that_never_sleeps_finds_entries_whose_marks_were_cleared() {
    let mut crowd = Crowd::new();
    crowd.write(0..PEERS);
    crowd.clear_marks();
    let mut found: Vec<_> = (0..1000).flat_map(|_| crowd.imms()).collect();
    found.sort_unstable();
    assert_eq!(found, Vec::from_iter(0..PEERS as u32));
}

#[test]
fn a_mark_without_an_entry_changes_nothing() {
    let mut crowd = Crowd::new();
    let unwatched = crowd.unwatched();
    (0..PEERS as u32).for_each(|slot| crowd.endpoint.state.wakeup.mark_ready(slot));
    assert!(crowd.imms().is_empty());
    assert_eq!(crowd.unwatched(), unwatched);
}

/// An endpoint, and its only peer.
struct Pair {
    endpoint: LoopbackEndpoint,
    peer: LoopbackDomain,
    slot: PeerSlot,
}

impl Pair {
    fn new() -> Self {
        let clock = VirtualClock::default();
        let (own, peer) = (Arc::new(domain(&clock)), domain(&clock));
        let ((there, offer), (slot, answer)) = (own.prepare().unwrap(), peer.prepare().unwrap());
        own.complete(there, &answer).unwrap();
        peer.complete(slot, &offer).unwrap();
        let mut endpoint = LoopbackEndpoint::new(own.state(), &EndpointConfig::default(), own.clone());
        endpoint.poll(&mut Completions::with_room(1));
        Self { endpoint, peer, slot }
    }

    fn outbound(&self) -> Arc<Outbound> {
        self.peer.state().peers.find(self.slot).unwrap().outbound.unwrap()
    }

    /// The peer writes an invalid entry, and the endpoint finds it.
    fn break_ring(&mut self) {
        let outbound = self.outbound();
        message_ring::send_invalid(outbound.layout(), || outbound.mark_ready());
        self.endpoint.poll(&mut Completions::with_room(8));
        assert!(!outbound.is_alive(), "the peer is disconnected");
    }

    fn sleeps(&mut self) -> bool {
        matches!(self.endpoint.arm(), Armed::Fd(_))
    }
}

#[test]
fn a_slot_of_a_peer_that_breaks_its_ring_keeps_no_endpoint_awake() {
    let mut pair = Pair::new();
    let outbound = pair.outbound();
    let PeerLocation::ThisProcess { inbound, .. } = &outbound.location else { panic!("in this process") };
    let buffer = inbound.open_staging_buffer().unwrap().content();
    pair.break_ring();
    buffer.post(0, &SlotRequest { kind: SlotRequestKind::Write, key: 0, offset: 0, len: 1 });
    assert!(pair.sleeps());
}

#[test]
fn a_message_of_a_peer_that_breaks_its_ring_keeps_no_endpoint_awake() {
    let mut pair = Pair::new();
    let outbound = pair.outbound();
    // SAFETY: a local array's bytes.
    assert!(unsafe { message_ring::send_message(outbound.layout(), [7].as_ptr(), 1, None, || ()) });
    pair.break_ring();
    let mut into = [0; 8];
    let receive = ReceiveRequest { id: 1, local: into.as_mut_ptr(), lkey: 0, len: 8 };
    // SAFETY: `into` lives as long as the endpoint is polled.
    assert_eq!(unsafe { pair.endpoint.post_recv(&[receive]) }.accepted, 1);
    assert!(pair.sleeps());
}
