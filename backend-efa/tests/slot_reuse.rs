//! A disconnected slot is given to the next peer only after the engine has acted on its `PeerGone`.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Completions, Event, PeerSlot};
use side::{LIMIT, Side};

impl Side {
    fn prepare(&self) -> PeerSlot {
        self.domain.connector().prepare().unwrap().0
    }

    /// Polls, with room for one event, until the event is a `PeerGone`. Returns its slot.
    fn wait_for_peer_gone(&mut self) -> PeerSlot {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            let mut completions = Completions::with_room(1);
            self.endpoint.poll(&mut completions);
            if let [Event::PeerGone { peer }] = completions.as_slice() {
                return *peer;
            }
        }
        panic!("no PeerGone");
    }
}

#[test]
fn a_slot_is_reused_after_the_poll_that_follows_its_event() {
    let Some(mut here) = Side::open() else { return };
    let slots = [here.prepare(), here.prepare()];
    slots.into_iter().for_each(|slot| here.domain.connector().disconnect(slot));
    let first = here.wait_for_peer_gone();
    assert!(
        !slots.contains(&here.prepare()),
        "the engine could take the former peer's event for the new peer's"
    );
    // The event of the other slot waits for room now.
    let second = here.wait_for_peer_gone();
    assert_eq!([first.min(second), first.max(second)], slots);
    assert_eq!(here.prepare(), first);
    assert!(!slots.contains(&here.prepare()));
    here.endpoint.poll(&mut Completions::with_room(1));
    assert_eq!(here.prepare(), second);
}
