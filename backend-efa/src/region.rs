//! Registered memory, and imported memory of peers.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;

use libfabric_sys as sys;
use multirail_spi::{Access, Error, ErrorKind, Memory, MemoryRegion, Paths, RemoteKey, RemoteMemory, Result};

use crate::deregistrations::Deregistration;
use crate::hmem::MemoryLocation;
use crate::library::library;
use crate::objects::{Device, Fid};

/// The most keys that the backend tries for one registration, if the provider does not choose keys itself.
const KEY_ATTEMPTS: u32 = 8;

/// A registration. Dropping it first closes the registration, and then releases the memory.
pub(crate) struct RegisteredRegion {
    mr: Mutex<RegistrationState>,
    /// The local descriptor, a pointer to the registration; 0 if the provider needs none.
    lkey: u64,
    key: RemoteKey,
    memory: Arc<dyn Memory>,
    device: Arc<Device>,
}

enum RegistrationState {
    Open(Fid<sys::fid_mr>),
    /// The result of closing. If the closing is delayed, it is empty until a reaper has closed the registration. After
    /// an error the registration may still be open.
    Closed(Arc<OnceLock<Result<()>>>),
}

impl RegisteredRegion {
    /// Registers `memory` for local use, and for peers as `access` allows.
    ///
    /// # Safety
    /// As `Domain::register`.
    pub(crate) unsafe fn new(device: &Arc<Device>, memory: Arc<dyn Memory>, access: Access) -> Result<Self> {
        let (start, len) = (memory.as_ptr(), memory.len());
        let location =
            MemoryLocation::new(&*memory, library()?.version(), device.takes_gpu_memory.load(Relaxed))?;
        let mr = if device.info.memory_mode(sys::FI_MR_PROV_KEY) {
            // SAFETY: by the caller.
            unsafe { register(device, &location, access, 0) }
        } else {
            let mut tries = 0;
            loop {
                tries += 1;
                // SAFETY: by the caller.
                match unsafe { register(device, &location, access, random_key(device)?) } {
                    // The key may be in use: tries another one.
                    Err(error) if error.kind() == ErrorKind::Io && tries < KEY_ATTEMPTS => {}
                    done => break done,
                }
            }
        }?;
        // Before any peer knows the key.
        device.flushes.add(&*memory)?;
        // SAFETY: an open registration; libfabric says that both fields may be read.
        let (descriptor, key) = unsafe { ((*mr.as_ptr()).mem_desc as u64, (*mr.as_ptr()).key) };
        let lkey = if device.info.memory_mode(sys::FI_MR_LOCAL) { descriptor } else { 0 };
        let base = if device.info.memory_mode(sys::FI_MR_VIRT_ADDR) { start as u64 } else { 0 };
        Ok(Self {
            mr: Mutex::new(RegistrationState::Open(mr)),
            lkey,
            key: RemoteKey { base, key, len: len as u64 },
            memory,
            device: Arc::clone(device),
        })
    }

    /// The first byte and the local key.
    pub(crate) fn start_and_lkey(&self) -> (*mut u8, u64) {
        (self.memory.as_ptr(), self.lkey)
    }

    /// Closes the registration. Further calls return the same result. If the device is given up, a reaper closes the
    /// registration later, and calls return an error until then.
    fn close(&self) -> Result<()> {
        let mut state = self.mr.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &*state {
            RegistrationState::Open(_) => Arc::default(),
            RegistrationState::Closed(result) => Arc::clone(result),
        };
        if let RegistrationState::Open(mr) =
            std::mem::replace(&mut *state, RegistrationState::Closed(Arc::clone(&result)))
        {
            let (memory, result) = (Arc::clone(&self.memory), Arc::clone(&result));
            self.device.deregistrations.run_or_delay(Deregistration { mr, memory, result });
        }
        result.get().cloned().unwrap_or_else(|| {
            let remedy = "peers may still reach the memory, which is kept until the endpoint is closed";
            Err(self.device.given_up_error("revoke", remedy))
        })
    }
}

impl Drop for RegisteredRegion {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "the memory of a dropped region is kept");
        }
    }
}

/// An unguessable key of the provider's length.
fn random_key(device: &Device) -> Result<u64> {
    let bits = 8 * device.info.domain().mr_key_size.clamp(1, 8) as u32;
    Ok(random_number("register")? >> (64 - bits))
}

/// An unguessable number.
pub(crate) fn random_number(operation: &'static str) -> Result<u64> {
    let mut bytes = [0; 8];
    let why = |error| Error::new(ErrorKind::Io, operation, format!("no random numbers: {error}"));
    getrandom::fill(&mut bytes).map_err(why)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Registers memory with libfabric.
///
/// # Safety
/// As `Domain::register`.
unsafe fn register(
    device: &Device,
    location: &MemoryLocation,
    access: Access,
    key: u64,
) -> Result<Fid<sys::fid_mr>> {
    let mut rights = sys::FI_SEND | sys::FI_RECV | sys::FI_READ | sys::FI_WRITE;
    if access.contains(Access::REMOTE_WRITE) {
        rights |= sys::FI_REMOTE_WRITE;
    }
    if access.contains(Access::REMOTE_READ) {
        rights |= sys::FI_REMOTE_READ;
    }
    // SAFETY: zero asks for nothing in particular; the memory is the caller's promise, and `location` lives.
    unsafe {
        let mut attr: sys::fi_mr_attr_1_20 = std::mem::zeroed();
        let flags = location.fill(&mut attr);
        (attr.known.access, attr.known.requested_key) = (rights.into(), key);
        let attr = (&raw const attr).cast();
        Fid::open("register", &location.description(), |mr| {
            sys::fi_mr_regattr(device.domain.as_ptr(), attr, flags, mr)
        })
    }
}

impl MemoryRegion for RegisteredRegion {
    fn lkey(&self) -> u64 {
        self.lkey
    }

    fn key(&self) -> RemoteKey {
        self.key
    }

    fn revoke(&self) -> Poll<Result<()>> {
        // The provider refuses later requests of peers, because the key does not exist any more.
        Poll::Ready(self.close())
    }

    /// A descriptor points to the registration, which providers read until a request has ended.
    fn lkey_outlives_revoke(&self) -> bool {
        self.lkey == 0
    }
}

/// A peer's region. Requests need only these numbers.
pub(crate) struct ImportedRegion {
    pub key: RemoteKey,
    /// The provider's path.
    pub path: Paths,
}

impl RemoteMemory for ImportedRegion {
    fn rkey(&self) -> u64 {
        self.key.key
    }

    fn base(&self) -> u64 {
        self.key.base
    }

    fn path(&self) -> &'static str {
        "libfabric"
    }

    fn paths(&self, _: bool) -> Paths {
        self.path
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use multirail_spi::HostBuffer;

    use super::*;
    use crate::library::find_infos;

    unsafe extern "C" fn refuses(_: *mut sys::fid) -> c_int {
        -(sys::FI_EBUSY as c_int)
    }

    #[test]
    fn a_registration_that_does_not_close_is_an_error_and_keeps_the_memory() {
        let device = match find_infos("tcp", Some("127.0.0.1")) {
            Ok(infos) => Device::open(&infos[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        // SAFETY: nobody reads or writes it.
        let registered =
            unsafe { RegisteredRegion::new(&device, Arc::clone(&memory) as _, Access::REMOTE_WRITE) }
                .unwrap();
        if let RegistrationState::Open(mr) = &*registered.mr.lock().unwrap() {
            // SAFETY: an open registration, whose table of calls is replaced by a copy that is never freed.
            unsafe {
                let fid = &mut (*mr.as_ptr()).fid;
                fid.ops = Box::leak(Box::new(sys::fi_ops { close: Some(refuses), ..*fid.ops }));
            }
        }
        for _ in 0..2 {
            let Poll::Ready(Err(error)) = registered.revoke() else {
                panic!("revoke reports that the key is closed")
            };
            assert_eq!((error.kind(), error.operation()), (ErrorKind::Busy, "revoke"));
            assert!(error.context().contains("peers may still reach"), "{error}");
        }
        drop(registered);
        assert_eq!(Arc::strong_count(&memory), 2, "the memory is kept for ever");
    }

    #[test]
    fn a_given_up_device_keeps_its_registrations_until_its_endpoints_are_closed() {
        let device = match find_infos("tcp", Some("127.0.0.1")) {
            Ok(infos) => Device::open(&infos[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let memory = Arc::new(HostBuffer::new(4096).unwrap());
        // SAFETY: nobody reads or writes it.
        let register =
            || unsafe { RegisteredRegion::new(&device, Arc::clone(&memory) as _, Access::REMOTE_WRITE) };
        let (revoked, dropped) = (register().unwrap(), register().unwrap());
        device.deregistrations.hold();
        device.deregistrations.hold();
        for _ in 0..2 {
            let Poll::Ready(Err(error)) = revoked.revoke() else {
                panic!("revoke reports that the key is closed")
            };
            assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "revoke"));
        }
        drop(dropped);
        device.deregistrations.release();
        assert!(matches!(revoked.revoke(), Poll::Ready(Err(_))), "the other endpoint is still overdue");
        assert_eq!(
            Arc::strong_count(&memory),
            4,
            "the test's, the region's, and those of two delayed deregistrations"
        );
        device.deregistrations.release();
        assert!(matches!(revoked.revoke(), Poll::Ready(Ok(()))));
        drop((revoked, register().unwrap()));
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
