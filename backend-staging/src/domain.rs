//! The domain: the card's, where it takes the memory; and the connector, which brings the rings along.

use std::sync::Arc;
use std::time::Duration;

use multirail_spi::{
    Access, Capabilities, Connector, Domain, Endpoint, EndpointConfig, Error, ErrorKind, Fences, KeyMaterial,
    Memory, MemoryKind, MemoryRegion, Operations, Ordering, PeerSlot, RemoteMemory, Result, Staging,
};

use crate::endpoint::StagedEndpoint;
use crate::far::Far;
use crate::link::{Links, Stage, append, split};
use crate::region::Regions;
use crate::ring::{Ring, SLOT, SLOTS};

/// What staging adds to a round trip: two copies by GPUs (15 µs each, H200), an ask and an answer more on the line,
/// and the turns of two workers. Too much costs nothing but a longer queue.
const LONGER: Duration = Duration::from_micros(200);
/// Knocks of one connection that may not have been polled: an ask's and an answer's for each slot, and the next ones',
/// as the ring may be looked at before the queue tells of it.
const KNOCKS: u64 = 4 * SLOTS as u64;
/// How long importing a peer's ring may take.
const IMPORT_LIMIT: Duration = Duration::from_secs(2);

/// What the domain, its connector and its endpoint share.
pub(crate) struct Shared {
    pub inner: Arc<dyn Domain>,
    pub regions: Arc<Regions>,
    pub far: Arc<Far>,
    pub links: Links,
    /// Of memory that the card takes, for what is told here of it.
    pub fences: Fences,
    capabilities: Capabilities,
    staging: Staging,
    /// Connections that may knock.
    knockers: u64,
}

/// A domain that stages what its card refuses.
pub(crate) struct StagedDomain(Arc<Shared>);

impl StagedDomain {
    pub(crate) fn new(inner: Arc<dyn Domain>, staging: Staging) -> Result<Self> {
        let mut capabilities = inner.capabilities().clone();
        if !capabilities.operations.contains(Operations::WRITE) {
            let why = "staging needs RDMA writes, which this device does not offer";
            return Err(Error::new(ErrorKind::Unsupported, "open device", why));
        }
        capabilities.supports_staging = true;
        // An imm tells when a peer has written into a ring.
        capabilities.supports_wakeup &= capabilities.operations.contains(Operations::WRITE_IMM);
        let knockers = match (capabilities.supports_wakeup, &mut capabilities.cq_depth) {
            (false, _) => 0,
            (true, &mut u64::MAX) => u64::MAX,
            // The queue is shared with the users' imms.
            (true, depth) => {
                let knockers = *depth / 2 / KNOCKS;
                *depth -= knockers * KNOCKS;
                knockers
            }
        };
        capabilities.max_direct = 0;
        // One from staged memory takes a slot.
        capabilities.max_message = capabilities.max_message.min(SLOT as u64);
        capabilities.max_inline = 0;
        capabilities.ordering = Ordering::empty();
        capabilities.round_trip += LONGER;
        Ok(Self(Arc::new(Shared {
            inner,
            regions: Arc::default(),
            far: Arc::default(),
            links: Links::default(),
            fences: Fences::default(),
            capabilities,
            staging,
            knockers,
        })))
    }
}

impl Domain for StagedDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn id(&self) -> u64 {
        self.0.inner.id()
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        if self.0.staging == Staging::Always {
            return Ok(Arc::new(self.0.regions.add(memory, access, "all memory is, as was asked for")?));
        }
        // SAFETY: by the caller.
        match unsafe { self.0.inner.register(Arc::clone(&memory), access) } {
            Ok(region) if region.lkey() & KeyMaterial::STAGED != 0 || region.key().is_staged() => {
                let why =
                    "the device's keys leave no room to tell staged memory from its own: do without staging";
                Err(Error::new(ErrorKind::Unsupported, "register", why))
            }
            Ok(region) => {
                self.0.fences.add(&*memory)?;
                Ok(self.0.far.note(&*memory, region))
            }
            // Memory of the host's is refused for want of something, which is to be mended.
            Err(why) if memory.kind() == MemoryKind::Host => Err(why),
            Err(why) => {
                tracing::info!(%why, kind = ?memory.kind(), len = memory.len(), "staged: the device does not take it");
                Ok(Arc::new(self.0.regions.add(memory, access, &why.to_string())?))
            }
        }
    }

    fn import(&self, peer: PeerSlot, key: &KeyMaterial, limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        if !key.is_staged() {
            return self.0.inner.import(peer, key, limit);
        }
        if key.base != KeyMaterial::STAGED || key.len > isize::MAX as u64 {
            let why = "the key of staged memory cannot be: do not trust this peer";
            return Err(Error::new(ErrorKind::Protocol, "import", why));
        }
        if self.0.links.of(peer).is_none_or(|link| link.there().is_none()) {
            let why = "the peer has said of no ring, without which its memory cannot be staged";
            return Err(Error::new(ErrorKind::Protocol, "import", why));
        }
        Ok(Arc::new(Imported(*key)))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn unclosed(&self) -> usize {
        self.0.inner.unclosed()
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let inner = self.0.inner.endpoint(config)?;
        Ok(Box::new(StagedEndpoint::new(Arc::clone(&self.0), inner)))
    }
}

/// A peer's staged region.
struct Imported(KeyMaterial);

impl RemoteMemory for Imported {
    fn rkey(&self) -> u64 {
        self.0.key
    }

    fn base(&self) -> u64 {
        KeyMaterial::STAGED
    }

    fn path(&self) -> &'static str {
        "staged through the host's memory"
    }
}

impl StagedDomain {
    /// Adds a ring to what the card has prepared.
    fn prepared(&self, (slot, offer): (PeerSlot, Vec<u8>)) -> Result<(PeerSlot, Vec<u8>)> {
        let added = Ring::new(&*self.0.inner).and_then(|ring| {
            let key = ring.key()?;
            let link = self.0.links.insert(slot, ring, self.0.knockers);
            let stage = Stage { ring: key, knocks: link.knocks };
            append(offer, stage).inspect_err(|_| self.0.links.remove(&link))
        });
        match added {
            Ok(offer) => Ok((slot, offer)),
            Err(why) => {
                self.0.inner.connector().disconnect(slot);
                Err(why)
            }
        }
    }
}

impl Connector for StagedDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepared(self.0.inner.connector().prepare()?)
    }

    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepared(self.0.inner.connector().prepare_local()?)
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let (offer, theirs) = split(offer)?;
        self.0.inner.connector().complete(slot, offer)?;
        if let (Some(link), Some(Stage { ring, knocks })) = (self.0.links.of(slot), theirs) {
            let ring = self.0.inner.import(slot, &ring, IMPORT_LIMIT)?;
            link.connect(ring, knocks);
        }
        Ok(())
    }

    fn offer_again(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        self.0.inner.connector().offer_again(slot)
    }

    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        self.0.inner.connector().renew(slot, offer)
    }

    fn renewed(&self, slot: PeerSlot, answer: &[u8]) -> Result<()> {
        self.0.inner.connector().renewed(slot, answer)
    }

    fn disconnect(&self, slot: PeerSlot) {
        if let Some(link) = self.0.links.of(slot) {
            link.leave();
        }
        self.0.inner.connector().disconnect(slot);
    }
}
