//! An opened port: its queues, and the memory that is registered with its card.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use multirail_spi::{
    AbortScope, Access, Capabilities, Clock, Connector, DeliveredCost, DeliveredScope, Domain, DomainSetup,
    Endpoint, EndpointConfig, Error, ErrorKind, Memory, MemoryRegion, Operations, PeerSlot, Progress,
    RemoteKey, RemoteMemory, Result, Revocation,
};
use rdma_sys as ib;

use crate::config::VerbsConfig;
use crate::device::Device;
use crate::endpoint::VerbsEndpoint;
use crate::flush::FlushPage;
use crate::gid::{Gid, choose};
use crate::objects::{Object, library};
use crate::peers::Peers;
use crate::port::Port;
use crate::queue_pair::PortAddress;
use crate::receives::{BUFFERS, IMMS, MESSAGE};
use crate::region::{Imported, Registered};
use crate::retries::Retries;
use crate::status::os_error;

/// The most outstanding requests of all peers together.
const SEND_DEPTH: u32 = 4096;
/// The most outstanding requests of one queue pair.
const PAIR_DEPTH: u32 = 512;
/// The most outstanding reads of one queue pair.
const READS: i32 = 16;
/// The entries of the completion queue: one for every request, as each has its own completion after an error, and one
/// for every receive.
const ENTRIES: i32 = (SEND_DEPTH + IMMS + BUFFERS) as i32;
/// The largest piece of a write: so large that the cost per request does not matter, and small enough to be fair to
/// other writes.
const CHUNK: u64 = 1 << 20;

/// A port with its queues. The fields are closed in order: the queues before the objects that they were made from.
pub(crate) struct PortQueues {
    pub(crate) cq: Object<ib::ibv_cq>,
    pub(crate) channel: Object<ib::ibv_comp_channel>,
    /// The queue of receives without buffers, for writes with imm.
    pub(crate) imms: Object<ib::ibv_srq>,
    /// The queue of receives for messages.
    pub(crate) messages: Object<ib::ibv_srq>,
    pub(crate) device: Arc<Device>,
    pub(crate) port: u8,
    pub(crate) address: PortAddress,
    /// The GIDs that this side offers to peers, the best one first.
    pub(crate) gids: Vec<Gid>,
    pub(crate) config: VerbsConfig,
    pub(crate) depth_of_pair: u32,
    pub(crate) reads_asked: u8,
    pub(crate) reads_taken: u8,
}

/// The state of a domain that its connector, endpoint and regions share.
pub(crate) struct DomainState {
    pub(crate) peers: Peers,
    pub(crate) flush_page: FlushPage,
    pub(crate) card: Arc<PortQueues>,
    pub(crate) clock: Arc<dyn Clock>,
    /// The slots whose next connection could not be made.
    pub(crate) retries: Retries,
    pub(crate) capabilities: Capabilities,
    random: Mutex<fastrand::Rng>,
    taken: AtomicBool,
    id: u64,
}

impl DomainState {
    pub(crate) fn random(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).u64(..)
    }

    /// Allows another endpoint, because the endpoint is closed.
    pub(crate) fn closed(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

pub(crate) struct VerbsDomain(pub(crate) Arc<DomainState>);

impl VerbsDomain {
    pub(crate) fn open(
        device: Arc<Device>,
        port: Port,
        config: &VerbsConfig,
        setup: &DomainSetup,
    ) -> Result<Self> {
        let choice = choose(&port.gids(&device)?, port.is_ethernet(), config.gid_index)?;
        tracing::debug!(device = device.name, gid = %choice.gid, others = ?choice.others, "a port is opened");
        let gids = choice.candidates;
        let address = PortAddress {
            gids: gids.iter().map(|gid| gid.bytes).collect(),
            lid: port.attr.lid,
            mtu: port.attr.active_mtu as u8,
            is_ethernet: port.is_ethernet(),
            needs_grh: port.needs_grh(),
        };
        let card = Arc::new(PortQueues::open(device, &port, address, gids, config)?);
        let capabilities = capabilities(&card, &port);
        // The random numbers are first packet numbers and nonces of offers. They need not be secret, but two fabrics
        // must not draw the same ones.
        let mut random = fastrand::Rng::with_seed(setup.seed ^ setup.incarnation ^ fastrand::u64(..));
        Ok(Self(Arc::new(DomainState {
            id: random.u64(..),
            random: Mutex::new(random),
            peers: Peers::default(),
            flush_page: FlushPage::new(&card.device)?,
            card,
            clock: Arc::clone(&setup.clock),
            retries: Retries::default(),
            capabilities,
            taken: AtomicBool::new(false),
        })))
    }
}

impl PortQueues {
    fn open(
        device: Arc<Device>,
        port: &Port,
        address: PortAddress,
        gids: Vec<Gid>,
        config: &VerbsConfig,
    ) -> Result<Self> {
        let (library, context, limits) = (library()?, device.context.as_ptr(), &device.limits);
        let within = |wanted: u32, limit: i32| wanted.min(u32::try_from(limit).unwrap_or(0));
        suffices(&device)?;
        // SAFETY: the device is open; zero is a value of the structure.
        unsafe {
            let channel = Object::of(library.create_comp_channel(context), "open")?;
            #[cfg(unix)]
            nonblocking(&channel)?;
            let cq = library.create_cq(context, ENTRIES, std::ptr::null_mut(), channel.as_ptr(), 0);
            let cq = Object::of(cq, "open")?;
            let srq = |depth: u32| {
                let mut attr: ib::ibv_srq_init_attr = std::mem::zeroed();
                (attr.attr.max_wr, attr.attr.max_sge) = (depth, 1);
                Object::of(library.create_srq(device.pd.as_ptr(), &raw mut attr), "open")
            };
            let (imms, messages) = (srq(IMMS)?, srq(BUFFERS)?);
            Ok(Self {
                cq,
                channel,
                imms,
                messages,
                port: port.number,
                address,
                gids,
                config: config.clone(),
                depth_of_pair: within(PAIR_DEPTH, limits.max_qp_wr),
                reads_asked: limits.max_qp_init_rd_atom.clamp(0, READS) as u8,
                reads_taken: limits.max_qp_rd_atom.clamp(0, READS) as u8,
                device,
            })
        }
    }
}

/// Refuses a card whose queues are too short, that has no shared receive queues, or no RDMA READ.
pub(crate) fn suffices(device: &Device) -> Result<()> {
    let limits = &device.limits;
    if limits.max_qp_rd_atom < 1 || limits.max_qp_init_rd_atom < 1 {
        let context = format!(
            "{} has no RDMA READ, and without reads an imm of another card could overtake bytes of this one",
            device.name
        );
        return Err(Error::new(ErrorKind::Unsupported, "open", context));
    }
    if limits.max_cqe >= ENTRIES && limits.max_srq_wr >= IMMS as i32 {
        return Ok(());
    }
    let context = format!(
        "{} has completion queues of {} entries and shared receive queues of {}, and {ENTRIES} and {IMMS} are needed",
        device.name, limits.max_cqe, limits.max_srq_wr
    );
    Err(Error::new(ErrorKind::Unsupported, "open", context))
}

/// Makes reads of the channel return at once if it has no event.
#[cfg(unix)]
fn nonblocking(channel: &Object<ib::ibv_comp_channel>) -> Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    // SAFETY: the channel is open, and its descriptor stays open as long.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*channel.as_ptr()).fd) };
    let set = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    set.map_err(|why| os_error("open", "a channel that does not wait", why.raw_os_error()))
}

fn capabilities(card: &PortQueues, port: &Port) -> Capabilities {
    let mut it = Capabilities::minimal();
    it.operations = Operations::all();
    it.imm_bytes = 4;
    it.send_depth = SEND_DEPTH;
    it.recv_depth = BUFFERS;
    it.max_message = (MESSAGE as u64).min(port.attr.max_msg_sz.into());
    it.max_write = u64::from(port.attr.max_msg_sz).clamp(1, 1 << 30);
    it.chunk = CHUNK.min(it.max_write);
    it.max_regions = u32::try_from(card.device.limits.max_mr).unwrap_or(1).max(1);
    it.link_bits_per_s = port.rate().filter(|_| !card.device.is_software());
    // The card asks a peer to send again if its imm or message finds no receive.
    it.arrival_depth = u64::MAX;
    it.progress = Progress::Auto;
    it.abort_scope = AbortScope::Peer;
    it.fences = true;
    it.revocation = Revocation::DeviceKey;
    it.delivered = DeliveredCost::None;
    it.delivered_scope = DeliveredScope::Device;
    it.supports_wakeup = true;
    it.idle_backoff = Duration::from_millis(10);
    it
}

impl Domain for VerbsDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn id(&self) -> u64 {
        self.0.id
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        let card = &self.0.card;
        // SAFETY: by the caller.
        let region = unsafe { Registered::new(&card.device, memory, access, card.config.on_demand_paging) };
        Ok(Arc::new(region?))
    }

    fn import(&self, peer: PeerSlot, key: &RemoteKey, _limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        if !self.0.peers.is_up(peer) {
            let context = format!("peer slot {} is not connected: complete the connection first", peer.0);
            return Err(Error::new(ErrorKind::Unreachable, "import", context));
        }
        if key.base.checked_add(key.len).is_none() || key.key > u32::MAX.into() {
            let context = "the descriptor has an impossible range or key: ask the peer for a new one";
            return Err(Error::new(ErrorKind::RemoteAccess, "import", context));
        }
        Ok(Arc::new(Imported(*key)))
    }

    fn connector(&self) -> &dyn Connector {
        &*self.0
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        if self.0.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::new(ErrorKind::Busy, "open endpoint", "the domain's endpoint is in use"));
        }
        let endpoint = VerbsEndpoint::open(Arc::clone(&self.0), config).inspect_err(|_| self.0.closed())?;
        Ok(Box::new(endpoint))
    }
}
