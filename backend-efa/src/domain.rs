//! The domain: an open device, and its endpoint.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libfabric_sys as sys;
use multirail_spi::{
    AbortScope, Access, Capabilities, Connector, DeliveredCost, Domain, DomainSetup, Endpoint,
    EndpointConfig, Error, ErrorKind, HostBuffer, Memory, MemoryRegion, Operations, Paths, PeerSlot,
    Progress, RemoteKey, RemoteMemory, Result, Revocation,
};

use crate::endpoint::EfaEndpoint;
use crate::fabric_endpoint::{ARRIVAL_DEPTH, FabricEndpoint, Queues};
use crate::internal_receives::InternalReceives;
use crate::library::Info;
use crate::objects::Device;
use crate::peers::{EmptyWriteTarget, Peers};
use crate::reaper::Registrations;
use crate::region::{ImportedRegion, RegisteredRegion, random_number};

/// The most posted requests, and the most posted receives, even if the provider allows more: each needs a context.
const MAX_POSTED: usize = 4096;
/// The largest message in bytes, even if the provider allows more: each receive needs a buffer of this size.
const MAX_MESSAGE: u64 = 1 << 20;
/// The largest message over EFA's own protocols. For longer messages the provider uses protocols in which a message
/// that fails, or does not fit its receive, damages others (2.1: `efa_rdm_txe_handle_error` removes the message from
/// its list once for each packet, `efa_rdm_pke_proc_matched_longread_rtm` returns its packet twice).
const MAX_EFA_MESSAGE: u64 = 64 << 10;
/// The planner's bytes per work request: large enough to cost no bandwidth, small enough for fairness.
const CHUNK: u64 = 1 << 20;
/// The bytes per batch without a card: sockets copy the bytes of a request while it is posted.
const BATCH_BYTES: u64 = 4 << 20;
/// The longest sleep of a worker with one rail if the provider cannot wake it. 60 polls per second take about 0.5 % of
/// a core: 80 to 100 µs each, with cold caches (measured on a virtual machine).
const IDLE_BACKOFF: Duration = Duration::from_millis(16);

/// What the domain, its connector, its endpoint and its reapers share.
pub(crate) struct DomainState {
    /// The region that requests without bytes name, here and at the peers.
    empty_region: RegisteredRegion,
    pub(crate) registrations: Registrations,
    pub(crate) peers: Peers,
    first: Mutex<FirstEndpoint>,
    /// The number of libfabric endpoints that were opened.
    opened: AtomicU32,
    /// The number of libfabric endpoints that stay open, because closing them would never end.
    pub(crate) left_open: AtomicUsize,
    pub(crate) device: Arc<Device>,
    pub(crate) capabilities: Capabilities,
    pub(crate) setup: DomainSetup,
    id: u64,
}

/// The first libfabric endpoint, which is opened with the domain.
struct FirstEndpoint {
    /// The endpoint, until [`Domain::endpoint`] takes it.
    unused: Option<FabricEndpoint>,
    /// Whether the domain's [`EfaEndpoint`] is open: a domain has one at a time.
    is_taken: bool,
}

pub(crate) struct EfaDomain(Arc<DomainState>);

impl DomainState {
    fn lock_first(&self) -> MutexGuard<'_, FirstEndpoint> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens another libfabric endpoint. From now on the connector offers its address.
    pub(crate) fn open_endpoint(&self) -> Result<FabricEndpoint> {
        if self.device.is_given_up() {
            return Err(self.device.given_up_error("open endpoint", "open the device anew"));
        }
        let queues = Queues::open(&self.device, self.setup.worker_sleeps)?;
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        self.peers.open_endpoint(number, queues.address()?, &queues.av)?;
        let Capabilities { send_depth, recv_depth, .. } = self.capabilities;
        Ok(FabricEndpoint::new(number, queues, send_depth + recv_depth))
    }

    /// The target of peers' requests without bytes.
    pub(crate) fn empty_write_target(&self) -> EmptyWriteTarget {
        let RemoteKey { base, key, .. } = self.empty_region.key();
        EmptyWriteTarget { base, key }
    }

    /// The local address and key of requests without bytes. Some providers read them.
    pub(crate) fn empty_source(&self) -> (*mut u8, u64) {
        self.empty_region.start_and_lkey()
    }

    /// Notes that the backend's endpoint is closed: another one may be opened.
    pub(crate) fn on_endpoint_closed(&self) {
        self.lock_first().is_taken = false;
    }
}

impl EfaDomain {
    pub(crate) fn open(info: &Info, setup: &DomainSetup) -> Result<Self> {
        let device = Device::open(info)?;
        let queues = Queues::open(&device, setup.worker_sleeps)?;
        let memory = Arc::new(HostBuffer::new(4096)?);
        // SAFETY: nobody reads or writes it; requests that name it have no bytes.
        let empty_region = unsafe { RegisteredRegion::new(&device, memory, Access::REMOTE_WRITE) }?;
        let id = random_number("open")?;
        let capabilities = capabilities(&device, &queues);
        let peers = Peers::new(info, setup.worker_sleeps);
        peers.open_endpoint(0, queues.address()?, &queues.av)?;
        let endpoint = FabricEndpoint::new(0, queues, capabilities.send_depth + capabilities.recv_depth);
        Ok(Self(Arc::new(DomainState {
            empty_region,
            registrations: Registrations::default(),
            peers,
            first: Mutex::new(FirstEndpoint { unused: Some(endpoint), is_taken: false }),
            opened: AtomicU32::new(1),
            left_open: AtomicUsize::new(0),
            capabilities,
            device,
            setup: setup.clone(),
            id,
        })))
    }
}

fn capabilities(device: &Device, queues: &Queues) -> Capabilities {
    let info = &device.info;
    let caps = info.get().caps;
    let mut it = Capabilities::minimal();
    it.operations = Operations::WRITE | Operations::SEND;
    it.path = info.path();
    let data = info.domain().cq_data_size;
    if data >= 4 {
        it.operations |= Operations::WRITE_IMM;
        it.imm_bytes = 4;
    }
    if caps & u64::from(sys::FI_READ) != 0 {
        it.operations |= Operations::READ;
    }
    let depth = |size: usize| size.min(MAX_POSTED) as u32;
    it.send_depth = depth(info.tx().size);
    it.recv_depth = depth(info.rx().size);
    let largest = info.endpoint().max_msg_size as u64;
    // efa-direct sends a message as one packet. Its `max_msg_size` is that of writes (2.1, `efa_base_ep.c`).
    let message = if info.is_efa_direct() { info.mtu().unwrap_or(largest) } else { largest };
    it.max_message = message.min(if info.uses_efa_protocols() { MAX_EFA_MESSAGE } else { MAX_MESSAGE });
    it.max_write = largest.clamp(1, 1 << 30);
    it.chunk = CHUNK;
    if !info.is_card() {
        it.batch_bytes = BATCH_BYTES;
    }
    // Providers without a limit report 0 (tcp, shm).
    it.max_regions = match info.domain().mr_cnt {
        0 => u32::MAX,
        most => u32::try_from(most).unwrap_or(u32::MAX),
    };
    it.link_bits_per_s = info.link_bits_per_s();
    it.arrival_depth = ARRIVAL_DEPTH as u64;
    it.progress = match info.domain().data_progress {
        sys::FI_PROGRESS_AUTO => Progress::Auto,
        _ => Progress::Manual,
    };
    it.abort_scope = AbortScope::Endpoint;
    it.fences = true;
    // Only a card that carries out writes itself checks the key for all bytes: once the key is closed, no byte can
    // land. Software checks the key at the beginning of a write, and copies bytes that arrive later without a further
    // check (`xnet_op_write`, `smr_progress_cmd_rma`).
    it.revocation = match info.is_card() && !queues.emulates_writes {
        true => Revocation::DeviceKey,
        false => Revocation::Late,
    };
    it.delivered = DeliveredCost::RoundTrip;
    it.supports_wakeup = queues.wait_fd.is_some();
    it.idle_backoff = IDLE_BACKOFF;
    if queues.emulates_writes {
        it.emulated = Operations::WRITE | Operations::WRITE_IMM;
    }
    it
}

impl Domain for EfaDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn id(&self) -> u64 {
        self.0.id
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        // SAFETY: by the caller.
        let region = Arc::new(unsafe { RegisteredRegion::new(&self.0.device, memory, access) }?);
        self.0.registrations.add(&region);
        Ok(region)
    }

    fn import(&self, peer: PeerSlot, key: &RemoteKey, _limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        if !self.0.peers.is_up(peer) {
            let context = format!("peer slot {} is not connected: complete the connection first", peer.0);
            return Err(Error::new(ErrorKind::Unreachable, "import", context));
        }
        if key.base.checked_add(key.len).is_none() {
            let context = "the descriptor's range ends beyond all addresses: ask the peer for a new one";
            return Err(Error::new(ErrorKind::RemoteAccess, "import", context));
        }
        let Capabilities { path, emulated, .. } = self.capabilities();
        // Where software carries out writes, it copies them out of the messages that a card receives.
        let staged = if emulated.contains(Operations::WRITE) { Paths::STAGED } else { Paths::empty() };
        Ok(Arc::new(ImportedRegion { key: *key, path: *path | staged }))
    }

    fn connector(&self) -> &dyn Connector {
        &*self.0
    }

    fn unclosed_endpoints(&self) -> usize {
        self.0.device.deregistrations.overdue_endpoints() + self.0.left_open.load(Ordering::Relaxed)
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let mut first = self.0.lock_first();
        if std::mem::replace(&mut first.is_taken, true) {
            return Err(Error::new(ErrorKind::Busy, "open endpoint", "the domain's endpoint is in use"));
        }
        let endpoint = match first.unused.take() {
            Some(endpoint) => endpoint,
            None => self.0.open_endpoint().inspect_err(|_| first.is_taken = false)?,
        };
        drop(first);
        let internal_receives =
            InternalReceives::open(&self.0).inspect_err(|_| self.0.on_endpoint_closed())?;
        Ok(Box::new(EfaEndpoint::new(endpoint, Arc::clone(&self.0), config, internal_receives)))
    }
}
