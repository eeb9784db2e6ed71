//! An opened loopback device.

mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use multirail_spi::{
    AbortScope, Access, Capabilities, Connector, DeliveredCost, DeliveredScope, Direct, Domain, DomainSetup,
    Endpoint, EndpointConfig, Error, ErrorKind, FenceKind, Memory, MemoryKind, MemoryRegion, Operations,
    Ordering as Ordered, Paths, PeerSlot, Progress, RemoteKey, RemoteMemory, Result, Revocation,
};

use crate::config::LoopbackConfig;
use crate::direct::{LoopbackDirect, MAX_DIRECT};
use crate::domain_state::DomainState;
use crate::endpoint::LoopbackEndpoint;
use crate::host::{HostIdentity, random};
use crate::imports::{ImportHandle, ImportTable, resolve};
use crate::inbound::Inbound;
use crate::offer::LoopbackOffer;
use crate::other_process::OfferedSocket;
use crate::outbound::{Outbound, PeerLocation};
use crate::peer_table::PeerTable;
use crate::regions::{RegionHandle, Regions};
use crate::segment::Segment;
use crate::segment::lease_table::REGION_SLOTS;
use crate::segment::message_ring::MAX_MESSAGE;

/// Requests that may be completed and not polled, or under way on GPUs: 64 MiB of 4 KiB pages, four batches on each
/// of four streams.
const SEND_DEPTH: u32 = 16384;
/// Receives that may be posted.
const RECV_DEPTH: u32 = 1024;

/// Bytes per batch. A post copies, and returns within about 25 µs at 20 GB/s. With twice as many bytes, writes of 1
/// MiB were 10 % slower (`benches/benches/write.rs`).
const BATCH: u64 = 1 << 19;

/// The part of a domain that its endpoint, its regions and its imports keep open. Its drop closes all connections and
/// stops the server.
struct DomainInner {
    state: Arc<DomainState>,
    server: std::sync::OnceLock<server::DomainServer>,
}

impl Drop for DomainInner {
    fn drop(&mut self) {
        self.state.withdraw();
        for (_, peer) in self.state.peers.all() {
            peer.close();
            self.state.regions.remove_peer(&peer.inbound);
        }
    }
}

/// An opened device of [`crate::Loopback`].
pub(crate) struct LoopbackDomain {
    inner: Arc<DomainInner>,
}

impl LoopbackDomain {
    /// Opens device `number`.
    pub(crate) fn open(number: u32, setup: &DomainSetup, config: &LoopbackConfig) -> Result<Self> {
        let state = Arc::new(DomainState {
            id: u64::from_ne_bytes(random()?),
            capabilities: capabilities(config),
            setup: setup.clone(),
            number,
            link: config.link.clone(),
            gpus: config.gpus(),
            peers: PeerTable::default(),
            regions: Arc::new(Regions::default()),
            imports: Arc::new(ImportTable::default()),
            wakeup: Arc::default(),
            staging: config.staging,
            endpoint_open: AtomicBool::new(false),
        });
        state.publish();
        let inner = DomainInner { state, server: std::sync::OnceLock::new() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What the domain's parts share.
    #[cfg(test)]
    pub(crate) fn state(&self) -> &Arc<DomainState> {
        &self.inner.state
    }

    fn connected(&self, operation: &'static str, slot: PeerSlot) -> Result<Arc<Outbound>> {
        let peer = self.inner.state.peers.find(slot).filter(|peer| !peer.leaving);
        peer.and_then(|peer| peer.outbound).ok_or_else(|| {
            let context = format!("peer slot {} is not connected: complete the connection first", slot.0);
            Error::new(ErrorKind::Unreachable, operation, context)
        })
    }

    fn prepare_with(
        &self,
        segment: Segment,
        host: HostIdentity,
        socket: Option<OfferedSocket>,
    ) -> Result<(PeerSlot, Vec<u8>)> {
        let state = &self.inner.state;
        let token = random()?;
        let name = socket.as_ref().map_or("", OfferedSocket::name).into();
        let offer =
            LoopbackOffer { host, process: std::process::id(), domain: state.id, token, socket: name };
        let bytes = offer.to_bytes()?;
        let inbound = Arc::new(Inbound::new(segment, state.wakeup.clone(), token, socket));
        Ok((state.peers.insert(inbound), bytes))
    }

    /// The server's socket. The first call starts the server.
    #[cfg(not(miri))]
    fn offer_socket(&self) -> Result<Option<OfferedSocket>> {
        if let Some(server) = self.inner.server.get() {
            return server.offer().map(Some);
        }
        let server = server::DomainServer::start(&self.inner.state)?;
        self.inner.server.get_or_init(|| server).offer().map(Some)
    }

    #[cfg(miri)]
    fn offer_socket(&self) -> Result<Option<OfferedSocket>> {
        Ok(None)
    }
}

impl Domain for LoopbackDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.inner.state.capabilities
    }

    fn id(&self) -> u64 {
        self.inner.state.id
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        let (len, in_device_memory) = (memory.len() as u64, memory.kind() != MemoryKind::Host);
        let regions = &self.inner.state.regions;
        let key = regions.insert(memory, access)?;
        Ok(Arc::new(RegionHandle::new(regions, key, len, in_device_memory, self.inner.clone())))
    }

    fn import(&self, peer: PeerSlot, key: &RemoteKey, limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        let state = &self.inner.state;
        let target = self.connected("import", peer)?;
        let region = resolve(&target, key.key, limit, state.staging)?;
        if key.base != 0 || key.len > region.len {
            let context = "the descriptor does not match the peer's region: ask the peer for a new one";
            return Err(Error::new(ErrorKind::RemoteAccess, "import", context));
        }
        let import = state.imports.insert(target, region)?;
        Ok(Arc::new(ImportHandle::new(import, &state.imports, self.inner.clone())))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        if self.inner.state.endpoint_open.swap(true, Ordering::AcqRel) {
            let context = "the domain's endpoint is open already: drop it first";
            return Err(Error::new(ErrorKind::Busy, "open an endpoint", context));
        }
        Ok(Box::new(LoopbackEndpoint::new(&self.inner.state, &config, self.inner.clone())))
    }

    fn direct(&self, peer: PeerSlot) -> Option<Arc<dyn Direct>> {
        if self.inner.state.link.is_some() {
            return None;
        }
        let outbound = self.connected("direct", peer).ok()?;
        Some(Arc::new(LoopbackDirect::new(outbound)))
    }
}

impl Connector for LoopbackDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare_with(Segment::create()?, HostIdentity::here(), self.offer_socket()?)
    }

    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare_with(Segment::private()?, HostIdentity::default(), None)
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let offer = LoopbackOffer::parse(offer)?;
        let state = &self.inner.state;
        let fail =
            |kind, context: &str| Error::new(kind, "connect", format!("peer slot {}: {context}", slot.0));
        match state.peers.find(slot) {
            Some(peer) if peer.leaving => {
                return Err(fail(ErrorKind::Closed, "disconnected; prepare a new one"));
            }
            Some(peer) if peer.outbound.is_some() => return Err(fail(ErrorKind::Busy, "connected already")),
            Some(_) => {}
            None => return Err(fail(ErrorKind::NotFound, "was never prepared; call `prepare` first")),
        }
        let outbound = Arc::new(Outbound::new(slot, locate(&offer)?));
        let watched = Arc::clone(&outbound);
        let was_set = state.peers.update(slot, |peer| {
            let is_free = !peer.leaving && peer.outbound.is_none();
            if is_free {
                peer.outbound = Some(outbound);
            }
            is_free
        });
        if was_set != Some(true) {
            return Err(fail(ErrorKind::Busy, "changed while it was being connected"));
        }
        state.wakeup.wake();
        if let Some(server) = self.inner.server.get() {
            server.watch(watched);
        }
        Ok(())
    }

    fn fence(&self, slot: PeerSlot, _: FenceKind) -> Poll<Result<()>> {
        let state = &self.inner.state;
        let Some(peer) = state.peers.find(slot) else { return Poll::Ready(Ok(())) };
        let (takes, ignores) =
            state.link.as_ref().map_or_else(Default::default, |link| (link.fence_takes, link.ignores_fences));
        let is_shut = ignores || peer.inbound.fence(state.setup.clock.now(), takes);
        if is_shut { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn lift_fence(&self, slot: PeerSlot) -> Result<()> {
        if let Some(peer) = self.inner.state.peers.find(slot) {
            peer.inbound.lift_fence();
        }
        Ok(())
    }

    fn disconnect(&self, slot: PeerSlot) {
        let state = &self.inner.state;
        let left = state.peers.update(slot, |peer| {
            let is_first = !peer.leaving;
            peer.leaving = true;
            is_first.then(|| peer.clone())
        });
        let Some(Some(peer)) = left else { return };
        peer.close();
        state.regions.remove_peer(&peer.inbound);
        if state.endpoint_open.load(Ordering::Acquire) {
            state.wakeup.wake();
        } else {
            state.peers.remove(slot, &peer.inbound);
        }
        if let Some(server) = self.inner.server.get() {
            server.forget(peer.outbound);
        }
    }
}

/// Finds the peer that made `offer`: in this process, or in another process of this host.
fn locate(offer: &LoopbackOffer) -> Result<PeerLocation> {
    let unreachable = |why: String| Error::new(ErrorKind::Unreachable, "connect", why);
    // An offer of `prepare_local` names no host, since reading the host's ids would take longer than the rest of it.
    let is_local = offer.host == HostIdentity::default();
    if !is_local && let Some(obstacle) = HostIdentity::here().obstacle(&offer.host) {
        return Err(unreachable(obstacle));
    }
    let Some(state) = DomainState::in_this_process(offer.domain) else {
        let why = "the offer was made for a peer in its own process: prepare one for others";
        return if is_local { Err(unreachable(why.into())) } else { connect_to_process(offer) };
    };
    let inbound = state.admit(&offer.token)?.ok_or_else(|| {
        let context = "the peer's offer was used already or withdrawn: exchange new offers";
        Error::new(ErrorKind::Unreachable, "connect", context)
    })?;
    let regions = Arc::downgrade(&state.regions);
    Ok(PeerLocation::ThisProcess { inbound, regions, staging: state.staging })
}

#[cfg(not(miri))]
fn connect_to_process(offer: &LoopbackOffer) -> Result<PeerLocation> {
    let connection = crate::other_process::TargetConnection::connect(offer)?;
    Ok(PeerLocation::OtherProcess(Box::new(connection)))
}

#[cfg(miri)]
fn connect_to_process(_: &LoopbackOffer) -> Result<PeerLocation> {
    let context = "miri runs one process";
    Err(Error::new(ErrorKind::Unsupported, "connect", context))
}

fn capabilities(config: &LoopbackConfig) -> Capabilities {
    let link = config.link.as_ref();
    let mut it = Capabilities::minimal();
    it.operations = Operations::all();
    it.path = Paths::MEMORY_COPY;
    it.imm_bytes = 4;
    // Requests to host memory overtake staged ones and those that GPUs carry out.
    it.ordering = Ordered::empty();
    it.send_depth = link.and_then(|link| link.send_depth).unwrap_or(SEND_DEPTH).max(1);
    it.recv_depth = RECV_DEPTH;
    it.max_message = MAX_MESSAGE as u64;
    it.max_write = 1 << 30;
    it.chunk = 256 << 10;
    it.max_regions = REGION_SLOTS as u32;
    it.link_bits_per_s = link.and_then(|link| link.bits_per_s);
    it.requests_per_s = link.and_then(|link| link.ops_per_s);
    // Without a link model nothing can be overrun: a full message ring makes the sender wait.
    it.arrival_depth = link.and_then(|link| link.cq_depth).map_or(u64::MAX, u64::from);
    // A modelled line moves the bytes in its own time.
    let has_line = link.is_some_and(|link| link.bits_per_s.is_some());
    it.progress = if has_line { Progress::Auto } else { Progress::Manual };
    if let Some(link) = link.filter(|_| has_line) {
        it.round_trip = link.round_trip();
    }
    it.batch_bytes = BATCH;
    it.abort_scope = AbortScope::Peer;
    it.revocation = Revocation::Checked;
    it.fences = true;
    it.delivered = DeliveredCost::None;
    if link.is_some_and(|link| !link.visible_after.is_zero()) {
        it.delivered_scope = DeliveredScope::Device;
    }
    // Requests that a link model delays wake no endpoint: `Endpoint::due` says when they are due.
    it.supports_wakeup = cfg!(unix);
    it.max_direct = if link.is_some() { 0 } else { MAX_DIRECT };
    it
}
