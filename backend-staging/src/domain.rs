//! The domain: registers memory with the inner device or stages it, and adds staging buffers to connections.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use multirail_spi::{
    Access, Capabilities, CoalescePolicy, Connector, Domain, Endpoint, EndpointConfig, Error, ErrorKind,
    FenceKind, Flushes, Memory, MemoryKind, MemoryRegion, Operations, Ordering, Paths, PeerSlot, RemoteKey,
    RemoteMemory, Result, StagingPolicy,
};

use crate::connection::Connections;
use crate::endpoint::StagedEndpoint;
use crate::gpu_memory::RegisteredGpuMemory;
use crate::imports::{CoalescedImport, CoalescedImports};
use crate::offer::{StagingOffer, append, split};
use crate::page_table::SlotLimit;
use crate::region::StagedRegions;
use crate::staging_buffer::{SLOT_COUNT, StagingBuffer};

/// The time that staging adds to a round trip: two GPU copies (15 µs each, H200), a slot request and a response over
/// the network, and a poll by each of two workers. An estimate that is too high only makes send queues longer. It also
/// serves coalesced pages of host memory: with 120 µs, the send window of a modelled p5 card was 5 % too small.
const ADDED_ROUND_TRIP: Duration = Duration::from_micros(200);
/// The most imms of one connection that can be in the completion queue: four for each slot. A slot has a slot request
/// and a response, each with an imm. The endpoint reads messages that announce no bytes without waiting for the
/// imm, so a second pair can follow before it has polled the imms of the first: for example, it answers a slot request
/// and gets the next one, while the imms of both are in the queue.
const IMMS_PER_CONNECTION: u64 = 4 * SLOT_COUNT as u64;
/// How long the import of a peer's staging buffer may take.
const IMPORT_LIMIT: Duration = Duration::from_secs(2);

/// What a domain and its endpoint share.
pub(crate) struct DomainState {
    pub inner: Arc<dyn Domain>,
    pub regions: Arc<StagedRegions>,
    pub gpu_memory: Arc<RegisteredGpuMemory>,
    pub connections: Connections,
    /// The flushes of memory that the inner device registered, for imms that this crate reports instead of the device.
    pub flushes: Flushes,
    capabilities: Capabilities,
    staging: StagingPolicy,
    /// Whether pages of registered regions may go through slots.
    coalesces: bool,
    /// The peers' regions that requests may address through slots.
    pub imports: Arc<CoalescedImports>,
    /// The most connections that use imms.
    max_imm_connections: u64,
}

/// A domain that stages the memory that its inner device refuses.
pub(crate) struct StagedDomain(Arc<DomainState>);

impl StagedDomain {
    pub(crate) fn new(
        inner: Arc<dyn Domain>,
        staging: StagingPolicy,
        coalesce: Option<CoalescePolicy>,
    ) -> Result<Self> {
        let mut capabilities = inner.capabilities().clone();
        if !capabilities.operations.contains(Operations::WRITE) {
            let why = "staging needs RDMA writes, which this device does not support";
            return Err(Error::new(ErrorKind::Unsupported, "open device", why));
        }
        let stages = staging != StagingPolicy::Never;
        capabilities.supports_staging = stages;
        capabilities.coalesce = coalesce;
        // Only an imm wakes a worker when its peer has written to a staging buffer.
        capabilities.supports_wakeup &= capabilities.operations.contains(Operations::WRITE_IMM);
        let max_imm_connections = take_imm_connections(&mut capabilities);
        capabilities.max_direct = 0;
        capabilities.max_inline = 0;
        if stages {
            // A message from staged memory has to fit one slot.
            capabilities.max_message = capabilities.max_message.min(SlotLimit::HOST.bytes);
        }
        capabilities.ordering = Ordering::empty();
        capabilities.round_trip += ADDED_ROUND_TRIP;
        capabilities.staging_delay += ADDED_ROUND_TRIP;
        Ok(Self(Arc::new(DomainState {
            inner,
            regions: Arc::default(),
            gpu_memory: Arc::default(),
            connections: Connections::default(),
            flushes: Flushes::default(),
            capabilities,
            staging,
            coalesces: coalesce.is_some(),
            imports: Arc::default(),
            max_imm_connections,
        })))
    }
}

/// The most connections that use imms. Their imms get half of the completion queue, the user's imms the other half. A
/// device that cannot wake a worker has imms for the messages that they save.
fn take_imm_connections(capabilities: &mut Capabilities) -> u64 {
    if !capabilities.operations.contains(Operations::WRITE_IMM) {
        return 0;
    }
    if capabilities.arrival_depth == u64::MAX {
        return u64::MAX;
    }
    let connections = capabilities.arrival_depth / 2 / IMMS_PER_CONNECTION;
    capabilities.arrival_depth -= connections * IMMS_PER_CONNECTION;
    connections
}

impl Domain for StagedDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn id(&self) -> u64 {
        self.0.inner.id()
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        if self.0.staging == StagingPolicy::Always {
            return Ok(Arc::new(self.0.regions.add(memory, access, "the settings stage all memory")?));
        }
        // SAFETY: by the caller.
        match unsafe { self.0.inner.register(Arc::clone(&memory), access) } {
            Ok(region) if region.lkey() & RemoteKey::STAGED != 0 || region.key().is_staged() => {
                let why = "the device's keys use the bit that marks staged memory: turn staging off for this device";
                Err(Error::new(ErrorKind::Unsupported, "register", why))
            }
            Ok(region) => {
                self.0.flushes.add(&*memory)?;
                let region = self.0.gpu_memory.track(&*memory, region);
                let is_remote = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_READ);
                if self.0.coalesces && is_remote {
                    return Ok(Arc::new(self.0.regions.add_registered(memory, access, region)?));
                }
                Ok(region)
            }
            Err(why) if self.0.staging == StagingPolicy::Never => Err(why),
            // Every device can register host memory. A refusal means a lack of resources, which the user has to fix.
            Err(why) if memory.kind() == MemoryKind::Host => Err(why),
            Err(why) => {
                let (kind, len) = (memory.kind(), memory.len());
                tracing::info!(%why, ?kind, len, "staging: the device refuses this memory, so it is staged");
                Ok(Arc::new(self.0.regions.add(memory, access, &why.to_string())?))
            }
        }
    }

    fn import(&self, peer: PeerSlot, key: &RemoteKey, limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        if !key.is_staged() {
            let import = self.0.inner.import(peer, key, limit)?;
            return Ok(match self.0.connections.of(peer) {
                Some(connection) if connection.coalesces() => {
                    Arc::new(CoalescedImport::new(&self.0.imports, peer, key, import))
                }
                _ => import,
            });
        }
        if key.base != RemoteKey::STAGED || key.len > isize::MAX as u64 {
            let why =
                "the key of the peer's staged memory is invalid: the peer breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "import", why));
        }
        if self.0.connections.of(peer).is_none_or(|connection| connection.remote_buffer().is_none()) {
            let why = "the peer's memory is staged, but the peer has offered no staging buffer: the peer breaks the \
                       protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "import", why));
        }
        Ok(Arc::new(StagedImport { key: *key, path: self.capabilities().path | Paths::STAGED }))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn unclosed_endpoints(&self) -> usize {
        self.0.inner.unclosed_endpoints()
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let inner = self.0.inner.endpoint(config)?;
        Ok(Box::new(StagedEndpoint::new(Arc::clone(&self.0), inner)))
    }
}

impl StagedDomain {
    /// Creates this process's staging buffer for a connection that the inner connector has prepared, and appends its
    /// key to the offer.
    fn add_buffer(&self, (peer, offer): (PeerSlot, Vec<u8>)) -> Result<(PeerSlot, Vec<u8>)> {
        let appended = StagingBuffer::new(&*self.0.inner).and_then(|buffer| {
            let key = buffer.key()?;
            let connection = self.0.connections.insert(peer, buffer, self.0.max_imm_connections);
            let staging = StagingOffer {
                buffer: key,
                imms: connection.imms,
                is_woken: self.0.capabilities.supports_wakeup,
                coalesces: self.0.coalesces,
            };
            append(offer, staging).inspect_err(|_| self.0.connections.remove(&connection))
        });
        match appended {
            Ok(offer) => Ok((peer, offer)),
            Err(why) => {
                self.0.inner.connector().disconnect(peer);
                Err(why)
            }
        }
    }
}

impl Connector for StagedDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.add_buffer(self.0.inner.connector().prepare()?)
    }

    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.add_buffer(self.0.inner.connector().prepare_local()?)
    }

    fn complete(&self, peer: PeerSlot, offer: &[u8]) -> Result<()> {
        let (inner, staging) = split(offer)?;
        self.0.inner.connector().complete(peer, inner)?;
        if let (Some(connection), Some(staging)) = (self.0.connections.of(peer), staging) {
            let import = self.0.inner.import(peer, &staging.buffer, IMPORT_LIMIT)?;
            connection.connect(import, staging, self.0.coalesces);
        }
        if let Some(connection) = self.0.connections.of(peer) {
            connection.set_complete();
        }
        Ok(())
    }

    fn next_offer(&self, peer: PeerSlot) -> Result<Option<Vec<u8>>> {
        self.0.inner.connector().next_offer(peer)
    }

    fn renew(&self, peer: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        self.0.inner.connector().renew(peer, offer)
    }

    fn finish_renewal(&self, peer: PeerSlot, answer: &[u8]) -> Result<()> {
        self.0.inner.connector().finish_renewal(peer, answer)
    }

    fn is_same_sender(&self, named: PeerSlot, other: PeerSlot) -> bool {
        self.0.inner.connector().is_same_sender(named, other)
    }

    fn fence(&self, peer: PeerSlot, kind: FenceKind) -> Poll<Result<()>> {
        let is_shut = self.0.connections.of(peer).is_none_or(|connection| connection.fence());
        match self.0.inner.connector().fence(peer, kind) {
            Poll::Ready(Ok(())) if !is_shut => Poll::Pending,
            inner => inner,
        }
    }

    fn lift_fence(&self, peer: PeerSlot) -> Result<()> {
        if let Some(connection) = self.0.connections.of(peer) {
            connection.lift_fence();
        }
        self.0.inner.connector().lift_fence(peer)
    }

    fn disconnect(&self, peer: PeerSlot) {
        if let Some(connection) = self.0.connections.of(peer) {
            connection.close();
        }
        self.0.inner.connector().disconnect(peer);
    }
}

/// The import of a peer's staged region.
struct StagedImport {
    key: RemoteKey,
    path: Paths,
}

impl RemoteMemory for StagedImport {
    fn rkey(&self) -> u64 {
        self.key.key
    }

    fn base(&self) -> u64 {
        RemoteKey::STAGED
    }

    fn path(&self) -> &'static str {
        "staged through the host's memory"
    }

    fn paths(&self, _: bool) -> Paths {
        self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imms_announce_bytes_whether_or_not_they_wake_a_worker() {
        let half = 8192 / 2 / IMMS_PER_CONNECTION;
        for (has_imms, wakes, connections) in [(true, true, half), (true, false, half), (false, false, 0)] {
            let mut capabilities = Capabilities::minimal();
            (capabilities.arrival_depth, capabilities.supports_wakeup) = (8192, wakes);
            capabilities.operations.set(Operations::WRITE_IMM, has_imms);
            assert_eq!(take_imm_connections(&mut capabilities), connections);
            assert_eq!(capabilities.arrival_depth, 8192 - connections * IMMS_PER_CONNECTION);
        }
    }
}
