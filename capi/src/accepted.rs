//! The peers that have connected to a fabric.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use multirail::{Listener, Peer, wait};

use crate::abi::*;
use crate::failure::Failure;
use crate::transfer_options::limit;

/// A thread that takes peers from a listener as they come. So a connection is complete whether or not the program asks
/// for its peers, and the listener's queue never fills.
pub struct Accepted {
    peers: Arc<Peers>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Peers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The peers that the program has not taken, in the order in which they came.
    waiting: VecDeque<Peer>,
    /// Whether the listener has ended.
    has_ended: bool,
}

impl Accepted {
    pub fn new(listener: Listener) -> Result<Self, Failure> {
        let peers = Arc::<Peers>::default();
        let of_thread = Arc::clone(&peers);
        let accept = move || {
            // Ends with the fabric.
            while let Ok(Ok(peer)) = wait(listener.accept(), limit(MR_FOREVER)) {
                of_thread.add(peer);
            }
            of_thread.lock().has_ended = true;
            of_thread.changed.notify_all();
        };
        let thread = thread::Builder::new().name("multirail-accept".into()).spawn(accept);
        let thread = thread.map_err(|why| {
            Failure::new(MR_ERROR_EXHAUSTED, format!("the system starts no thread for the listener: {why}"))
        })?;
        Ok(Self { peers, thread: Mutex::new(Some(thread)) })
    }

    /// The next peer that was not taken; `None` after `limit`.
    pub fn next(&self, limit: Duration) -> Result<Option<Peer>, Failure> {
        let started = Instant::now();
        let mut state = self.peers.lock();
        loop {
            if let Some(peer) = state.waiting.pop_front() {
                return Ok(Some(peer));
            }
            if state.has_ended {
                return Err(Failure::new(MR_ERROR_CLOSED, "the fabric is closed"));
            }
            let Some(left) = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            let waited = self.peers.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the end of the thread, after the fabric was closed.
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread's panic was printed, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, peer: Peer) {
        let mut state = self.lock();
        // Peers that come and go must not add up, whether or not the program takes them.
        state.waiting.retain(Peer::is_alive);
        state.waiting.push_back(peer);
        drop(state);
        self.changed.notify_one();
    }
}
