//! An endpoint of libfabric with its queues and its posted requests. The backend's endpoint has one of these, or two
//! while it replaces one by the next.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::{Arc, MutexGuard};

use libfabric_sys as sys;
use multirail_spi::Result;

use crate::address_vector::{AddressOwners, AddressVector};
use crate::context::Contexts;
use crate::objects::{Device, Fid};
use crate::settings;
use crate::shm;
use crate::signals;
use crate::status::call_error;

/// The number of arrivals for which a completion queue has room, in addition to the completions of everything that can
/// be posted here.
pub(crate) const ARRIVAL_DEPTH: usize = 8192;

/// A libfabric endpoint and its posted requests. The fields are dropped in order: `queues` closes the endpoint, and
/// after that no context is in use.
pub(crate) struct FabricEndpoint {
    /// The endpoint's number in its domain: 0, 1, and so on.
    pub(crate) number: u32,
    pub(crate) queues: Queues,
    pub(crate) posted: Contexts,
    /// The value of [`Queues::remote_accesses`] at the last call of [`FabricEndpoint::made_progress`].
    seen_remote_accesses: u64,
}

/// A libfabric endpoint during a post or a poll. Where the provider needs it, the guard keeps the address vector locked
/// against the control threads.
pub(crate) struct EndpointGuard<'a> {
    pub(crate) queues: &'a Queues,
    pub(crate) posted: &'a mut Contexts,
    owners: Option<MutexGuard<'a, AddressOwners>>,
}

impl EndpointGuard<'_> {
    /// The slot of a source address. `None` where completion data identifies the sender.
    pub(crate) fn owner(&self, address: sys::fi_addr_t) -> Option<u32> {
        self.owners.as_ref()?.slot_of(address)
    }
}

impl FabricEndpoint {
    /// Wraps open queues, with room for `contexts` posted requests and receives.
    pub(crate) fn new(number: u32, queues: Queues, contexts: u32) -> Self {
        Self { number, queues, posted: Contexts::new(contexts), seen_remote_accesses: 0 }
    }

    /// Prepares a post or a poll. Locks the address vector where the provider needs it.
    pub(crate) fn guard(&mut self) -> EndpointGuard<'_> {
        let Self { queues, posted, .. } = self;
        EndpointGuard { owners: queues.av.lock_for_endpoint(), queues, posted }
    }

    /// Whether peers have written or read since the last call. Always false where this is not counted
    /// ([`Queues::remote_accesses`]).
    pub(crate) fn made_progress(&mut self) -> bool {
        let accesses = self.queues.remote_accesses();
        std::mem::replace(&mut self.seen_remote_accesses, accesses) != accesses
    }
}

/// An endpoint of libfabric with its completion queue and address vector.
///
/// The fields are closed in order: the endpoint, then the objects that it is bound to.
pub(crate) struct Queues {
    pub(crate) ep: Fid<sys::fid_ep>,
    /// The endpoint's name, with the provider shm.
    _name: Option<shm::LockedName>,
    pub(crate) cq: Fid<sys::fid_cq>,
    /// Counts the writes and reads of peers, where nothing else tells the worker about them.
    remote_accesses: Option<Fid<sys::fid_cntr>>,
    /// A file descriptor that is readable when the completion queue is not empty, if the provider has one.
    pub(crate) wait_fd: Option<c_int>,
    /// Whether the provider carries out writes by sending messages.
    pub(crate) emulates_writes: bool,
    pub(crate) av: Arc<AddressVector>,
    pub(crate) device: Arc<Device>,
}

impl Queues {
    /// Opens an endpoint. `worker_sleeps` says that a sleeping worker has to be woken. If not, the completion queue has
    /// no file descriptor, because a descriptor costs time at each completion.
    pub(crate) fn open(device: &Arc<Device>, worker_sleeps: bool) -> Result<Self> {
        let av = AddressVector::open(device)?;
        let info = device.info.as_ptr();
        let (tx, rx) = (device.info.tx(), device.info.rx());
        let (cq, wait_fd) = completion_queue(device, tx.size + rx.size + ARRIVAL_DEPTH, worker_sleeps)?;
        let remote_accesses = if worker_sleeps && wait_fd.is_none() { counter(device) } else { None };
        // SAFETY: the domain is open and the entry is its own; objects are bound before the
        // endpoint is enabled, and outlive it.
        let (ep, name) = unsafe {
            let ep = Fid::open("open", "its endpoint", |ep| {
                signals::keep(|| sys::fi_endpoint(device.domain.as_ptr(), info, ep, null_mut()))
            })?;
            let check = |what, code: c_int| match code {
                0 => Ok(()),
                code => Err(call_error("open", what, code)),
            };
            let directions = u64::from(sys::FI_TRANSMIT | sys::FI_RECV);
            let bind = |fid, flags| sys::fi_ep_bind(ep.as_ptr(), fid, flags);
            check("an event queue for its endpoint", bind(device.events(), 0))?;
            check("an address vector for its endpoint", bind(av.fid(), 0))?;
            check("a completion queue for its endpoint", bind(cq.fid(), directions))?;
            if let Some(counter) = &remote_accesses {
                let kinds = u64::from(sys::FI_REMOTE_WRITE | sys::FI_REMOTE_READ);
                check("a counter for its endpoint", bind(counter.fid(), kinds))?;
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
            remote_accesses,
            wait_fd,
            av,
            device: Arc::clone(device),
        })
    }

    /// Whether closing waits for requests that never end. EFA's provider of 1.17 does (`rxr_ep_wait_send`), even if the
    /// card is dead.
    pub(crate) fn close_may_hang(&self) -> bool {
        self.device.info.is_card() && settings::lacks_native_writes()
    }

    /// The number of writes and reads of peers so far; 0 where they are not counted.
    #[inline]
    pub(crate) fn remote_accesses(&self) -> u64 {
        // SAFETY: the counter is open.
        self.remote_accesses.as_ref().map_or(0, |counter| unsafe { sys::fi_cntr_read(counter.as_ptr()) })
    }

    /// The endpoint's address, which peers insert into their address vectors (`fi_getname`).
    pub(crate) fn address(&self) -> Result<Vec<u8>> {
        let mut address = vec![0_u8; 256];
        let mut len = address.len();
        // SAFETY: the buffer is as long as `len` says; libfabric sets `len` to the length of the address.
        let code = unsafe { sys::fi_getname(self.ep.as_ptr(), address.as_mut_ptr().cast(), &raw mut len) };
        if code != 0 || len > address.len() {
            return Err(call_error("open", "to tell its address", code));
        }
        address.truncate(len);
        Ok(address)
    }
}

/// A counter of the peers' accesses to this side's memory, if the provider offers one (`FI_RMA_EVENT`).
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

/// Opens a completion queue of `size` entries. If `worker_sleeps`, also returns a file descriptor to wait on, where the
/// provider has one.
fn completion_queue(
    device: &Device,
    size: usize,
    worker_sleeps: bool,
) -> Result<(Fid<sys::fid_cq>, Option<c_int>)> {
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
    if !worker_sleeps {
        return Ok((open(sys::FI_WAIT_NONE)?, None));
    }
    // Not every provider supports FI_WAIT_FD: EFA and shm take FI_WAIT_NONE only. The worker then sleeps for a limited
    // time, because `Capabilities::supports_wakeup` is false.
    let Ok(cq) = open(sys::FI_WAIT_FD) else { return Ok((open(sys::FI_WAIT_NONE)?, None)) };
    let mut wait_fd: c_int = -1;
    // SAFETY: FI_GETWAIT of a queue with FI_WAIT_FD writes one int.
    let code = unsafe { sys::fi_control(cq.fid(), sys::FI_GETWAIT as c_int, (&raw mut wait_fd).cast()) };
    Ok((cq, (code == 0 && wait_fd >= 0).then_some(wait_fd)))
}
