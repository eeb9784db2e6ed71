//! Registered memory, and that of peers.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;

use libfabric_sys as sys;
use multirail_spi::{Access, Error, ErrorKind, KeyMaterial, Memory, MemoryRegion, RemoteMemory, Result};

use crate::gate::Deregistration;
use crate::hmem::Place;
use crate::library::library;
use crate::objects::{Device, Fid};

/// Keys that are tried before giving up, where the application chooses them.
const TRIES: u32 = 8;

/// A registration. Closed in order: the key first, then the memory is let go.
pub(crate) struct Registered {
    mr: Mutex<State>,
    /// The descriptor for this side, which is the registration itself; 0 where the provider needs none.
    lkey: u64,
    key: KeyMaterial,
    memory: Arc<dyn Memory>,
    device: Arc<Device>,
}

enum State {
    Open(Fid<sys::fid_mr>),
    /// By a reaper, where the result is not there yet. After an error libfabric did not close it.
    Closed(Arc<OnceLock<Result<()>>>),
}

impl Registered {
    /// Registers `memory` for this side, and for peers as `access` allows.
    ///
    /// # Safety
    /// As `Domain::register`.
    pub(crate) unsafe fn new(device: &Arc<Device>, memory: Arc<dyn Memory>, access: Access) -> Result<Self> {
        let (start, len) = (memory.as_ptr(), memory.len());
        let place = Place::of(&*memory, library()?.version(), device.has_gpus.load(Relaxed))?;
        let mr = if device.info.memory_mode(sys::FI_MR_PROV_KEY) {
            // SAFETY: by the caller.
            unsafe { register(device, &place, access, 0) }
        } else {
            let mut tries = 0;
            loop {
                tries += 1;
                // SAFETY: by the caller.
                match unsafe { register(device, &place, access, random_key(device)?) } {
                    // A key of that number is in use.
                    Err(error) if error.kind() == ErrorKind::Io && tries < TRIES => {}
                    done => break done,
                }
            }
        }?;
        // Before a peer is told of it.
        device.fences.add(&*memory)?;
        // SAFETY: an open registration; libfabric says that both fields may be read.
        let (descriptor, key) = unsafe { ((*mr.as_ptr()).mem_desc as u64, (*mr.as_ptr()).key) };
        let lkey = if device.info.memory_mode(sys::FI_MR_LOCAL) { descriptor } else { 0 };
        let base = if device.info.memory_mode(sys::FI_MR_VIRT_ADDR) { start as u64 } else { 0 };
        Ok(Self {
            mr: Mutex::new(State::Open(mr)),
            lkey,
            key: KeyMaterial { base, key, len: len as u64 },
            memory,
            device: Arc::clone(device),
        })
    }

    /// Where it begins, and its descriptor for this side.
    pub(crate) fn here(&self) -> (*mut u8, u64) {
        (self.memory.as_ptr(), self.lkey)
    }

    /// Closes the registration, once; says the same when it is asked again. On a device that is given up a reaper
    /// closes it later; until then that is an error.
    fn close(&self) -> Result<()> {
        let mut state = self.mr.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = match &*state {
            State::Open(_) => Arc::default(),
            State::Closed(ended) => Arc::clone(ended),
        };
        if let State::Open(mr) = std::mem::replace(&mut *state, State::Closed(Arc::clone(&ended))) {
            let (memory, ended) = (Arc::clone(&self.memory), Arc::clone(&ended));
            self.device.gate.deregister(Deregistration { mr, memory, ended });
        }
        ended.get().cloned().unwrap_or_else(|| {
            let remedy = "peers may still reach the memory, which is kept until that has ended";
            Err(self.device.given_up("revoke", remedy))
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "the memory of a region is kept");
        }
    }
}

/// A key that nobody guesses, as long as the provider's are.
fn random_key(device: &Device) -> Result<u64> {
    let bits = 8 * device.info.domain().mr_key_size.clamp(1, 8) as u32;
    Ok(random("register")? >> (64 - bits))
}

/// A number that nobody guesses.
pub(crate) fn random(operation: &'static str) -> Result<u64> {
    let mut bytes = [0; 8];
    let why = |error| Error::new(ErrorKind::Io, operation, format!("no random numbers: {error}"));
    getrandom::fill(&mut bytes).map_err(why)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// # Safety
/// As `Domain::register`.
unsafe fn register(device: &Device, place: &Place, access: Access, key: u64) -> Result<Fid<sys::fid_mr>> {
    let mut rights = sys::FI_SEND | sys::FI_RECV | sys::FI_READ | sys::FI_WRITE;
    if access.contains(Access::REMOTE_WRITE) {
        rights |= sys::FI_REMOTE_WRITE;
    }
    if access.contains(Access::REMOTE_READ) {
        rights |= sys::FI_REMOTE_READ;
    }
    // SAFETY: zero asks for nothing in particular; the memory is the caller's promise, and `place` lives.
    unsafe {
        let mut attr: sys::fi_mr_attr_1_20 = std::mem::zeroed();
        let flags = place.tell(&mut attr);
        (attr.known.access, attr.known.requested_key) = (rights.into(), key);
        let attr = (&raw const attr).cast();
        Fid::open("register", &place.words(), |mr| {
            sys::fi_mr_regattr(device.domain.as_ptr(), attr, flags, mr)
        })
    }
}

impl MemoryRegion for Registered {
    fn lkey(&self) -> u64 {
        self.lkey
    }

    fn key(&self) -> KeyMaterial {
        self.key
    }

    fn revoke(&self) -> Poll<Result<()>> {
        // Requests that come later find no such key.
        Poll::Ready(self.close())
    }

    /// A descriptor is the registration itself, which providers read until a request has ended.
    fn lkey_outlives_revoke(&self) -> bool {
        self.lkey == 0
    }
}

/// A peer's region: its numbers are all that a request needs.
pub(crate) struct Imported(pub KeyMaterial);

impl RemoteMemory for Imported {
    fn rkey(&self) -> u64 {
        self.0.key
    }

    fn base(&self) -> u64 {
        self.0.base
    }

    fn path(&self) -> &'static str {
        "libfabric"
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use multirail_spi::HostBuffer;

    use super::*;
    use crate::library::offers;

    unsafe extern "C" fn refuses(_: *mut sys::fid) -> c_int {
        -(sys::FI_EBUSY as c_int)
    }

    #[test]
    fn a_registration_that_does_not_close_is_an_error_and_keeps_the_memory() {
        let device = match offers("tcp", Some("127.0.0.1")) {
            Ok(offers) => Device::open(&offers[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        // SAFETY: nobody reads or writes it.
        let registered =
            unsafe { Registered::new(&device, Arc::clone(&memory) as _, Access::REMOTE_WRITE) }.unwrap();
        if let State::Open(mr) = &*registered.mr.lock().unwrap() {
            // SAFETY: an open registration, whose table of calls is replaced by a copy that lives for good.
            unsafe {
                let fid = &mut (*mr.as_ptr()).fid;
                fid.ops = Box::leak(Box::new(sys::fi_ops { close: Some(refuses), ..*fid.ops }));
            }
        }
        for _ in 0..2 {
            let Poll::Ready(Err(error)) = registered.revoke() else { panic!("it says that the key is gone") };
            assert_eq!((error.kind(), error.operation()), (ErrorKind::Busy, "revoke"));
            assert!(error.context().contains("peers may still reach"), "{error}");
        }
        drop(registered);
        assert_eq!(Arc::strong_count(&memory), 2, "held for good");
    }

    #[test]
    fn a_device_that_is_given_up_keeps_its_registrations_until_the_end() {
        let device = match offers("tcp", Some("127.0.0.1")) {
            Ok(offers) => Device::open(&offers[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        // SAFETY: nobody reads or writes it.
        let register = || unsafe { Registered::new(&device, Arc::clone(&memory) as _, Access::REMOTE_WRITE) };
        let (revoked, dropped) = (register().unwrap(), register().unwrap());
        device.gate.shut();
        device.gate.shut();
        for _ in 0..2 {
            let Poll::Ready(Err(error)) = revoked.revoke() else { panic!("it says that the key is gone") };
            assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "revoke"));
        }
        drop(dropped);
        device.gate.open();
        assert!(matches!(revoked.revoke(), Poll::Ready(Err(_))), "the other endpoint is still overdue");
        assert_eq!(Arc::strong_count(&memory), 4, "ours, the region's, and two of what is left");
        device.gate.open();
        assert!(matches!(revoked.revoke(), Poll::Ready(Ok(()))));
        drop((revoked, register().unwrap()));
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
