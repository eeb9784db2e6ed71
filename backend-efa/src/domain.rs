//! An opened device: a domain of libfabric, and the endpoint on it.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libfabric_sys as sys;
use multirail_spi::{
    AbortScope, Access, Capabilities, Connector, DeliveredCost, Domain, DomainSetup, Endpoint,
    EndpointConfig, Error, ErrorKind, HostBuffer, KeyMaterial, Memory, MemoryRegion, Operations, PeerSlot,
    Progress, RemoteMemory, Result, Revocation,
};

use crate::endpoint::EfaEndpoint;
use crate::fabric_endpoint::FabricEndpoint;
use crate::library::Info;
use crate::objects::Device;
use crate::own_receives::OwnReceives;
use crate::peers::{Landing, Peers};
use crate::queues::{ARRIVALS, Queues};
use crate::reaper::Registrations;
use crate::region::{Imported, Registered, random};

/// The most that is posted at once, whatever the provider would take: contexts are memory.
const MOST_POSTED: usize = 4096;
/// The largest message, whatever the provider would take: a receive is posted with as much.
const MOST_MESSAGE: u64 = 1 << 20;
/// And over EFA's own protocols. What is longer goes by those in which a message that fails, or does not
/// fit its receive, takes others with it (2.1: `efa_rdm_txe_handle_error` takes it off its list with each
/// packet, `efa_rdm_pke_proc_matched_longread_rtm` gives its packet back twice).
const MOST_OF_CARDS: u64 = 64 << 10;
/// The largest piece of a write: large enough to cost nothing, small enough for fairness.
const CHUNK: u64 = 1 << 20;
/// Bytes per batch where no card moves them: sockets copy while they are posted to.
const BATCH: u64 = 4 << 20;
/// How long a worker of one rail naps at most where the provider cannot wake it: 60 looks a second
/// take about 0.5 % of a core (80 to 100 µs each, caches and all, measured on a virtual machine).
const NAP: Duration = Duration::from_millis(16);

/// A domain as its parts hold it.
pub(crate) struct Shared {
    landing: Registered,
    pub(crate) registrations: Registrations,
    pub(crate) peers: Peers,
    first: Mutex<First>,
    endpoints: AtomicU32,
    /// Endpoints that stay open, as closing them would never end.
    pub(crate) left_open: AtomicUsize,
    pub(crate) device: Arc<Device>,
    pub(crate) capabilities: Capabilities,
    pub(crate) setup: DomainSetup,
    id: u64,
}

/// The first endpoint, until somebody takes the endpoint.
struct First {
    waiting: Option<FabricEndpoint>,
    taken: bool,
}

pub(crate) struct EfaDomain(Arc<Shared>);

impl Shared {
    fn first(&self) -> MutexGuard<'_, First> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens another endpoint, that peers may be told of from now on.
    pub(crate) fn open_endpoint(&self) -> Result<FabricEndpoint> {
        if self.device.is_given_up() {
            return Err(self.device.given_up("open endpoint", "open the device anew"));
        }
        let queues = Queues::open(&self.device, self.setup.sleeps)?;
        let number = self.endpoints.fetch_add(1, Ordering::Relaxed);
        self.peers.open_endpoint(number, queues.name()?, &queues.addresses)?;
        let Capabilities { send_depth, recv_depth, .. } = self.capabilities;
        Ok(FabricEndpoint::new(number, queues, send_depth + recv_depth))
    }

    pub(crate) fn landing(&self) -> Landing {
        let KeyMaterial { base, key, .. } = self.landing.key();
        Landing { base, key }
    }

    /// What requests without bytes name as theirs: some providers look at it all the same.
    pub(crate) fn place(&self) -> (*mut u8, u64) {
        self.landing.here()
    }

    /// The endpoint is closed; another may be opened.
    pub(crate) fn closed(&self) {
        self.first().taken = false;
    }
}

impl EfaDomain {
    pub(crate) fn open(info: &Info, setup: &DomainSetup) -> Result<Self> {
        let device = Device::open(info)?;
        let queues = Queues::open(&device, setup.sleeps)?;
        let place = Arc::new(HostBuffer::new(4096)?);
        // SAFETY: nobody reads or writes it; what lands there has no bytes.
        let landing = unsafe { Registered::new(&device, place, Access::REMOTE_WRITE) }?;
        let id = random("open")?;
        let capabilities = capabilities(&device, &queues);
        let peers = Peers::new(info, setup.sleeps);
        peers.open_endpoint(0, queues.name()?, &queues.addresses)?;
        let endpoint = FabricEndpoint::new(0, queues, capabilities.send_depth + capabilities.recv_depth);
        Ok(Self(Arc::new(Shared {
            landing,
            registrations: Registrations::default(),
            peers,
            first: Mutex::new(First { waiting: Some(endpoint), taken: false }),
            endpoints: AtomicU32::new(1),
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
    let data = info.domain().cq_data_size;
    if data >= 4 {
        it.operations |= Operations::WRITE_IMM;
        it.imm_bytes = 4;
    }
    if caps & u64::from(sys::FI_READ) != 0 {
        it.operations |= Operations::READ;
    }
    let depth = |size: usize| size.min(MOST_POSTED) as u32;
    it.send_depth = depth(info.tx().size);
    it.recv_depth = depth(info.rx().size);
    let largest = info.endpoint().max_msg_size as u64;
    // efa-direct cuts no message up (2.1, `efa_base_ep.c`): its endpoints' size is that of writes.
    let message = if info.is_direct() { info.mtu().unwrap_or(largest) } else { largest };
    it.max_message = message.min(if info.has_states() { MOST_OF_CARDS } else { MOST_MESSAGE });
    it.max_write = largest.clamp(1, 1 << 30);
    it.chunk = CHUNK;
    if info.card().is_none() {
        it.batch_bytes = BATCH;
    }
    // None is what a provider says that counts none (tcp, shm).
    it.max_regions = match info.domain().mr_cnt {
        0 => u32::MAX,
        most => u32::try_from(most).unwrap_or(u32::MAX),
    };
    it.link_bits_per_s = info.card().flatten();
    it.cq_depth = ARRIVALS as u64;
    it.progress = match info.domain().data_progress {
        sys::FI_PROGRESS_AUTO => Progress::Auto,
        _ => Progress::Manual,
    };
    it.abort_scope = AbortScope::Endpoint;
    // Only a card that writes by itself has ended what it was receiving once the key is gone. Providers look at the
    // key when a write begins, and copy the rest as it comes (`xnet_op_write`, `smr_progress_cmd_rma`).
    it.revocation = match info.card().is_some() && !queues.emulates_writes {
        true => Revocation::DeviceKey,
        false => Revocation::Late,
    };
    it.delivered = DeliveredCost::RoundTrip;
    it.supports_wakeup = queues.descriptor.is_some();
    it.idle_backoff = NAP;
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
        let region = Arc::new(unsafe { Registered::new(&self.0.device, memory, access) }?);
        self.0.registrations.add(&region);
        Ok(region)
    }

    fn import(&self, peer: PeerSlot, key: &KeyMaterial, _limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        if !self.0.peers.is_up(peer) {
            let context = format!("peer slot {} is not connected: complete the connection first", peer.0);
            return Err(Error::new(ErrorKind::Unreachable, "import", context));
        }
        if key.base.checked_add(key.len).is_none() {
            let context = "the descriptor's range ends beyond all addresses: ask the peer for a new one";
            return Err(Error::new(ErrorKind::RemoteAccess, "import", context));
        }
        Ok(Arc::new(Imported(*key)))
    }

    fn connector(&self) -> &dyn Connector {
        &*self.0
    }

    fn unclosed(&self) -> usize {
        self.0.device.gate.overdue() + self.0.left_open.load(Ordering::Relaxed)
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let mut first = self.0.first();
        if std::mem::replace(&mut first.taken, true) {
            return Err(Error::new(ErrorKind::Busy, "open endpoint", "the domain's endpoint is in use"));
        }
        let endpoint = match first.waiting.take() {
            Some(endpoint) => endpoint,
            None => self.0.open_endpoint().inspect_err(|_| first.taken = false)?,
        };
        drop(first);
        let own = OwnReceives::open(&self.0).inspect_err(|_| self.0.closed())?;
        Ok(Box::new(EfaEndpoint::new(endpoint, Arc::clone(&self.0), config, own)))
    }
}
