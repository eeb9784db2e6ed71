//! An endpoint moves away from what does not end, and takes its other peers with it.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Armed, Batch, Completions, ErrorKind, Event, PeerSlot, RemoteMemory};
use side::{LIMIT, PIECE, Side};

/// Writes posted to the peer that stands still: more than a socket takes in.
const STUCK: u64 = 8;

/// What an endpoint has told.
#[derive(Default)]
struct Told {
    done: u64,
    failed: Vec<ErrorKind>,
    moved: usize,
    gone: usize,
}

impl Told {
    fn poll(&mut self, side: &mut Side) {
        let mut completions = Completions::with_room(64);
        side.endpoint.poll(&mut completions);
        for event in completions.as_slice() {
            match event {
                Event::Done { count, .. } => self.done += u64::from(*count),
                Event::Failed { status, .. } | Event::FailedUnconfirmed { status, .. } => {
                    self.failed.push(status.kind)
                }
                Event::EndpointChanged => self.moved += 1,
                Event::PeerGone { .. } => self.gone += 1,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Posts the write of a piece; `idle` is called while there is no room.
fn post(
    side: &mut Side,
    peer: PeerSlot,
    to: &dyn RemoteMemory,
    number: usize,
    mut idle: impl FnMut(&mut Side),
) {
    let batch: Batch = [side.request(peer, to, number)].into_iter().collect();
    let begun = Instant::now();
    // SAFETY: memory and import outlive the endpoint.
    while unsafe { side.endpoint.post(&batch) }.accepted == 0 {
        assert!(begun.elapsed() < LIMIT, "no room");
        idle(side);
    }
}

/// Writes one piece each way between two sides.
fn both_ways(here: &mut Side, there: &mut Side, (to, from): (PeerSlot, PeerSlot), told: &mut Told) {
    let (far, near) = (there.import_for(here, to), here.import_for(there, from));
    let (mut theirs, begun, before) = (Told::default(), Instant::now(), told.done);
    let theirs = &mut theirs;
    post(here, to, &*far, 0, |here| {
        told.poll(here);
        theirs.poll(there);
    });
    post(there, from, &*near, 1, |there| {
        told.poll(here);
        theirs.poll(there);
    });
    while told.done == before || theirs.done == 0 {
        assert!(begun.elapsed() < LIMIT, "{:?} and {:?}", told.failed, theirs.failed);
        told.poll(here);
        theirs.poll(there);
    }
    assert_eq!(theirs.failed, []);
}

#[test]
fn others_follow_and_lose_nothing() {
    let (Some(mut here), Some(mut well), Some(mut frozen)) = (Side::open(), Side::open(), Side::open())
    else {
        return;
    };
    let (to_well, from_well) = here.meet(&well);
    let (to_frozen, from_frozen) = here.meet(&frozen);
    let mut told = Told::default();
    both_ways(&mut here, &mut well, (to_well, from_well), &mut told);
    both_ways(&mut here, &mut frozen, (to_frozen, from_frozen), &mut told);
    // Never polled again.
    let far = frozen.import_for(&here, to_frozen);
    for number in 0..STUCK {
        post(&mut here, to_frozen, &*far, number as usize, |here| told.poll(here));
    }
    told.done = 0;
    here.domain.connector().disconnect(to_frozen);
    here.endpoint.abort(to_frozen);
    let connector = here.domain.connector();
    assert_eq!(connector.offer_again(to_well).unwrap(), None);
    let begun = Instant::now();
    while told.moved == 0 {
        assert!(begun.elapsed() < LIMIT, "{STUCK} writes are not cut off; {} ended", told.done);
        told.poll(&mut here);
    }
    // Whoever does not know yet goes on as before.
    both_ways(&mut here, &mut well, (to_well, from_well), &mut told);
    let offer = here.domain.connector().offer_again(to_well).unwrap().unwrap();
    well.domain.connector().renew(from_well, &offer).unwrap();
    here.domain.connector().renewed(to_well, &offer).unwrap();
    assert_eq!(here.domain.connector().offer_again(to_well).unwrap(), None);
    both_ways(&mut here, &mut well, (to_well, from_well), &mut told);
    while (told.failed.len() as u64) + told.done < STUCK + 2 {
        assert!(
            begun.elapsed() < LIMIT,
            "{} of {STUCK} writes failed, {} ended",
            told.failed.len(),
            told.done
        );
        told.poll(&mut here);
    }
    assert!(!told.failed.is_empty() && told.failed.iter().all(|kind| *kind == ErrorKind::Unreachable));
    assert_eq!((told.moved, told.gone), (1, 1));
    both_ways(&mut here, &mut well, (to_well, from_well), &mut told);
    assert_eq!(here.bytes(PIECE..2 * PIECE), well.bytes(PIECE..2 * PIECE));
    // Somebody who comes later knows the new place only.
    let mut late = Side::open().unwrap();
    let (to_late, from_late) = here.meet(&late);
    both_ways(&mut here, &mut late, (to_late, from_late), &mut told);
}

#[test]
fn nonsense_moves_nobody() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (to, from) = here.meet(&there);
    let connector = here.domain.connector();
    for offer in [&b""[..], &[0xff; 40], &[1; 4096]] {
        let error = connector.renew(to, offer).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unreachable), "{error}");
        // It may be read, and is none of ours.
        let _ = connector.renewed(to, offer);
    }
    both_ways(&mut here, &mut there, (to, from), &mut Told::default());
}

#[test]
fn an_endpoint_does_not_sleep_before_its_caller_has_posted_to_a_slot_that_changed() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let begun = Instant::now();
    let sleeps = |here: &mut Side| {
        while !matches!(here.endpoint.arm(), Armed::Fd(_)) {
            assert!(begun.elapsed() < LIMIT, "it never sleeps");
            Told::default().poll(here);
        }
    };
    sleeps(&mut here);
    here.meet(&there);
    assert!(matches!(here.endpoint.arm(), Armed::Ready), "what the caller holds back can be posted");
    sleeps(&mut here);
}
