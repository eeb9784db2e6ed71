//! Retains the memory of dropped regions that a backend may still touch.
//!
//! A backend of [`Revocation::Late`](crate::spi::Revocation::Late) checks a key when a peer's write or read begins,
//! and moves the bytes later, while its endpoint is polled. libfabric's software providers do so (`xnet_op_write` over
//! tcp, `smr_progress_cmd_rma` over shm), and so does its `efa` of 1.17, which emulates writes. Deregistration does
//! not stop such a copy, and the backend does not report the end of the copy. A peer that was stopped in the middle of
//! a write may continue much later, even after this side took the peer for dead. Only a closed endpoint touches no
//! memory. So the memory lives until the endpoints are closed. Its pages go back to the system when a
//! later region is dropped, if the memory has no other owner by then ([`Memory::discard`]).

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Memory;
use crate::spi::Domain;

/// The memory of dropped regions of one fabric. Held by the rails that may touch it.
#[derive(Default)]
pub struct RetainedMemory {
    /// Whether a peer was told how to reach a rail.
    is_reachable: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Memory that had another owner at the last scan, by its address: a user, or the region that was being dropped.
    shared: HashMap<usize, Arc<dyn Memory>>,
    /// The number of entries of `shared` at which the next scan runs.
    next_scan: usize,
    /// Memory that has no other owner.
    unshared: Vec<Arc<dyn Memory>>,
}

impl RetainedMemory {
    /// Notes that peers may reach the rails from now on.
    pub fn set_reachable(&self) {
        self.is_reachable.store(true, Ordering::Release);
    }

    /// Takes the memory of a region whose registrations are closed, unless no peer can have reached it.
    pub fn retain(&self, memory: &Arc<dyn Memory>) {
        if !self.is_reachable.load(Ordering::Acquire) {
            return;
        }
        // This is an owner's code, which must not run under the lock. If it panics, the memory is leaked: an endpoint
        // may touch it.
        let mut unshared = ManuallyDrop::new(self.lock().add(memory));
        unshared.iter_mut().for_each(discard);
        self.lock().unshared.append(&mut ManuallyDrop::into_inner(unshared));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds memory. Takes out the memory that has no other owner any more, if a scan for it is due.
    fn add(&mut self, memory: &Arc<dyn Memory>) -> Vec<Arc<dyn Memory>> {
        let mut unshared = Vec::new();
        if self.shared.len() >= self.next_scan {
            let is_alone = |_: &usize, memory: &mut Arc<dyn Memory>| Arc::get_mut(memory).is_some();
            unshared.extend(self.shared.extract_if(is_alone).map(|(_, memory)| memory));
            self.next_scan = 2 * self.shared.len();
        }
        self.shared.insert(Arc::as_ptr(memory).cast::<u8>() as usize, Arc::clone(memory));
        unshared
    }
}

/// Gives the pages of `memory` back to the system if it has no other owner.
fn discard(memory: &mut Arc<dyn Memory>) {
    let Some(memory) = Arc::get_mut(memory) else { return };
    if let Err(error) = memory.discard() {
        tracing::warn!(%error, len = memory.len(), "the memory of a dropped region stays allocated until the fabric is closed");
    }
}

/// A rail's handle of the retained memory. It must be dropped after the rail's endpoint.
pub struct RetainedByRail {
    pub memory: Arc<RetainedMemory>,
    pub domain: Arc<dyn Domain>,
}

impl Drop for RetainedByRail {
    fn drop(&mut self) {
        if self.domain.unclosed_endpoints() > 0 {
            tracing::warn!(
                "the backend has not closed an endpoint: the memory of dropped regions is never freed"
            );
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "an owner of memory")]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::spi::HostBuffer;

    fn buffer() -> Arc<dyn Memory> {
        Arc::new(HostBuffer::new(4096).unwrap())
    }

    #[test]
    fn memory_is_kept_once_peers_may_reach_it() {
        let (retained, one, two) = (RetainedMemory::default(), buffer(), buffer());
        retained.retain(&one);
        assert_eq!(Arc::strong_count(&one), 1);
        retained.set_reachable();
        retained.retain(&one);
        retained.retain(&two);
        // Memory that is registered again and again is retained once.
        retained.retain(&two);
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (2, 2));
        drop(retained);
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (1, 1));
    }

    #[test]
    fn pages_go_back_once_nobody_else_has_the_memory() {
        let retained = RetainedMemory::default();
        retained.set_reachable();
        let (kept, dropped) = (buffer(), buffer());
        retained.retain(&kept);
        retained.retain(&dropped);
        let address = dropped.as_ptr();
        drop(dropped);
        for _ in 0..3 {
            retained.retain(&buffer());
        }
        let state = retained.lock();
        assert!(state.shared.values().any(|memory| memory.as_ptr() == kept.as_ptr()));
        let dropped = state.unshared.iter().find(|memory| memory.as_ptr() == address).unwrap();
        #[cfg(unix)]
        assert!(dropped.shared_file().is_none(), "its pages are others now");
        assert!(state.shared.len() <= 3, "the scans are as rare as that");
    }

    /// Memory whose owner panics when it is to give pages back.
    struct Panics(HostBuffer, #[expect(dead_code, reason = "tells who lives")] Arc<()>);

    // SAFETY: the buffer's.
    unsafe impl Memory for Panics {
        fn as_ptr(&self) -> *mut u8 {
            self.0.as_ptr()
        }

        fn len(&self) -> usize {
            self.0.len()
        }

        fn discard(&mut self) -> crate::Result<()> {
            panic!("an owner's fault")
        }
    }

    #[test]
    fn memory_whose_owner_panics_is_not_freed() {
        let retained = RetainedMemory::default();
        retained.set_reachable();
        let held = Arc::new(());
        let memory: Arc<dyn Memory> = Arc::new(Panics(HostBuffer::new(4096).unwrap(), Arc::clone(&held)));
        retained.retain(&memory);
        drop(memory);
        let next = catch_unwind(AssertUnwindSafe(|| retained.retain(&buffer())));
        assert!(next.is_err(), "the owner was asked");
        assert_eq!(Arc::strong_count(&held), 2, "an endpoint may still touch it");
    }
}
