//! An opened null device. Its regions and connections are numbers only.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use multirail_spi::{
    AbortScope, Access, Capabilities, Clock, Connector, DeliveredCost, Domain, DomainSetup, Endpoint,
    EndpointConfig, Error, ErrorKind, Memory, MemoryRegion, Operations, Paths, PeerSlot, Progress, RemoteKey,
    RemoteMemory, Result, Revocation,
};

use super::Null;
use super::endpoint::NullEndpoint;
use super::switch::{Switch, SwitchPort};
use crate::LinkModel;
use crate::host::random;
use crate::link_model::DeviceModel;

/// Requests that may be outstanding: the depth of an EFA card's send queue (`fi_info` on a p5).
const SEND_DEPTH: u32 = 4096;
/// Receives that may be posted: the depth of an EFA card's receive queue.
const RECV_DEPTH: u32 = 8192;
/// The beginning of a null device's offer. The offers of other backends begin differently.
const OFFER: &[u8] = b"MRNULL1";

/// The peers of a null domain. The control side changes them, and the endpoint reads them.
#[derive(Default)]
pub(super) struct NullPeers {
    next: u32,
    /// The slot of the peer whose imms the endpoint reports.
    pub(super) first: Option<PeerSlot>,
    /// With a switch: for each slot, the peer's port and the peer's slot for this side.
    pub(super) ports: HashMap<PeerSlot, (Arc<SwitchPort>, PeerSlot)>,
    /// Slots whose `PeerGone` the endpoint must report.
    pub(super) gone: Vec<PeerSlot>,
}

/// The state that a null domain shares with its endpoint.
#[derive(Default)]
pub(super) struct NullState {
    pub(super) peers: Mutex<NullPeers>,
    /// True if `peers` has changed since the endpoint read it. Most polls need no lock because of it.
    pub(super) changed: AtomicBool,
    /// True while an endpoint is open.
    pub(super) endpoint_open: AtomicBool,
}

pub(super) struct NullDomain {
    id: u64,
    capabilities: Capabilities,
    keys: AtomicU64,
    imms_per_poll: u32,
    clock: Arc<dyn Clock>,
    /// The link model, until the endpoint takes it.
    model: Mutex<Option<DeviceModel>>,
    /// With a switch: the port at which requests arrive.
    port: Option<(Switch, Arc<SwitchPort>)>,
    state: Arc<NullState>,
}

impl NullDomain {
    pub(super) fn open(setup: &DomainSetup, null: &Null, model: Option<DeviceModel>) -> Result<Self> {
        let link = null.link.as_ref();
        let id = u64::from_ne_bytes(random()?);
        let mut capabilities = Capabilities::minimal();
        capabilities.operations = Operations::all();
        capabilities.imm_bytes = 4;
        capabilities.arrival_depth = u64::MAX;
        capabilities.send_depth = link.and_then(|link| link.send_depth).unwrap_or(SEND_DEPTH).max(1);
        capabilities.recv_depth = RECV_DEPTH;
        capabilities.max_message = 1 << 20;
        capabilities.chunk = 256 << 10;
        if let Some(link) = link {
            set_link_capabilities(&mut capabilities, link);
        }
        capabilities.max_regions = u32::MAX;
        capabilities.progress = Progress::Auto;
        capabilities.abort_scope = AbortScope::Peer;
        capabilities.revocation = Revocation::Checked;
        capabilities.delivered = DeliveredCost::None;
        Ok(Self {
            id,
            port: null
                .switch_and_link()
                .map(|(switch, link)| (switch.clone(), switch.plug(id, link.clone()))),
            capabilities,
            keys: AtomicU64::new(1),
            imms_per_poll: null.imms_per_poll,
            clock: Arc::clone(&setup.clock),
            model: Mutex::new(model),
            state: Arc::default(),
        })
    }

    /// Parses the address in an offer: an empty one without a switch, else a device and slot of the same switch.
    /// Returns `None` if this side cannot reach it.
    fn parse_address(&self, address: &[u8]) -> Option<Option<(Arc<SwitchPort>, PeerSlot)>> {
        let Some((switch, _)) = &self.port else { return address.is_empty().then_some(None) };
        let (device, slot) = address.split_first_chunk()?;
        let slot = PeerSlot(u32::from_le_bytes(slot.try_into().ok()?));
        Some(Some((switch.port(u64::from_le_bytes(*device))?, slot)))
    }

    fn change(&self, change: impl FnOnce(&mut NullPeers)) {
        change(&mut self.state.peers.lock().unwrap_or_else(PoisonError::into_inner));
        self.state.changed.store(true, Ordering::Release);
    }
}

/// Sets the capabilities that a link model determines.
fn set_link_capabilities(capabilities: &mut Capabilities, link: &LinkModel) {
    capabilities.link_bits_per_s = link.bits_per_s;
    capabilities.requests_per_s = link.ops_per_s;
    capabilities.round_trip = link.round_trip();
    capabilities.arrival_depth = link.cq_depth.map_or(u64::MAX, u64::from);
    if let Some(rate) = link.bits_per_s {
        // A quarter of the bytes that the link carries in two round trips.
        let carried = u128::from(rate / 8) * link.round_trip().as_nanos() / 1_000_000_000;
        let quarter = u64::try_from(carried / 2).unwrap_or(u64::MAX).clamp(64 << 10, 1 << 20);
        capabilities.chunk = quarter.next_power_of_two();
    }
}

impl Domain for NullDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> u64 {
        self.id
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, _: Access) -> Result<Arc<dyn MemoryRegion>> {
        Ok(Arc::new(NullRegion {
            key: self.keys.fetch_add(1, Ordering::Relaxed),
            len: memory.len() as u64,
            _memory: memory,
        }))
    }

    fn import(&self, _: PeerSlot, key: &RemoteKey, _: Duration) -> Result<Arc<dyn RemoteMemory>> {
        Ok(Arc::new(NullRemoteMemory { key: *key }))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        if self.state.endpoint_open.swap(true, Ordering::AcqRel) {
            let context = "the domain's endpoint is open already: drop it first";
            return Err(Error::new(ErrorKind::Busy, "open an endpoint", context));
        }
        let most = self.capabilities.send_depth;
        let depth = config.send_depth.unwrap_or(most).clamp(1, most) as usize;
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (state, clock) = (Arc::clone(&self.state), Arc::clone(&self.clock));
        let port = self.port.as_ref().map(|(_, port)| Arc::clone(port));
        Ok(Box::new(NullEndpoint::new(state, clock, depth, self.imms_per_poll, model, port)))
    }
}

impl Connector for NullDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let mut slot = PeerSlot(0);
        self.change(|peers| {
            slot = PeerSlot(peers.next);
            peers.next += 1;
        });
        let address =
            self.port.as_ref().map(|_| [&self.id.to_le_bytes()[..], &slot.0.to_le_bytes()].concat());
        Ok((slot, [OFFER, &address.unwrap_or_default()].concat()))
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let Some(address) = offer.strip_prefix(OFFER).and_then(|address| self.parse_address(address)) else {
            let context = "the offer is not one of a null device that this device can reach: open null devices on both \
                           sides, behind the same switch or without one";
            return Err(Error::new(ErrorKind::Protocol, "connect", context));
        };
        self.change(|peers| {
            peers.first.get_or_insert(slot);
            peers.ports.extend(address.map(|address| (slot, address)));
        });
        Ok(())
    }

    fn disconnect(&self, slot: PeerSlot) {
        self.change(|peers| {
            peers.first.take_if(|first| *first == slot);
            peers.ports.remove(&slot);
            peers.gone.push(slot);
        });
    }
}

/// A registration of memory that no device touches.
struct NullRegion {
    key: u64,
    len: u64,
    _memory: Arc<dyn Memory>,
}

impl MemoryRegion for NullRegion {
    fn lkey(&self) -> u64 {
        self.key
    }

    fn key(&self) -> RemoteKey {
        RemoteKey { base: 0, key: self.key, len: self.len }
    }

    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A region of a peer, by its key.
struct NullRemoteMemory {
    key: RemoteKey,
}

impl RemoteMemory for NullRemoteMemory {
    fn rkey(&self) -> u64 {
        self.key.key
    }

    fn base(&self) -> u64 {
        self.key.base
    }

    /// A null device stands for a card.
    fn paths(&self, _: bool) -> Paths {
        Paths::RDMA
    }
}
