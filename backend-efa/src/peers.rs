//! Peer slots: reserved and ended by the control side, read by the endpoint.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libfabric_sys::fi_addr_t;
use transport_core::spi::PeerSlot;
use transport_core::{Error, ErrorKind, Result};

use crate::tag::Tag;

/// A connected peer, as requests need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub address: fi_addr_t,
    /// Its slot for us, which goes with all that we send.
    pub slot: u32,
    /// Where writes without bytes go.
    pub landing: Landing,
}

/// A registered place for writes without bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Landing {
    pub base: u64,
    pub key: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    /// Offered to a peer that has not answered.
    Offered,
    Up(Remote),
    /// Ended by this side: the endpoint says when its last request is over.
    Leaving(Option<Remote>),
}

/// All slots of a domain.
#[derive(Default)]
pub(crate) struct Peers {
    slots: Mutex<Vec<Slot>>,
    /// Counts changes, so that the endpoint looks only when there was one.
    changes: AtomicU64,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn reserve(&self) -> Result<PeerSlot> {
        let mut slots = self.lock();
        let index = match slots.iter().position(|slot| *slot == Slot::Free) {
            Some(index) => index,
            None if slots.len() < Tag::SLOTS as usize => {
                slots.push(Slot::Free);
                slots.len() - 1
            }
            None => return Err(Error::new(ErrorKind::Exhausted, "connect", "every peer slot is taken")),
        };
        slots[index] = Slot::Offered;
        Ok(PeerSlot(index as u32))
    }

    /// Brings an offered slot up with what `insert` gives.
    pub(crate) fn complete(&self, slot: PeerSlot, insert: impl FnOnce() -> Result<Remote>) -> Result<()> {
        let mut slots = self.lock();
        let slot = slots.get_mut(slot.0 as usize).filter(|slot| **slot == Slot::Offered);
        let gone = || Error::new(ErrorKind::Closed, "connect", "the connection ended before it was made");
        *slot.ok_or_else(gone)? = Slot::Up(insert()?);
        self.changed();
        Ok(())
    }

    pub(crate) fn leave(&self, slot: PeerSlot) {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(slot.0 as usize) else { return };
        match *slot {
            Slot::Offered => *slot = Slot::Leaving(None),
            Slot::Up(remote) => *slot = Slot::Leaving(Some(remote)),
            Slot::Free | Slot::Leaving(_) => return,
        }
        self.changed();
    }

    /// The slot may be offered anew.
    pub(crate) fn free(&self, slot: PeerSlot) {
        self.lock()[slot.0 as usize] = Slot::Free;
        self.changed();
    }

    /// Copies the slots if anything changed since the count in `seen`.
    pub(crate) fn refresh(&self, seen: &mut u64, into: &mut Vec<Slot>) -> bool {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return false;
        }
        *seen = changes;
        into.clone_from(&self.lock());
        true
    }

    pub(crate) fn is_up(&self, slot: PeerSlot) -> bool {
        matches!(self.lock().get(slot.0 as usize), Some(Slot::Up(_)))
    }
}
