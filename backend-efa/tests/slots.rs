//! A slot whose peer has ended is the next one's only once that end was heard.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::Instant;

use multirail_spi::{Completions, Event, PeerSlot};
use side::{LIMIT, Side};

impl Side {
    fn offers(&self) -> PeerSlot {
        self.domain.connector().prepare().unwrap().0
    }

    /// Polls, with room for one event, until that is a peer's end; whose.
    fn hears_of_an_end(&mut self) -> PeerSlot {
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            let mut told = Completions::with_room(1);
            self.endpoint.poll(&mut told);
            if let [Event::PeerGone { peer }] = told.as_slice() {
                return *peer;
            }
        }
        panic!("no end");
    }
}

#[test]
fn offered_anew_once_the_end_was_heard() {
    let Some(mut here) = Side::open() else { return };
    let slots = [here.offers(), here.offers()];
    slots.into_iter().for_each(|slot| here.domain.connector().disconnect(slot));
    let first = here.hears_of_an_end();
    assert!(!slots.contains(&here.offers()), "it would end by what is said of the one before");
    // The other one's end waits for room now.
    let second = here.hears_of_an_end();
    assert_eq!([first.min(second), first.max(second)], slots);
    assert_eq!(here.offers(), first);
    assert!(!slots.contains(&here.offers()));
    here.endpoint.poll(&mut Completions::with_room(1));
    assert_eq!(here.offers(), second);
}
