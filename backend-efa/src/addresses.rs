//! The address vector of an endpoint: peers' addresses, inserted by the control thread.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Result};

use crate::objects::{Device, Fid};
use crate::settings;
use crate::status::refused;

/// Whose each inserted address is.
#[derive(Default)]
pub(crate) struct Owners(HashMap<sys::fi_addr_t, Sharers>);

/// The slots of an address: several where two sides have connected to each other. None, where it
/// stays with the provider though nobody has it any more.
#[derive(Default)]
struct Sharers {
    /// What comes from there is told as the last one's.
    slots: Vec<u32>,
    /// The provider has not forgotten everything that was, and is to keep it.
    is_haunted: bool,
}

impl Owners {
    /// Whose what comes from that address is.
    pub(crate) fn of(&self, address: sys::fi_addr_t) -> Option<u32> {
        self.0.get(&address)?.slots.last().copied()
    }
}

pub(crate) struct Addresses {
    av: Fid<sys::fid_av>,
    owners: Mutex<Owners>,
    /// Whether the endpoint takes turns with the control thread.
    takes_turns: bool,
    device: Arc<Device>,
}

impl Addresses {
    pub(crate) fn open(device: &Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: zero asks for nothing in particular; the domain is open.
        let av = unsafe {
            let mut attr: sys::fi_av_attr = std::mem::zeroed();
            attr.type_ = sys::FI_AV_TABLE;
            Fid::open("open", "its address vector", |av| {
                sys::fi_av_open(device.domain.as_ptr(), &raw mut attr, av, null_mut())
            })?
        };
        // Domains are open for any thread, but shm's progress walks its map of peers without a lock
        // (1.17: it crashed under the suite). Cards' completions name peers by their addresses.
        let takes_turns = device.info.is_shm() || device.info.domain().cq_data_size < 8;
        Ok(Arc::new(Self { av, owners: Mutex::default(), takes_turns, device: Arc::clone(device) }))
    }

    /// Inserts an address of `slot`'s peer, which is as long as this provider's are. Where it is
    /// known already, what comes from there is that peer's from now on.
    ///
    /// `alone` says that the device has no other endpoint: 2.1 walks lists of all its peers unlocked,
    /// whichever endpoint is polled.
    pub(crate) fn insert(&self, slot: u32, address: &[u8], alone: bool) -> Result<sys::fi_addr_t> {
        let mut owners = self.owners();
        let mut inserted = self.put(address)?;
        // EFA's provider knows addresses by itself, of whatever it has received late from a peer that was
        // gone: with them, what that peer was told of this side, and will not be told again. Taken out
        // while a write from there is half received, one crashes 1.17.
        let knows_unasked = self.device.info.has_states() && !settings::is_before_native_writes();
        if knows_unasked && alone && !owners.0.contains_key(&inserted) {
            self.take(inserted);
            inserted = self.put(address)?;
        }
        let slots = &mut owners.0.entry(inserted).or_default().slots;
        slots.retain(|other| *other != slot);
        slots.push(slot);
        Ok(inserted)
    }

    /// What comes from addresses that `slot` shares is the others' from now on.
    pub(crate) fn demote(&self, slot: u32) {
        for Sharers { slots, .. } in self.owners().0.values_mut() {
            if let Some(place) = slots.iter().position(|other| *other == slot) {
                slots[..=place].rotate_right(1);
            }
        }
    }

    fn put(&self, address: &[u8]) -> Result<sys::fi_addr_t> {
        let mut inserted = u64::MAX;
        // SAFETY: the caller of `insert` checked the length of the address, which is read only.
        let count = unsafe {
            let address = address.as_ptr().cast();
            sys::fi_av_insert(self.av.as_ptr(), address, 1, &raw mut inserted, 0, null_mut())
        };
        match count {
            1 => Ok(inserted),
            // No error, and no address: `shm` has 256 places for the life of an endpoint.
            0 => {
                let why = "libfabric has no place left for a peer's address (shm has 256, also for peers that left): \
                           open the fabric anew";
                Err(Error::new(ErrorKind::Exhausted, "connect", why))
            }
            code => Err(refused("connect", "the peer's address", code)),
        }
    }

    fn take(&self, mut address: sys::fi_addr_t) {
        // SAFETY: inserted before, and nothing of ours is posted to it, by the callers.
        let code = unsafe { sys::fi_av_remove(self.av.as_ptr(), &raw mut address, 1, 0) };
        if code != 0 {
            tracing::warn!(code, "libfabric does not remove an address");
        }
    }

    /// Forgets what is `slot`'s alone; nothing is posted by it any more. The provider is to keep the
    /// address where `is_haunted`: it has not forgotten everything that was.
    ///
    /// On shm it always keeps it: a request of the peer's that is still on its way crashes the
    /// process when the address is gone (`smr_progress_cmd`; 1.17). Its 256 places last for a
    /// endpoint's life.
    pub(crate) fn remove(&self, slot: u32, is_haunted: bool) {
        let keeps_all = self.device.info.is_shm();
        self.owners().0.retain(|address, sharers| {
            let Some(place) = sharers.slots.iter().position(|other| *other == slot) else { return true };
            sharers.slots.remove(place);
            sharers.is_haunted |= is_haunted;
            let stays = !sharers.slots.is_empty() || sharers.is_haunted || keeps_all;
            if !stays {
                self.take(*address);
            }
            stays
        });
    }

    /// For who posts or polls: while it is held nobody inserts or removes, where that matters.
    pub(crate) fn guard(&self) -> Option<MutexGuard<'_, Owners>> {
        self.takes_turns.then(|| self.owners())
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fid(&self) -> *mut sys::fid {
        self.av.fid()
    }
}
