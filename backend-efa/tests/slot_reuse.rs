//! A disconnected slot is given to the next peer only after the engine has acted on its `PeerGone`.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Completions, Event, PeerSlot};
use side::{LIMIT, Side};

fn prepare(side: &Side) -> PeerSlot {
    side.domain.connector().prepare().unwrap().0
}

/// Polls, with room for one event, until the event is a `PeerGone`. Returns its slot.
fn wait_for_peer_gone(side: &mut Side) -> PeerSlot {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        let mut completions = Completions::with_room(1);
        side.endpoint.poll(&mut completions);
        if let [Event::PeerGone { peer }] = completions.as_slice() {
            return *peer;
        }
    }
    panic!("no PeerGone");
}

#[test]
fn a_slot_is_reused_after_the_poll_that_follows_its_event() {
    let Some(mut here) = Side::open() else { return };
    let slots = [prepare(&here), prepare(&here)];
    slots.into_iter().for_each(|slot| here.domain.connector().disconnect(slot));
    let first = wait_for_peer_gone(&mut here);
    assert!(
        !slots.contains(&prepare(&here)),
        "the engine could take the former peer's event for the new peer's"
    );
    // The event of the other slot waits for room now.
    let second = wait_for_peer_gone(&mut here);
    assert_eq!([first.min(second), first.max(second)], slots);
    assert_eq!(prepare(&here), first);
    assert!(!slots.contains(&prepare(&here)));
    here.endpoint.poll(&mut Completions::with_room(1));
    assert_eq!(prepare(&here), second);
}
