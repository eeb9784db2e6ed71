//! Memory that outlives its domain because a writer may still hit it.

use std::sync::{Arc, Mutex};

use multirail_spi::Memory;

use crate::peer::Inbound;

/// Those of all closed domains; swept by every registration.
static ORPHANS: Mutex<Vec<Orphan>> = Mutex::new(Vec::new());

/// The memory of a closed region, and the boards that tell who is inside.
pub(crate) struct Orphan {
    slot: usize,
    boards: Vec<Arc<Inbound>>,
    _memory: Arc<dyn Memory>,
}

impl Orphan {
    /// What `slot` held in a domain that is going.
    pub(crate) fn new(slot: usize, boards: Vec<Arc<Inbound>>, memory: Arc<dyn Memory>) -> Self {
        Self { slot, boards, _memory: memory }
    }

    fn is_quiet(&self) -> bool {
        self.boards.iter().all(|board| board.has_departed() || board.layout().board[self.slot].is_quiet())
    }
}

/// Keeps `orphans` until they are quiet.
pub(crate) fn adopt(orphans: impl Iterator<Item = Orphan>) {
    ORPHANS.lock().expect("orphans").extend(orphans);
}

/// Frees what has become quiet.
pub(crate) fn sweep() {
    let quiet: Vec<_> = ORPHANS.lock().expect("orphans").extract_if(.., |orphan| orphan.is_quiet()).collect();
    // Owners run their own code when dropped: outside of the lock.
    drop(quiet);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use multirail_spi::{Access, HostBuffer};

    use super::*;
    use crate::region::{Key, Regions};
    use crate::segment::Segment;

    /// Memory whose owner registers other memory when it goes.
    struct Heir(HostBuffer, Sender<()>);

    // SAFETY: the buffer's own answers.
    unsafe impl Memory for Heir {
        fn as_ptr(&self) -> *mut u8 {
            self.0.as_ptr()
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    impl Drop for Heir {
        fn drop(&mut self) {
            register(&Regions::default(), Arc::new(HostBuffer::new(8).unwrap()));
            let _ = self.1.send(());
        }
    }

    fn register(regions: &Regions, memory: Arc<dyn Memory>) -> Key {
        regions.insert(memory, Access::REMOTE_WRITE).unwrap()
    }

    #[test]
    fn an_owner_may_register_when_its_orphan_is_freed() {
        let (freed, hear) = channel();
        let inbound = Arc::new(Inbound::new(Segment::create().unwrap(), Arc::default(), [0; _]));
        let regions = Regions::default();
        regions.add_board(inbound.clone());
        let key = register(&regions, Arc::new(Heir(HostBuffer::new(8).unwrap(), freed)));
        let lease = &inbound.layout().board[key.slot as usize];
        assert!(lease.enter(key.generation));
        regions.close(key);
        regions.bury(key);
        drop(regions);
        sweep();
        assert!(hear.try_recv().is_err(), "freed with a writer inside");
        lease.leave();
        // On a thread of its own: a lock taken twice would hang it.
        std::thread::spawn(sweep);
        hear.recv_timeout(Duration::from_secs(5)).expect("the owner's own code ran under the lock");
    }
}
