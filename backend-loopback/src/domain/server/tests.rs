use multirail_spi::{Connector, DomainSetup, PeerSlot, VirtualClock};

use super::*;
use crate::config::LoopbackConfig;
use crate::domain::LoopbackDomain;
use crate::offer::LoopbackOffer;
use crate::other_process::TargetConnection;

fn domain() -> LoopbackDomain {
    let clock = Arc::new(VirtualClock::default());
    let setup = DomainSetup { clock, seed: 1, incarnation: 1, worker_sleeps: true };
    LoopbackDomain::open(0, &setup, &LoopbackConfig::default()).unwrap()
}

/// A connection to `target` as another process has it.
fn connection(target: &LoopbackDomain, peer: PeerSlot) -> Arc<Outbound> {
    let (_, offer) = target.prepare().unwrap();
    let connection = TargetConnection::connect(&LoopbackOffer::parse(&offer).unwrap()).unwrap();
    Arc::new(Outbound::new(peer, PeerLocation::OtherProcess(Box::new(connection))))
}

fn apply(server: &mut ServerLoop, changes: impl IntoIterator<Item = PeerChange>) {
    server.changes.lock().unwrap().extend(changes);
    server.apply_changes();
}

fn watched(server: &ServerLoop) -> Vec<&Arc<Outbound>> {
    server.targets.values().flat_map(|process| &process.connections).collect()
}

#[test]
fn a_peer_that_left_does_not_take_the_next_one_in_its_slot_along() {
    let (target, own) = (domain(), domain());
    let mut server = ServerLoop::new(own.state()).unwrap();
    let slot = PeerSlot(3);
    let [first, second] = [0, 1].map(|_| connection(&target, slot));
    // The slot is free, and has its next peer, before the thread that disconnected the first peer says so.
    first.close();
    let changes = [
        PeerChange::Connected(first.clone()),
        PeerChange::Connected(second.clone()),
        PeerChange::Left(Some(first)),
    ];
    apply(&mut server, changes);
    assert!(matches!(watched(&server)[..], [only] if Arc::ptr_eq(only, &second)));
    second.close();
    apply(&mut server, [PeerChange::Left(Some(second))]);
    assert!(watched(&server).is_empty());
}

#[test]
fn a_peer_that_left_before_it_was_watched_is_not_watched() {
    let (target, own) = (domain(), domain());
    let mut server = ServerLoop::new(own.state()).unwrap();
    let outbound = connection(&target, PeerSlot(0));
    outbound.close();
    apply(&mut server, [PeerChange::Left(Some(outbound.clone())), PeerChange::Connected(outbound)]);
    assert!(watched(&server).is_empty());
}

#[test]
fn a_process_that_could_not_be_watched_is_watched_with_its_next_connection() {
    let (target, own) = (domain(), domain());
    let mut server = ServerLoop::new(own.state()).unwrap();
    let [first, second] = [0, 1].map(|slot| connection(&target, PeerSlot(slot)));
    let (number, end) = process_of(&first).unwrap();
    // The kernel refuses a descriptor that it has already.
    server.waits.add(end, number).unwrap();
    apply(&mut server, [PeerChange::Connected(first.clone())]);
    assert!(!server.targets[&number].is_watched);
    server.waits.remove(end);
    apply(&mut server, [PeerChange::Connected(second)]);
    assert!(server.targets[&number].is_watched && watched(&server).len() == 2);
}

#[test]
fn the_end_of_a_process_closes_all_connections_to_it() {
    let (target, own) = (domain(), domain());
    let mut server = ServerLoop::new(own.state()).unwrap();
    let all = [0, 1, 2].map(|slot| connection(&target, PeerSlot(slot)));
    apply(&mut server, all.iter().cloned().map(PeerChange::Connected));
    let (number, _) = process_of(&all[0]).unwrap();
    server.end_process(number);
    assert!(watched(&server).is_empty() && all.iter().all(|outbound| outbound.is_closed()));
}
