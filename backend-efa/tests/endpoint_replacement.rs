//! An endpoint is replaced if requests to an aborted peer do not end. Its other peers use the next endpoint.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Armed, Batch, Completions, ErrorKind, Event, PeerSlot, RemoteMemory};
use side::{LIMIT, PIECE, Side};

/// The number of writes to the peer that is never polled: more than a socket has room for.
const STUCK: u64 = 8;

/// The events that an endpoint has reported.
#[derive(Default)]
struct Reported {
    done: u64,
    failed: Vec<ErrorKind>,
    changed: usize,
    gone: usize,
}

impl Reported {
    fn poll(&mut self, side: &mut Side) {
        let mut completions = Completions::with_room(64);
        side.endpoint.poll(&mut completions);
        for event in completions.as_slice() {
            match event {
                Event::Done { count, .. } => self.done += u64::from(*count),
                Event::Failed { status, .. } | Event::FailedUnconfirmed { status, .. } => {
                    self.failed.push(status.kind)
                }
                Event::EndpointChanged => self.changed += 1,
                Event::PeerGone { .. } => self.gone += 1,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Posts the write of a piece. Calls `idle` as long as there is no room.
fn post(
    side: &mut Side,
    peer: PeerSlot,
    to: &dyn RemoteMemory,
    number: usize,
    mut idle: impl FnMut(&mut Side),
) {
    let batch: Batch = [side.request(peer, to, number)].into_iter().collect();
    let start = Instant::now();
    // SAFETY: memory and import outlive the endpoint.
    while unsafe { side.endpoint.post(&batch) }.accepted == 0 {
        assert!(start.elapsed() < LIMIT, "no room");
        idle(side);
    }
}

/// Writes one piece each way between two sides.
fn both_ways(here: &mut Side, there: &mut Side, (to, from): (PeerSlot, PeerSlot), reported: &mut Reported) {
    let (to_there, to_here) = (there.import_for(here, to), here.import_for(there, from));
    let (mut theirs, start, before) = (Reported::default(), Instant::now(), reported.done);
    let theirs = &mut theirs;
    post(here, to, &*to_there, 0, |here| {
        reported.poll(here);
        theirs.poll(there);
    });
    post(there, from, &*to_here, 1, |there| {
        reported.poll(here);
        theirs.poll(there);
    });
    while reported.done == before || theirs.done == 0 {
        assert!(start.elapsed() < LIMIT, "{:?} and {:?}", reported.failed, theirs.failed);
        reported.poll(here);
        theirs.poll(there);
    }
    assert_eq!(theirs.failed, []);
}

#[test]
fn other_peers_use_the_next_endpoint_and_lose_nothing() {
    let (Some(mut here), Some(mut well), Some(mut frozen)) = (Side::open(), Side::open(), Side::open())
    else {
        return;
    };
    let (to_well, from_well) = here.connect(&well);
    let (to_frozen, from_frozen) = here.connect(&frozen);
    let mut reported = Reported::default();
    both_ways(&mut here, &mut well, (to_well, from_well), &mut reported);
    both_ways(&mut here, &mut frozen, (to_frozen, from_frozen), &mut reported);
    // `frozen` is never polled again.
    let import = frozen.import_for(&here, to_frozen);
    for number in 0..STUCK {
        post(&mut here, to_frozen, &*import, number as usize, |here| reported.poll(here));
    }
    reported.done = 0;
    here.domain.connector().disconnect(to_frozen);
    here.endpoint.abort(to_frozen);
    let connector = here.domain.connector();
    assert_eq!(connector.next_offer(to_well).unwrap(), None);
    let start = Instant::now();
    while reported.changed == 0 {
        assert!(start.elapsed() < LIMIT, "the {STUCK} writes do not end; {} are done", reported.done);
        reported.poll(&mut here);
    }
    // A peer that does not know the next endpoint yet uses the old one.
    both_ways(&mut here, &mut well, (to_well, from_well), &mut reported);
    let offer = here.domain.connector().next_offer(to_well).unwrap().unwrap();
    well.domain.connector().renew(from_well, &offer).unwrap();
    here.domain.connector().finish_renewal(to_well, &offer).unwrap();
    assert_eq!(here.domain.connector().next_offer(to_well).unwrap(), None);
    both_ways(&mut here, &mut well, (to_well, from_well), &mut reported);
    while (reported.failed.len() as u64) + reported.done < STUCK + 2 {
        assert!(
            start.elapsed() < LIMIT,
            "{} of {STUCK} writes failed, {} are done",
            reported.failed.len(),
            reported.done
        );
        reported.poll(&mut here);
    }
    assert!(
        !reported.failed.is_empty() && reported.failed.iter().all(|kind| *kind == ErrorKind::Unreachable)
    );
    assert_eq!((reported.changed, reported.gone), (1, 1));
    both_ways(&mut here, &mut well, (to_well, from_well), &mut reported);
    assert_eq!(here.bytes(PIECE..2 * PIECE), well.bytes(PIECE..2 * PIECE));
    // A peer that connects later knows only the new endpoint.
    let mut late = Side::open().unwrap();
    let (to_late, from_late) = here.connect(&late);
    both_ways(&mut here, &mut late, (to_late, from_late), &mut reported);
}

#[test]
fn invalid_offers_change_nothing() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (to, from) = here.connect(&there);
    let connector = here.domain.connector();
    for offer in [&b""[..], &[0xff; 40], &[1; 4096]] {
        let error = connector.renew(to, offer).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unreachable), "{error}");
        // This may succeed, and has no effect: it is not this side's offer.
        let _ = connector.finish_renewal(to, offer);
    }
    both_ways(&mut here, &mut there, (to, from), &mut Reported::default());
}

#[test]
fn an_endpoint_does_not_sleep_before_its_caller_has_posted_to_a_slot_that_changed() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let start = Instant::now();
    let sleeps = |here: &mut Side| {
        while !matches!(here.endpoint.arm(), Armed::Fd(_)) {
            assert!(start.elapsed() < LIMIT, "the endpoint never allows its caller to sleep");
            Reported::default().poll(here);
        }
    };
    sleeps(&mut here);
    here.connect(&there);
    assert!(
        matches!(here.endpoint.arm(), Armed::Ready),
        "the caller can post requests that had no room before"
    );
    sleeps(&mut here);
}
