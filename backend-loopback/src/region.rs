//! The table of registered memory: who owns it, who may touch it, and when it may be freed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use multirail_spi::{Access, Error, ErrorKind, Memory, MemoryKind, Result};

mod lookup;

pub(crate) use lookup::Local;

use crate::board::{Lease, SLOTS};
use crate::orphan::{self, Orphan};
use crate::peer::Inbound;

/// A region's slot and generation. Generations start at 1 and never come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl Key {
    /// As it travels.
    pub(crate) fn to_wire(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    /// From a peer's number, if a key can look like this.
    pub(crate) fn from_wire(key: u64) -> Option<Self> {
        let (slot, generation) = (key as u32, (key >> 32) as u32);
        ((slot as usize) < SLOTS && generation != 0).then_some(Self { slot, generation })
    }
}

/// All regions of a domain and the boards that guard them.
#[derive(Default)]
pub(crate) struct Regions {
    state: Mutex<State>,
    graves: AtomicUsize,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    free: Vec<u32>,
    boards: Vec<Board>,
    /// Slots whose owner let go while a writer was still inside.
    graves: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    entry: Option<Entry>,
    /// Staged copies of ours under way: no peer's word to spoil.
    inside: u32,
}

struct Entry {
    memory: Arc<dyn Memory>,
    access: Access,
    #[cfg(target_os = "linux")]
    shared: bool,
    closed: bool,
}

struct Board {
    inbound: Arc<Inbound>,
    leaving: bool,
}

impl Regions {
    /// Enters `memory` in the table and on every board.
    pub(crate) fn insert(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Key> {
        match memory.kind() {
            MemoryKind::Host => {}
            // What its copies need is made ready here, where it holds nobody up.
            MemoryKind::Cuda { device } => cuda::Device::open(device)?.prepare()?,
            kind => {
                let context = format!("loopback copies memory of the host and of GPUs, not {kind:?}");
                return Err(Error::new(ErrorKind::Unsupported, "register", context));
            }
        }
        self.sweep();
        orphan::sweep();
        #[cfg(target_os = "linux")]
        let shared =
            memory.shared_file().is_some_and(|file| crate::mapping::is_shareable(file, memory.len()));
        let mut state = self.lock();
        let slot = match state.free.pop() {
            Some(slot) => slot,
            None if state.slots.len() < SLOTS => {
                state.slots.push(Slot::default());
                state.slots.len() as u32 - 1
            }
            None => {
                let context = format!("{SLOTS} regions are registered: drop some, or register larger ones");
                return Err(Error::new(ErrorKind::Exhausted, "register", context));
            }
        };
        let entry = &mut state.slots[slot as usize];
        entry.generation += 1;
        entry.entry = Some(Entry {
            memory,
            access,
            #[cfg(target_os = "linux")]
            shared,
            closed: false,
        });
        let generation = entry.generation;
        for board in state.boards.iter().filter(|board| !board.leaving) {
            board.inbound.open(slot as usize, generation);
        }
        Ok(Key { slot, generation })
    }

    /// Admits a new peer to all regions, unless it was disconnected meanwhile.
    pub(crate) fn add_board(&self, inbound: Arc<Inbound>) {
        self.sweep_boards();
        let mut state = self.lock();
        // A later disconnect finds the board: it closes `inbound` first, and takes the lock then.
        if inbound.is_closed() {
            return;
        }
        for (number, slot) in state.slots.iter().enumerate() {
            if slot.entry.as_ref().is_some_and(|entry| !entry.closed) {
                inbound.open(number, slot.generation);
            }
        }
        state.boards.push(Board { inbound, leaving: false });
    }

    /// Locks a peer out of all regions. Its board is kept until it is quiet.
    pub(crate) fn remove_board(&self, inbound: &Arc<Inbound>) {
        let mut state = self.lock();
        if let Some(board) = state.boards.iter_mut().find(|board| Arc::ptr_eq(&board.inbound, inbound)) {
            board.leaving = true;
            inbound.leases().iter().for_each(Lease::close);
        }
        drop(state);
        self.sweep_boards();
    }

    /// Frees what has become quiet. Cheap when nothing waits.
    pub(crate) fn sweep(&self) {
        if self.graves.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut freed = Vec::new();
        let mut state = self.lock();
        for slot in std::mem::take(&mut state.graves) {
            if state.is_quiet(slot) {
                freed.extend(state.release(slot));
            } else {
                state.graves.push(slot);
            }
        }
        self.graves.store(state.graves.len(), Ordering::Relaxed);
        drop(state);
        // Owners run their own code when dropped: outside of the lock.
        drop(freed);
    }

    fn sweep_boards(&self) {
        let mut state = self.lock();
        state.boards.retain(|board| {
            let quiet = || board.inbound.leases().iter().all(Lease::is_quiet);
            !board.leaving || !(board.inbound.has_departed() || quiet())
        });
    }

    /// Lets nobody into a region any more.
    pub(crate) fn close(&self, key: Key) {
        let mut state = self.lock();
        if let Some(entry) = &mut state.slots[key.slot as usize].entry {
            entry.closed = true;
        }
        for board in &state.boards {
            board.inbound.leases().get(key.slot as usize).inspect(|lease| lease.close());
        }
    }

    /// Whether nobody is inside it.
    pub(crate) fn is_quiet(&self, key: Key) -> bool {
        self.lock().is_quiet(key.slot)
    }

    /// Frees a closed region's slot and memory, now or once it is quiet.
    pub(crate) fn bury(&self, key: Key) {
        let mut state = self.lock();
        if state.is_quiet(key.slot) {
            let memory = state.release(key.slot);
            drop(state);
            drop(memory);
        } else {
            state.graves.push(key.slot);
            self.graves.store(state.graves.len(), Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("region table")
    }
}

impl State {
    fn is_quiet(&self, slot: u32) -> bool {
        let staged = self.slots[slot as usize].inside > 0;
        !staged
            && self.boards.iter().all(|board| {
                let lease = board.inbound.leases().get(slot as usize);
                lease.is_none_or(Lease::is_quiet) || board.inbound.has_departed()
            })
    }

    fn release(&mut self, slot: u32) -> Option<Arc<dyn Memory>> {
        let entry = &mut self.slots[slot as usize];
        if entry.generation < u32::MAX {
            self.free.push(slot);
        }
        entry.entry.take().map(|entry| entry.memory)
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        self.sweep();
        let state = self.state.get_mut().expect("region table");
        let boards: Vec<_> = state.boards.iter().map(|board| board.inbound.clone()).collect();
        let graves = std::mem::take(&mut state.graves);
        let orphans = graves.into_iter().filter_map(|slot| {
            let memory = state.slots[slot as usize].entry.take()?.memory;
            Some(Orphan::new(slot as usize, boards.clone(), memory))
        });
        orphan::adopt(orphans);
    }
}
