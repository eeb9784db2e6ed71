//! The barriers of one peer: which of them the peer and this side have reached, and which waits for them there are.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use foldhash::HashMap;

/// The most barriers that one side may have reached before the other. Each side refuses more to its own user, so a peer
/// that keeps the protocol stays within this limit.
pub(crate) const MAX_AHEAD: usize = 1024;

/// All barriers of one peer that at least one side has reached.
#[derive(Default)]
pub(crate) struct Barriers(Mutex<State>);

#[derive(Default)]
struct State {
    /// Hashed with a seed of its own, because the peer chooses the names.
    known: HashMap<Box<str>, Barrier>,
    /// The number of barriers that this side has reached or is about to reach.
    ours: usize,
    /// The number of barriers that only the peer has reached.
    theirs: usize,
}

/// One barrier. A side that passes it may reach it again before the other side has passed, so the peer may be ahead by
/// two.
#[derive(Default)]
struct Barrier {
    /// Whether this side has reached it and told the peer.
    announced: bool,
    /// How often the peer has reached it without this side passing it.
    ahead: u8,
    /// Whether a future on this side waits for it.
    awaited: bool,
    waker: Option<Waker>,
}

/// Why a wait for a barrier is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another future waits for the barrier already.
    Awaited,
    /// This side has reached [`MAX_AHEAD`] other barriers before the peer.
    TooMany,
}

impl Barriers {
    /// Begins a wait. Returns whether the peer knows already that this side has reached the barrier, from an earlier
    /// wait that was given up.
    pub fn enter(&self, name: &str) -> Result<bool, Refusal> {
        let mut state = self.lock();
        let full = state.ours >= MAX_AHEAD;
        match state.known.get_mut(name) {
            Some(barrier) if barrier.awaited => return Err(Refusal::Awaited),
            Some(barrier) if barrier.announced => {
                barrier.awaited = true;
                return Ok(true);
            }
            _ if full => return Err(Refusal::TooMany),
            Some(barrier) => barrier.awaited = true,
            None => _ = state.known.insert(name.into(), Barrier { awaited: true, ..Barrier::default() }),
        }
        state.ours += 1;
        Ok(false)
    }

    /// Notes that this side has reached the barrier. Returns whether the peer is to be told.
    pub fn announce(&self, name: &str) -> bool {
        let mut state = self.lock();
        let Some(barrier) = state.known.get_mut(name) else { return false };
        let is_new = !std::mem::replace(&mut barrier.announced, true);
        let ahead = barrier.ahead > 0;
        state.theirs -= usize::from(is_new && ahead);
        is_new
    }

    /// Returns whether the peer has reached the barrier. If it has not, `waker` is woken once it has.
    pub fn poll(&self, name: &str, waker: &Waker) -> bool {
        let mut state = self.lock();
        let Some(barrier) = state.known.get_mut(name) else { return false };
        let reached = barrier.ahead > 0;
        let old = match &barrier.waker {
            Some(old) if !reached && old.will_wake(waker) => None,
            _ => std::mem::replace(&mut barrier.waker, (!reached).then(|| waker.clone())),
        };
        // A waker may run any code when it is dropped.
        drop(state);
        drop(old);
        reached
    }

    /// Ends a wait: `passed` says that all peers have reached the barrier. Otherwise the wait was given up. In that
    /// case the announcement stands, and the next wait continues with it.
    pub fn leave(&self, name: &str, passed: bool) {
        let mut state = self.lock();
        let Some(barrier) = state.known.get_mut(name) else { return };
        barrier.awaited = false;
        let waker = barrier.waker.take();
        if passed {
            barrier.announced = false;
            barrier.ahead = barrier.ahead.saturating_sub(1);
        }
        let (announced, ahead) = (barrier.announced, barrier.ahead > 0);
        state.ours -= usize::from(!announced);
        state.theirs += usize::from(passed && ahead);
        if !announced && !ahead {
            state.known.remove(name);
        }
        drop(state);
        drop(waker);
    }

    /// Notes that the peer has reached the barrier. Returns a description of the violation if the protocol does not
    /// allow that.
    pub fn arrived(&self, name: &str) -> Result<(), &'static str> {
        let mut state = self.lock();
        let full = state.theirs >= MAX_AHEAD;
        match state.known.get_mut(name) {
            Some(barrier) if barrier.announced && barrier.ahead < 2 => {
                barrier.ahead += 1;
                let waker = barrier.waker.take();
                drop(state);
                waker.into_iter().for_each(Waker::wake);
                return Ok(());
            }
            // A future waits for the barrier, and is about to announce it.
            Some(barrier) if !barrier.announced && barrier.ahead == 0 && !full => barrier.ahead = 1,
            None if !full => _ = state.known.insert(name.into(), Barrier { ahead: 1, ..Barrier::default() }),
            Some(barrier) if barrier.ahead > 0 => {
                return Err("the peer reached a barrier again before this side passed it");
            }
            _ => return Err("the peer is ahead by more barriers than the protocol allows"),
        }
        state.theirs += 1;
        let waker = state.known.get_mut(name).and_then(|barrier| barrier.waker.take());
        drop(state);
        waker.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Wakes all waiters, because the peer is gone.
    pub fn wake_all(&self) {
        let wakers: Vec<_> =
            self.lock().known.values_mut().filter_map(|barrier| barrier.waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reached(barriers: &Barriers, name: &str) -> bool {
        barriers.poll(name, Waker::noop())
    }

    /// The numbers of barriers that are known, that are ahead on this side, and that are ahead on the peer's.
    fn rest(barriers: &Barriers) -> (usize, usize, usize) {
        let state = barriers.lock();
        (state.known.len(), state.ours, state.theirs)
    }

    #[test]
    fn whoever_comes_first() {
        let barriers = Barriers::default();
        for first in [true, false, true] {
            if first {
                barriers.arrived("a").unwrap();
                assert_eq!(rest(&barriers), (1, 0, 1));
            }
            assert_eq!(barriers.enter("a"), Ok(false));
            assert!(barriers.announce("a"));
            assert_eq!(reached(&barriers, "a"), first);
            if !first {
                barriers.arrived("b").unwrap();
                assert!(!reached(&barriers, "a"));
                barriers.arrived("a").unwrap();
                barriers.enter("b").unwrap();
                barriers.announce("b");
                barriers.leave("b", true);
            }
            assert!(reached(&barriers, "a"));
            barriers.leave("a", true);
            assert_eq!(rest(&barriers), (0, 0, 0));
        }
    }

    #[test]
    fn a_fast_peer_is_ahead_by_two_and_no_more() {
        let barriers = Barriers::default();
        barriers.enter("a").unwrap();
        barriers.announce("a");
        barriers.arrived("a").unwrap();
        // The peer has passed and arrived again before this side has polled.
        barriers.arrived("a").unwrap();
        assert!(barriers.arrived("a").is_err());
        barriers.leave("a", true);
        assert_eq!(rest(&barriers), (1, 0, 1));
        assert!(barriers.arrived("a").is_err());
        barriers.enter("a").unwrap();
        assert!(barriers.announce("a"));
        assert!(reached(&barriers, "a"));
        barriers.leave("a", true);
        assert_eq!(rest(&barriers), (0, 0, 0));
    }

    #[test]
    fn a_wait_that_was_given_up_is_taken_up_again() {
        let barriers = Barriers::default();
        // A wait that ends before its announcement leaves nothing behind.
        barriers.enter("a").unwrap();
        barriers.leave("a", false);
        assert_eq!(rest(&barriers), (0, 0, 0));
        barriers.enter("a").unwrap();
        assert_eq!(barriers.enter("a"), Err(Refusal::Awaited));
        assert!(barriers.announce("a"));
        barriers.leave("a", false);
        barriers.arrived("a").unwrap();
        assert_eq!(barriers.enter("a"), Ok(true));
        assert!(!barriers.announce("a"));
        assert!(reached(&barriers, "a"));
        barriers.leave("a", true);
        assert_eq!(rest(&barriers), (0, 0, 0));
    }

    #[test]
    fn neither_side_gathers_more_than_agreed() {
        let barriers = Barriers::default();
        for name in 0..MAX_AHEAD {
            barriers.arrived(&format!("theirs {name}")).unwrap();
            barriers.enter(&format!("ours {name}")).unwrap();
            assert!(barriers.announce(&format!("ours {name}")));
        }
        assert!(barriers.arrived("one more").is_err());
        assert_eq!(barriers.enter("one more"), Err(Refusal::TooMany));
        assert_eq!(barriers.enter("theirs 0"), Err(Refusal::TooMany));
        assert_eq!(rest(&barriers), (2 * MAX_AHEAD, MAX_AHEAD, MAX_AHEAD));
        // Once a barrier is passed, there is room for another one.
        barriers.arrived("ours 0").unwrap();
        barriers.leave("ours 0", true);
        barriers.enter("theirs 0").unwrap();
        assert!(barriers.announce("theirs 0"));
        barriers.leave("theirs 0", true);
        barriers.arrived("one more").unwrap();
        assert_eq!(rest(&barriers), (2 * MAX_AHEAD - 1, MAX_AHEAD - 1, MAX_AHEAD));
    }
}
