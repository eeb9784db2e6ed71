//! The address vector of an endpoint, and the peer slots that its addresses belong to.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Result};

use crate::objects::{Device, Fid};
use crate::settings;
use crate::status::call_error;

/// The owners of each inserted address.
#[derive(Default)]
pub(crate) struct AddressOwners(HashMap<sys::fi_addr_t, Owners>);

/// The slots that have an address. Two slots have one address where both sides have connected to each other. `slots`
/// is empty if the last slot has left, but the address must stay.
#[derive(Default)]
struct Owners {
    /// Arrivals from the address belong to the last slot of this list.
    slots: Vec<u32>,
    /// The backend never removes the address: the provider may still use its state of a former peer there.
    is_pinned: bool,
}

impl AddressOwners {
    /// The slot that arrivals from this address belong to.
    pub(crate) fn slot_of(&self, address: sys::fi_addr_t) -> Option<u32> {
        self.0.get(&address)?.slots.last().copied()
    }
}

/// An address vector. Control threads change it while the worker posts and polls.
pub(crate) struct AddressVector {
    av: Fid<sys::fid_av>,
    owners: Mutex<AddressOwners>,
    /// Whether posts and polls must hold the lock of `owners`.
    locks_endpoint: bool,
    device: Arc<Device>,
}

impl AddressVector {
    pub(crate) fn open(device: &Arc<Device>) -> Result<Arc<Self>> {
        // SAFETY: zero asks for nothing in particular; the domain is open.
        let av = unsafe {
            let mut attr: sys::fi_av_attr = std::mem::zeroed();
            attr.type_ = sys::FI_AV_TABLE;
            Fid::open("open", "its address vector", |av| {
                sys::fi_av_open(device.domain.as_ptr(), &raw mut attr, av, null_mut())
            })?
        };
        // Any thread may call a domain, but shm's progress walks its map of peers without a lock (1.17: it crashed
        // under the suite). With less than 8 bytes of completion data, a poll looks source addresses up in `owners`.
        let locks_endpoint = device.info.is_shm() || device.info.domain().cq_data_size < 8;
        Ok(Arc::new(Self { av, owners: Mutex::default(), locks_endpoint, device: Arc::clone(device) }))
    }

    /// Inserts the address of a slot's peer. The caller has checked its length. If another slot has the same address,
    /// arrivals from there belong to this slot from now on.
    ///
    /// Only with `is_only_endpoint`, if the device has no other endpoint, may this method remove an address for a
    /// moment: 2.1 walks lists of all peers of the device without a lock, whichever endpoint is polled.
    pub(crate) fn insert(&self, slot: u32, address: &[u8], is_only_endpoint: bool) -> Result<sys::fi_addr_t> {
        let mut owners = self.owners();
        let mut inserted = self.insert_raw(address)?;
        // EFA's provider may know an address that was never inserted here: it adds the source of a packet that arrived
        // late from a peer that is gone. The state of that address says that this side's handshake was already sent,
        // so the provider would not send it to the new peer. Removing and inserting the address resets this state.
        // With 1.17 the backend does not do this: 1.17 crashes if the address is removed while a write from there is
        // half received.
        let may_be_known = self.device.info.uses_efa_protocols() && !settings::lacks_native_writes();
        if may_be_known && is_only_endpoint && !owners.0.contains_key(&inserted) {
            self.remove_raw(inserted);
            inserted = self.insert_raw(address)?;
        }
        let slots = &mut owners.0.entry(inserted).or_default().slots;
        slots.retain(|other| *other != slot);
        slots.push(slot);
        Ok(inserted)
    }

    /// Whether an address belongs to both slots. That may be a former address, from which requests still come.
    pub(crate) fn shares_address(&self, one: u32, other: u32) -> bool {
        self.owners().0.values().any(|owners| [one, other].iter().all(|slot| owners.slots.contains(slot)))
    }

    /// Gives arrivals from the addresses of `slot` to the other slots that have the same addresses.
    pub(crate) fn demote(&self, slot: u32) {
        for Owners { slots, .. } in self.owners().0.values_mut() {
            if let Some(index) = slots.iter().position(|other| *other == slot) {
                slots[..=index].rotate_right(1);
            }
        }
    }

    /// Removes `slot`, to which nothing is posted any more. Removes its addresses, too, unless another slot has them.
    /// `is_pinned` pins the addresses of `slot`: they are never removed.
    ///
    /// shm always keeps addresses: a request of the peer that is still on its way crashes the process if the address is
    /// gone (`smr_progress_cmd`; 1.17). An endpoint of shm has room for 256 addresses in its life.
    pub(crate) fn remove(&self, slot: u32, is_pinned: bool) {
        let keeps_all = self.device.info.is_shm();
        self.owners().0.retain(|address, owners| {
            let Some(index) = owners.slots.iter().position(|other| *other == slot) else { return true };
            owners.slots.remove(index);
            owners.is_pinned |= is_pinned;
            let stays = !owners.slots.is_empty() || owners.is_pinned || keeps_all;
            if !stays {
                self.remove_raw(*address);
            }
            stays
        });
    }

    /// Locks the address vector for a post or a poll, so that no control thread inserts or removes. Returns `None`
    /// where the provider does not need this.
    pub(crate) fn lock_for_endpoint(&self) -> Option<MutexGuard<'_, AddressOwners>> {
        self.locks_endpoint.then(|| self.owners())
    }

    pub(crate) fn fid(&self) -> *mut sys::fid {
        self.av.fid()
    }

    fn insert_raw(&self, address: &[u8]) -> Result<sys::fi_addr_t> {
        let mut inserted = u64::MAX;
        // SAFETY: the caller of `insert` checked the length of the address, which is read only.
        let count = unsafe {
            let address = address.as_ptr().cast();
            sys::fi_av_insert(self.av.as_ptr(), address, 1, &raw mut inserted, 0, null_mut())
        };
        match count {
            1 => Ok(inserted),
            // Neither an error nor an address: shm is full.
            0 => {
                let why = "libfabric has no room for another peer's address (shm has room for 256, which peers that \
                           left keep): open the fabric anew";
                Err(Error::new(ErrorKind::Exhausted, "connect", why))
            }
            code => Err(call_error("connect", "the peer's address", code)),
        }
    }

    fn remove_raw(&self, mut address: sys::fi_addr_t) {
        // SAFETY: inserted before, and nothing of ours is posted to it, by the callers.
        let code = unsafe { sys::fi_av_remove(self.av.as_ptr(), &raw mut address, 1, 0) };
        if code != 0 {
            tracing::warn!(code, "libfabric does not remove an address");
        }
    }

    fn owners(&self) -> MutexGuard<'_, AddressOwners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
