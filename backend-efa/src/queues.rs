//! An endpoint of libfabric with its completion queue and address vector.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use libfabric_sys as sys;
use multirail_spi::Result;

use crate::addresses::Addresses;
use crate::objects::{Device, Fid};
use crate::settings;
use crate::shm;
use crate::signals;
use crate::status::refused;

/// Completions that a queue holds beside those of all that can be posted here: imms.
pub(crate) const ARRIVALS: usize = 8192;

/// Closed in order: the endpoint, then what it is bound to.
pub(crate) struct Queues {
    pub(crate) ep: Fid<sys::fid_ep>,
    /// On shm.
    _name: Option<shm::Name>,
    pub(crate) cq: Fid<sys::fid_cq>,
    /// Counts peers' writes and reads, where nothing else tells the worker that they are there.
    visits: Option<Fid<sys::fid_cntr>>,
    /// Readable when the completion queue is not empty, where the provider has such a thing.
    pub(crate) descriptor: Option<c_int>,
    /// Whether the provider only sends messages for writes.
    pub(crate) emulates_writes: bool,
    pub(crate) addresses: Arc<Addresses>,
    pub(crate) device: Arc<Device>,
}

impl Queues {
    /// For a worker that `sleeps`, or for who never does: what wakes costs each completion something.
    pub(crate) fn open(device: &Arc<Device>, sleeps: bool) -> Result<Self> {
        let addresses = Addresses::open(device)?;
        let info = device.info.as_ptr();
        let (tx, rx) = (device.info.tx(), device.info.rx());
        let (cq, descriptor) = completion_queue(device, tx.size + rx.size + ARRIVALS, sleeps)?;
        let visits = if sleeps && descriptor.is_none() { counter(device) } else { None };
        // SAFETY: the domain is open and the entry is its own; objects are bound before the
        // endpoint is enabled, and outlive it.
        let (ep, name) = unsafe {
            let ep = Fid::open("open", "its endpoint", |ep| {
                signals::keep(|| sys::fi_endpoint(device.domain.as_ptr(), info, ep, null_mut()))
            })?;
            let check = |what, code: c_int| match code {
                0 => Ok(()),
                code => Err(refused("open", what, code)),
            };
            let ends = u64::from(sys::FI_TRANSMIT | sys::FI_RECV);
            let bind = |fid, flags| sys::fi_ep_bind(ep.as_ptr(), fid, flags);
            check("an event queue for its endpoint", bind(device.events(), 0))?;
            check("an address vector for its endpoint", bind(addresses.fid(), 0))?;
            check("a completion queue for its endpoint", bind(cq.fid(), ends))?;
            if let Some(visits) = &visits {
                let kinds = u64::from(sys::FI_REMOTE_WRITE | sys::FI_REMOTE_READ);
                check("a counter for its endpoint", bind(visits.fid(), kinds))?;
            }
            settings::apply(ep.as_ptr(), device);
            let name = device.info.is_shm().then(|| shm::give_name(&ep)).transpose()?;
            check("to enable its endpoint", signals::keep(|| sys::fi_enable(ep.as_ptr())))?;
            (ep, name)
        };
        Ok(Self {
            emulates_writes: settings::emulates_writes(ep.as_ptr(), &device.info),
            ep,
            _name: name,
            cq,
            visits,
            descriptor,
            addresses,
            device: Arc::clone(device),
        })
    }

    /// Whether closing waits for requests that never end: EFA's provider of 1.17 does
    /// (`rxr_ep_wait_send`), also when the card is dead.
    pub(crate) fn close_may_hang(&self) -> bool {
        self.device.info.card().is_some() && settings::is_before_native_writes()
    }

    /// How many writes and reads of peers there were, where that is counted.
    #[inline]
    pub(crate) fn visits(&self) -> u64 {
        // SAFETY: the counter is open.
        self.visits.as_ref().map_or(0, |visits| unsafe { sys::fi_cntr_read(visits.as_ptr()) })
    }

    /// The endpoint's address, as peers insert it.
    pub(crate) fn name(&self) -> Result<Vec<u8>> {
        let mut name = vec![0_u8; 256];
        let mut len = name.len();
        // SAFETY: the buffer is as long as `len` says, which comes back as the address's.
        let code = unsafe { sys::fi_getname(self.ep.as_ptr(), name.as_mut_ptr().cast(), &raw mut len) };
        if code != 0 || len > name.len() {
            return Err(refused("open", "to tell its address", code));
        }
        name.truncate(len);
        Ok(name)
    }
}

/// A counter of what peers do to our memory, where the provider offers such (`FI_RMA_EVENT`).
fn counter(device: &Device) -> Option<Fid<sys::fid_cntr>> {
    if device.info.get().caps & sys::FI_RMA_EVENT == 0 {
        return None;
    }
    let open = |cntr: &mut *mut sys::fid_cntr| {
        // SAFETY: zero asks for nothing in particular; the domain is open.
        unsafe {
            let mut attr: sys::fi_cntr_attr = std::mem::zeroed();
            (attr.events, attr.wait_obj) = (sys::FI_CNTR_EVENTS_COMP, sys::FI_WAIT_NONE);
            sys::fi_cntr_open(device.domain.as_ptr(), &raw mut attr, cntr, null_mut())
        }
    };
    Fid::open("open", "a counter", open).ok()
}

/// A completion queue of `size` entries; for who `sleeps` with a descriptor to wait on, if the provider
/// has one.
fn completion_queue(device: &Device, size: usize, sleeps: bool) -> Result<(Fid<sys::fid_cq>, Option<c_int>)> {
    let open = |wait_obj| {
        // SAFETY: zero asks for nothing in particular; the domain is open.
        unsafe {
            let mut attr: sys::fi_cq_attr = std::mem::zeroed();
            (attr.size, attr.format, attr.wait_obj) = (size, sys::FI_CQ_FORMAT_DATA, wait_obj);
            Fid::open("open", "its completion queue", |cq| {
                sys::fi_cq_open(device.domain.as_ptr(), &raw mut attr, cq, null_mut())
            })
        }
    };
    if !sleeps {
        return Ok((open(sys::FI_WAIT_NONE)?, None));
    }
    // FI_WAIT_FD is not for every provider (EFA and shm take FI_WAIT_NONE only): then the
    // worker naps, which `Capabilities::wakes` says.
    let Ok(cq) = open(sys::FI_WAIT_FD) else { return Ok((open(sys::FI_WAIT_NONE)?, None)) };
    let mut descriptor: c_int = -1;
    // SAFETY: FI_GETWAIT of a queue with FI_WAIT_FD writes one int.
    let code = unsafe { sys::fi_control(cq.fid(), sys::FI_GETWAIT as c_int, (&raw mut descriptor).cast()) };
    Ok((cq, (code == 0 && descriptor >= 0).then_some(descriptor)))
}
