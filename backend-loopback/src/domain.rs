//! An opened loopback device.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use multirail_spi::{
    AbortScope, Access, Capabilities, Connector, DeliveredCost, DeliveredScope, Direct, Domain, DomainSetup,
    Endpoint, EndpointConfig, Error, ErrorKind, KeyMaterial, Memory, MemoryKind, MemoryRegion, Operations,
    Ordering as Ordered, PeerSlot, Progress, RemoteMemory, Result, Revocation, Staging,
};

use crate::backend::LoopbackConfig;
use crate::board::SLOTS;
use crate::direct::{DIRECT, LoopbackDirect};
use crate::door::Door;
use crate::endpoint::LoopbackEndpoint;
use crate::gpu::GpuConfig;
use crate::lane::MESSAGE;
use crate::link::LinkModel;
use crate::offer::Token;
use crate::peer::{Inbound, Outbound, Reach};
use crate::peers::Peers;
use crate::region::{Key, Regions};
use crate::registration::Registration;
use crate::remote::{Answer, Imports, Place, Remote};

/// Requests that may have ended without having been polled, or be under way on GPUs: 64 MiB of 4 KiB pages,
/// four batches on each of four streams.
const SEND_DEPTH: u32 = 16384;
/// Receives that may be posted.
const RECV_DEPTH: u32 = 1024;

/// Bytes per batch: posting copies, and returns within about 25 µs at 20 GB/s. Twice as much was
/// 10 % slower for writes of 1 MiB (`benches/benches/write.rs`).
const BATCH: u64 = 1 << 19;

/// The tables of a domain: all that its server thread needs.
pub(crate) struct Core {
    pub(crate) id: u64,
    pub(crate) capabilities: Capabilities,
    pub(crate) peers: Peers,
    pub(crate) regions: Regions,
    pub(crate) imports: Imports,
    pub(crate) door: Arc<Door>,
    pub(crate) staging: Staging,
    /// Whether an endpoint is open, which then says goodbye to peers.
    pub(crate) polled: AtomicBool,
}

/// A domain as its parts hold it; the last one stops the server.
pub(crate) struct Shared {
    pub(crate) core: Arc<Core>,
    pub(crate) setup: DomainSetup,
    pub(crate) number: u32,
    pub(crate) link: Option<LinkModel>,
    pub(crate) gpus: GpuConfig,
    #[cfg(target_os = "linux")]
    pub(crate) server: std::sync::OnceLock<crate::server::Server>,
}

/// Domains of this process, by id, with the process that made them: a forked
/// child must not take its parent's for its own.
static HERE: Mutex<BTreeMap<u64, (u32, Weak<Core>)>> = Mutex::new(BTreeMap::new());

impl Core {
    /// The domain of this process that has that id.
    pub(crate) fn here(id: u64) -> Option<Arc<Self>> {
        let domains = HERE.lock().expect("domains");
        let (process, core) = domains.get(&id)?;
        (*process == std::process::id()).then(|| core.upgrade())?
    }

    /// Admits the initiator that shows `token`: once. `None` for a token that is unknown or was used.
    ///
    /// Until then most of the peer's segment has no memory: most peers are of other hosts and never
    /// come.
    ///
    /// # Errors
    /// `Exhausted` where there is no memory for the segment.
    pub(crate) fn admit(&self, token: &Token) -> Result<Option<Arc<Inbound>>> {
        let Some(inbound) = self.peers.by_token(token).filter(|inbound| inbound.claim()) else {
            return Ok(None);
        };
        inbound.commit()?;
        self.regions.add_board(inbound.clone());
        Ok(Some(inbound))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        HERE.lock().expect("domains").remove(&self.core.id);
        for (_, peer) in self.core.peers.all() {
            peer.hang_up();
            self.core.regions.remove_board(&peer.inbound);
        }
    }
}

/// An opened device of [`crate::Loopback`].
pub(crate) struct LoopbackDomain {
    pub(crate) shared: Arc<Shared>,
}

impl LoopbackDomain {
    /// Opens device `number`.
    pub(crate) fn open(number: u32, setup: &DomainSetup, config: &LoopbackConfig) -> Result<Self> {
        let core = Arc::new(Core {
            id: u64::from_ne_bytes(random()?),
            capabilities: capabilities(config),
            peers: Peers::default(),
            regions: Regions::default(),
            imports: Imports::default(),
            door: Arc::default(),
            staging: config.staging,
            polled: AtomicBool::new(false),
        });
        let entry = (std::process::id(), Arc::downgrade(&core));
        HERE.lock().expect("domains").insert(core.id, entry);
        let shared = Shared {
            core,
            setup: setup.clone(),
            number,
            link: config.link.clone(),
            gpus: config.gpus(),
            #[cfg(target_os = "linux")]
            server: std::sync::OnceLock::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    fn connected(&self, operation: &'static str, slot: PeerSlot) -> Result<Arc<Outbound>> {
        let peer = self.shared.core.peers.find(slot).filter(|peer| !peer.leaving);
        peer.and_then(|peer| peer.outbound).ok_or_else(|| {
            let context = format!("peer slot {} is not connected: complete the connection first", slot.0);
            Error::new(ErrorKind::Unreachable, operation, context)
        })
    }
}

impl Domain for LoopbackDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.core.capabilities
    }

    fn id(&self) -> u64 {
        self.shared.core.id
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        let (len, far) = (memory.len() as u64, memory.kind() != MemoryKind::Host);
        let key = self.shared.core.regions.insert(memory, access)?;
        Ok(Arc::new(Registration::new(self.shared.clone(), key, len, far)))
    }

    fn import(&self, peer: PeerSlot, key: &KeyMaterial, limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        let target = self.connected("import", peer)?;
        let answer = ask(&target, key.key, limit, self.shared.core.staging)?;
        if key.base != 0 || key.len > answer.len {
            let context = "the descriptor does not match the peer's region: ask the peer for a new one";
            return Err(Error::new(ErrorKind::RemoteAccess, "import", context));
        }
        let import = self.shared.core.imports.insert(target, answer)?;
        Ok(Arc::new(Remote { import, shared: self.shared.clone() }))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        if self.shared.core.polled.swap(true, Ordering::AcqRel) {
            let context = "the domain's endpoint is open already: drop it first";
            return Err(Error::new(ErrorKind::Busy, "open an endpoint", context));
        }
        Ok(Box::new(LoopbackEndpoint::new(self.shared.clone(), &config)))
    }

    fn direct(&self, peer: PeerSlot) -> Option<Arc<dyn Direct>> {
        if self.shared.link.is_some() {
            return None;
        }
        let outbound = self.connected("direct", peer).ok()?;
        Some(Arc::new(LoopbackDirect::new(outbound)))
    }
}

/// Asks the target what `key` names.
fn ask(target: &Outbound, key: u64, limit: Duration, staging: Staging) -> Result<Answer> {
    match &target.reach {
        Reach::Local { domain, inbound } => {
            let _ = limit;
            let gone =
                || Error::new(ErrorKind::PeerDied, "import", "the peer's domain is closed: connect again");
            let core = domain.upgrade().ok_or_else(gone)?;
            let found = core.regions.find(key).map_err(refused)?;
            let first = std::ptr::NonNull::new(found.memory.as_ptr()).ok_or_else(gone)?;
            let mut place = match found.memory.kind() {
                MemoryKind::Cuda { device } => Place::Gpu { base: first.as_ptr() as u64, ordinal: device },
                _ => Place::Here(first),
            };
            if staging == Staging::Always && matches!(place, Place::Here(_)) {
                if core.staging == Staging::Never {
                    return Err(unstaged("`Staging::Always` was asked for here"));
                }
                inbound.staged()?;
                place = Place::Staged;
            }
            Ok(Answer {
                key: Key::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?,
                len: found.memory.len() as u64,
                access: found.access,
                place,
                #[cfg(target_os = "linux")]
                mapping: None,
                shared: None,
                lock: None,
            })
        }
        #[cfg(target_os = "linux")]
        Reach::Process(line) => line.import(key, limit, staging),
    }
}

/// The error for a key the target refused.
pub(crate) fn refused(kind: ErrorKind) -> Error {
    Error::new(kind, "import", crate::status::describe(crate::status::status(kind)))
}

/// The error for a peer that does not allow staging, which is needed for that reason.
pub(crate) fn unstaged(why: &str) -> Error {
    let context = format!(
        "{why}, and the peer does not allow staging: allow it in both processes \
         (LoopbackConfig::staging, MULTIRAIL_LOOPBACK_STAGING=1)"
    );
    Error::new(ErrorKind::Permission, "import", context)
}

/// Bytes nobody can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| {
        Error::new(ErrorKind::Io, "open", "the system has no randomness; check /dev/urandom").with_source(e)
    })?;
    Ok(bytes)
}

fn capabilities(config: &LoopbackConfig) -> Capabilities {
    let link = config.link.as_ref();
    let mut it = Capabilities::minimal();
    it.operations = Operations::all();
    it.imm_bytes = 4;
    // Requests to the host's memory overtake those that GPUs carry out, and staged ones.
    it.ordering = Ordered::empty();
    it.send_depth = link.and_then(|link| link.send_depth).unwrap_or(SEND_DEPTH).max(1);
    it.recv_depth = RECV_DEPTH;
    it.max_message = MESSAGE as u64;
    it.max_write = 1 << 30;
    it.chunk = 256 << 10;
    it.max_regions = SLOTS as u32;
    it.link_bits_per_s = link.and_then(|link| link.bits_per_s);
    it.requests_per_s = link.and_then(|link| link.ops_per_s);
    // A full lane holds its sender up, unless a device is impersonated.
    it.cq_depth = link.and_then(|link| link.cq_depth).map_or(u64::MAX, u64::from);
    it.progress = Progress::Manual;
    it.batch_bytes = BATCH;
    it.abort_scope = AbortScope::Peer;
    it.revocation = Revocation::Checked;
    it.delivered = DeliveredCost::None;
    if link.is_some_and(|link| !link.visible_after.is_zero()) {
        it.delivered_scope = DeliveredScope::Device;
    }
    // What a link model has under way, `Endpoint::due` announces.
    it.supports_wakeup = cfg!(unix);
    it.max_direct = if link.is_some() { 0 } else { DIRECT };
    it
}
