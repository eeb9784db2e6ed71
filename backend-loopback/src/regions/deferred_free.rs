//! Memory that outlives its domain because an initiator may still access it.

use std::sync::{Arc, Mutex};

use multirail_spi::Memory;

use crate::inbound::Inbound;
use crate::segment::lease_table::Lease;

/// The deferred frees of all closed domains. Every registration sweeps them.
static DEFERRED: Mutex<Vec<DeferredFree>> = Mutex::new(Vec::new());

/// The memory of a closed region, and the peers. Each peer's lease says whether the peer is inside.
pub(super) struct DeferredFree {
    slot: usize,
    peers: Vec<Arc<Inbound>>,
    _memory: Arc<dyn Memory>,
}

impl DeferredFree {
    /// The memory that `slot` held in a domain that closes.
    pub(super) fn new(slot: usize, peers: Vec<Arc<Inbound>>, memory: Arc<dyn Memory>) -> Self {
        Self { slot, peers, _memory: memory }
    }

    fn is_quiescent(&self) -> bool {
        self.peers
            .iter()
            .all(|peer| peer.lease(self.slot).is_none_or(Lease::is_quiescent) || peer.is_initiator_gone())
    }
}

/// Keeps each of `memories` until no initiator is inside.
pub(super) fn defer(memories: impl Iterator<Item = DeferredFree>) {
    DEFERRED.lock().expect("deferred frees").extend(memories);
}

/// Frees the memory of all regions that are quiescent.
pub(super) fn sweep() {
    let mut deferred = DEFERRED.lock().expect("deferred frees");
    let quiescent: Vec<_> = deferred.extract_if(.., |memory| memory.is_quiescent()).collect();
    drop(deferred);
    // Memory that is dropped runs its owner's code, which may register: the lock must be free.
    drop(quiescent);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use multirail_spi::{Access, HostBuffer};

    use super::*;
    use crate::regions::Regions;
    use crate::segment::Segment;
    use crate::segment::lease_table::RegionKey;

    /// Memory whose owner registers other memory when it is dropped.
    struct RegistersOnDrop(HostBuffer, Sender<()>);

    // SAFETY: both methods return the buffer's own values.
    unsafe impl Memory for RegistersOnDrop {
        fn as_ptr(&self) -> *mut u8 {
            self.0.as_ptr()
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    impl Drop for RegistersOnDrop {
        fn drop(&mut self) {
            register(&Regions::default(), Arc::new(HostBuffer::new(8).unwrap()));
            let _ = self.1.send(());
        }
    }

    fn register(regions: &Regions, memory: Arc<dyn Memory>) -> RegionKey {
        regions.insert(memory, Access::REMOTE_WRITE).unwrap()
    }

    #[test]
    fn an_owner_may_register_when_its_memory_is_freed() {
        let (freed, was_freed) = channel();
        let inbound = Arc::new(Inbound::new(Segment::create().unwrap(), Arc::default(), [0; _], None));
        let regions = Regions::default();
        regions.add_peer(inbound.clone());
        let key = register(&regions, Arc::new(RegistersOnDrop(HostBuffer::new(8).unwrap(), freed)));
        regions.open(&inbound, key.to_wire()).unwrap();
        let lease = inbound.lease(key.slot as usize).unwrap();
        assert!(lease.enter(key.generation));
        regions.close(key);
        regions.retire(key);
        drop(regions);
        sweep();
        assert!(was_freed.try_recv().is_err(), "freed with an initiator inside");
        lease.leave();
        // A thread of its own: if the owner's code ran under the lock, it would take the lock twice and hang.
        std::thread::spawn(sweep);
        was_freed.recv_timeout(limit::HANG).expect("the owner's own code ran under the lock");
    }
}
