//! The address vector of a lane: peers' addresses, inserted by the control thread.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libfabric_sys as sys;
use transport_core::Result;

use crate::objects::{Device, Fid};
use crate::status::refused;

/// Whose each inserted address is, by slot.
pub(crate) type Owners = HashMap<sys::fi_addr_t, u32>;

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
        let takes_turns = device.info.provider() == "shm" || device.info.domain().cq_data_size < 8;
        Ok(Arc::new(Self { av, owners: Mutex::default(), takes_turns, device: Arc::clone(device) }))
    }

    /// Inserts an address of `slot`'s peer, which is as long as this provider's are. Where it is
    /// known already, it is that peer's from now on.
    pub(crate) fn insert(&self, slot: u32, address: &[u8]) -> Result<sys::fi_addr_t> {
        let mut inserted = u64::MAX;
        let mut owners = self.owners();
        // SAFETY: the caller checked the length of the address, which is read only.
        let count = unsafe {
            let address = address.as_ptr().cast();
            sys::fi_av_insert(self.av.as_ptr(), address, 1, &raw mut inserted, 0, null_mut())
        };
        match count {
            1 => {
                owners.insert(inserted, slot);
                Ok(inserted)
            }
            code => Err(refused("connect", "the peer's address", code)),
        }
    }

    /// Forgets what is `slot`'s; nothing is posted to it any more. The provider is to keep the
    /// address where `is_haunted`: it has not forgotten everything that was.
    ///
    /// On shm it always keeps it: a request of the peer's that is still on its way crashes the
    /// process when the address is gone (`smr_progress_cmd`; 1.17). Its 256 places last for a
    /// lane's life.
    pub(crate) fn remove(&self, slot: u32, is_haunted: bool) {
        let is_kept = is_haunted || self.device.info.provider() == "shm";
        let mut owners = self.owners();
        for (mut address, _) in owners.extract_if(|_, owner| *owner == slot) {
            if is_kept {
                continue;
            }
            // SAFETY: inserted before, and removed once, by the caller's promise.
            let code = unsafe { sys::fi_av_remove(self.av.as_ptr(), &raw mut address, 1, 0) };
            if code != 0 {
                tracing::warn!(code, "libfabric does not remove an address");
            }
        }
    }

    /// For who posts or polls: while it is held nobody inserts or removes, where that matters.
    pub(crate) fn turn(&self) -> Option<MutexGuard<'_, Owners>> {
        self.takes_turns.then(|| self.owners())
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fid(&self) -> *mut sys::fid {
        self.av.fid()
    }
}
