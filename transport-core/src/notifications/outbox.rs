//! The memory that notifications are sent from.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::HashMap;

use super::{BLOCK, buffers};
use crate::engine::memory::RegionInner;
use crate::{Error, ErrorKind, PeerId, Result};

/// The memory that a fabric sends notifications from, in blocks of one fragment each.
pub(crate) struct Outbox {
    region: Arc<RegionInner>,
    blocks: Mutex<Blocks>,
}

struct Blocks {
    free: Vec<u32>,
    /// How many blocks hold fragments for each peer that has any.
    held: HashMap<PeerId, usize>,
}

/// Blocks of an outbox, one per fragment. Dropping them frees them.
pub(crate) struct HeldBlocks {
    pub outbox: Arc<Outbox>,
    numbers: Vec<u32>,
    peer: PeerId,
}

impl Outbox {
    /// An outbox in a region that is registered on all companions.
    pub fn new(region: Arc<RegionInner>) -> Self {
        let free = (0..buffers(region.len() as usize)).collect();
        Self { region, blocks: Mutex::new(Blocks { free, held: HashMap::default() }) }
    }

    pub fn region(&self) -> &Arc<RegionInner> {
        &self.region
    }

    /// Takes blocks for a notification to a peer. A peer may hold no more blocks than are free: then one that takes
    /// nothing leaves half of the memory to the others.
    pub fn take(self: &Arc<Self>, peer: PeerId, count: usize, operation: &'static str) -> Result<HeldBlocks> {
        let mut blocks = self.lock();
        blocks.check_room(peer, count, operation)?;
        let free = blocks.free.len();
        *blocks.held.entry(peer).or_default() += count;
        let numbers = blocks.free.split_off(free - count);
        Ok(HeldBlocks { outbox: Arc::clone(self), numbers, peer })
    }

    /// Refuses a notification to a peer that [`Outbox::take`] would refuse now.
    pub fn check_room(&self, peer: PeerId, count: usize, operation: &'static str) -> Result<()> {
        self.lock().check_room(peer, count, operation)
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn check_room(&self, peer: PeerId, count: usize, operation: &'static str) -> Result<()> {
        let (held, free) = (self.held.get(&peer).copied().unwrap_or(0), self.free.len());
        if held + count > free {
            let why = format!(
                "notifications to this peer hold {held} of this side's blocks of {BLOCK} bytes, {free} are free, and this one \
                 takes {count}; await some of them, or give FabricBuilder::notifications more memory"
            );
            return Err(Error::new(ErrorKind::Busy, operation, why));
        }
        Ok(())
    }
}

impl HeldBlocks {
    /// The number of blocks.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Takes one of the blocks away, if there is one left.
    pub fn split_one(&mut self) -> Option<Self> {
        let numbers = vec![self.numbers.pop()?];
        Some(Self { outbox: Arc::clone(&self.outbox), numbers, peer: self.peer })
    }

    /// Where the block of a fragment begins in the region.
    pub fn offset(&self, fragment: usize) -> usize {
        self.numbers[fragment] as usize * BLOCK
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        let mut blocks = self.outbox.lock();
        blocks.free.extend_from_slice(&self.numbers);
        if let Some(held) = blocks.held.get_mut(&self.peer) {
            *held -= self.numbers.len();
            if *held == 0 {
                blocks.held.remove(&self.peer);
            }
        }
    }
}
