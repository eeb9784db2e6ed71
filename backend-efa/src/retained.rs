//! Retains the memory of dropped regions that libfabric may still touch.
//!
//! A provider without cards checks a key when a peer's write or read begins, and moves the bytes later, while its
//! endpoint is polled (`xnet_op_write` over tcp, `smr_progress_cmd_rma` over shm; so does `efa` of 1.17, which emulates
//! writes). Closing the registration does not stop that copy, and nothing tells when it ends: a peer that was stopped in
//! the middle of a write goes on much later, over a connection that libfabric keeps open when the peer's address is
//! removed. Only a closed endpoint touches nothing. So the memory of such a region lives until the endpoints that
//! were open when it was dropped are closed; `endpoint_replacement.rs` opens another endpoint to bring that about.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::Memory;

use crate::objects::Device;

/// What a device retains.
#[derive(Default)]
pub(crate) struct RetainedMemory {
    state: Mutex<State>,
    bytes: AtomicU64,
}

#[derive(Default)]
struct State {
    next: u64,
    open: Vec<Open>,
    retained: Vec<Retained>,
}

/// An endpoint that may touch memory after its registration is closed.
struct Open {
    number: u64,
    /// Somebody was told its address.
    is_known: bool,
}

struct Retained {
    memory: Arc<dyn Memory>,
    /// The newest endpoint that may touch it.
    newest: u64,
}

impl RetainedMemory {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are retained.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Somebody is about to be told the address of an endpoint.
    pub(crate) fn endpoints_are_known(&self) {
        self.lock().open.iter_mut().for_each(|endpoint| endpoint.is_known = true);
    }

    /// Takes the memory of a region whose registration is closed, or is about to be. Lets go of it at once where no
    /// endpoint can be touching it.
    pub(crate) fn retain(&self, memory: Arc<dyn Memory>) {
        let mut state = self.lock();
        let Some(newest) = state.open.iter().rfind(|endpoint| endpoint.is_known).map(|known| known.number)
        else {
            // An owner's code, which must not run under the lock.
            drop(state);
            return drop(memory);
        };
        self.bytes.fetch_add(memory.len() as u64, Ordering::Relaxed);
        state.retained.push(Retained { memory, newest });
    }

    fn open(&self) -> u64 {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.open.push(Open { number, is_known: false });
        number
    }

    fn close(&self, number: u64) {
        let mut state = self.lock();
        state.open.retain(|endpoint| endpoint.number != number);
        let oldest = state.open.first().map_or(u64::MAX, |endpoint| endpoint.number);
        let released: Vec<_> = state.retained.extract_if(.., |retained| retained.newest < oldest).collect();
        let bytes: u64 = released.iter().map(|released| released.memory.len() as u64).sum();
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        // Owners' code, which must not run under the lock.
        drop(state);
        drop(released);
    }
}

/// An open endpoint of a device that retains memory. Dropped once the endpoint is closed.
pub(crate) struct OpenEndpoint {
    device: Arc<Device>,
    number: u64,
}

impl OpenEndpoint {
    /// Announces an endpoint that is open, and that nobody knows yet.
    pub(crate) fn announce(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), number: device.retained.open() }
    }
}

impl Drop for OpenEndpoint {
    fn drop(&mut self) {
        self.device.retained.close(self.number);
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::HostBuffer;

    use super::*;

    /// Memory, and whether it is retained.
    fn dropped(retained: &RetainedMemory) -> impl Fn() -> bool {
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        retained.retain(Arc::clone(&memory) as _);
        move || Arc::strong_count(&memory) > 1
    }

    #[test]
    fn memory_lives_as_long_as_the_endpoints_that_were_known_when_it_was_dropped() {
        let retained = RetainedMemory::default();
        let first = retained.open();
        assert!(!dropped(&retained)(), "nobody knows the endpoint");
        retained.endpoints_are_known();
        let one = dropped(&retained);
        let second = retained.open();
        let two = dropped(&retained);
        retained.endpoints_are_known();
        let three = dropped(&retained);
        assert!(one() && two() && three());
        assert_eq!(retained.bytes(), 3 * 4096);
        retained.close(first);
        assert!(!one() && !two() && three());
        retained.close(second);
        assert!(!three() && !dropped(&retained)());
        assert_eq!(retained.bytes(), 0);
    }

    #[test]
    fn an_older_endpoint_that_is_still_open_holds_what_a_newer_one_let_go() {
        let retained = RetainedMemory::default();
        let (first, second) = (retained.open(), retained.open());
        retained.endpoints_are_known();
        let is_retained = dropped(&retained);
        retained.close(second);
        assert!(is_retained());
        retained.close(first);
        assert!(!is_retained());
    }
}
