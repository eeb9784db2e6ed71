//! An opened null device: numbers where others have memory and queues.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use multirail_spi::{
    AbortScope, Access, Capabilities, Clock, Connector, DeliveredCost, Domain, DomainSetup, Endpoint,
    EndpointConfig, Error, ErrorKind, KeyMaterial, Memory, MemoryRegion, Operations, PeerSlot, Progress,
    RemoteMemory, Result, Revocation,
};

use super::Null;
use super::endpoint::NullEndpoint;
use super::switch::{Port, Switch};
use crate::LinkModel;
use crate::domain::random;
use crate::model::Model;

/// Requests that may be outstanding: an EFA card's send queue (`fi_info` on a p5).
const SEND_DEPTH: u32 = 4096;
/// Receives that may be posted: an EFA card's receive queue.
const RECV_DEPTH: u32 = 8192;
/// What a null device offers a peer: enough to refuse any other backend's offer.
const OFFER: &[u8] = b"MRNULL1";

/// Peers that come and go, between the control plane and the endpoint.
#[derive(Default)]
pub(super) struct Peers {
    next: u32,
    /// The slot whose imms arrive.
    pub(super) first: Option<PeerSlot>,
    /// Behind a switch: the port of a slot's peer, and our slot there.
    pub(super) ports: HashMap<PeerSlot, (Arc<Port>, PeerSlot)>,
    /// Slots whose `PeerGone` is to be reported.
    pub(super) gone: Vec<PeerSlot>,
}

/// What the endpoint shares with the domain.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) peers: Mutex<Peers>,
    /// Set when `peers` changed, so that a poll need not lock.
    pub(super) changed: AtomicBool,
    pub(super) open: AtomicBool,
}

pub(super) struct NullDomain {
    id: u64,
    capabilities: Capabilities,
    keys: AtomicU64,
    imms_per_poll: u32,
    clock: Arc<dyn Clock>,
    /// The endpoint's, once it is opened.
    model: Mutex<Option<Model>>,
    /// Where requests arrive.
    port: Option<(Switch, Arc<Port>)>,
    shared: Arc<Shared>,
}

impl NullDomain {
    pub(super) fn open(setup: &DomainSetup, null: &Null, model: Option<Model>) -> Result<Self> {
        let link = null.link.as_ref();
        let id = u64::from_ne_bytes(random()?);
        let mut capabilities = Capabilities::minimal();
        capabilities.operations = Operations::all();
        capabilities.imm_bytes = 4;
        capabilities.cq_depth = u64::MAX;
        capabilities.send_depth = link.and_then(|link| link.send_depth).unwrap_or(SEND_DEPTH).max(1);
        capabilities.recv_depth = RECV_DEPTH;
        capabilities.max_message = 1 << 20;
        capabilities.chunk = 256 << 10;
        if let Some(link) = link {
            model_line(&mut capabilities, link);
        }
        capabilities.max_regions = u32::MAX;
        capabilities.progress = Progress::Auto;
        capabilities.abort_scope = AbortScope::Peer;
        capabilities.revocation = Revocation::Checked;
        capabilities.delivered = DeliveredCost::None;
        Ok(Self {
            id,
            port: null.plugged().map(|(switch, link)| (switch.clone(), switch.plug(id, link.clone()))),
            capabilities,
            keys: AtomicU64::new(1),
            imms_per_poll: null.imms_per_poll,
            clock: Arc::clone(&setup.clock),
            model: Mutex::new(model),
            shared: Arc::default(),
        })
    }

    /// The place an offer names: none without a switch, else a device behind the same one.
    fn reached(&self, place: &[u8]) -> Option<Option<(Arc<Port>, PeerSlot)>> {
        let Some((switch, _)) = &self.port else { return place.is_empty().then_some(None) };
        let (device, slot) = place.split_first_chunk()?;
        let slot = PeerSlot(u32::from_le_bytes(slot.try_into().ok()?));
        Some(Some((switch.port(u64::from_le_bytes(*device))?, slot)))
    }

    fn change(&self, change: impl FnOnce(&mut Peers)) {
        change(&mut self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.changed.store(true, Ordering::Release);
    }
}

/// What a modelled line says of itself.
fn model_line(capabilities: &mut Capabilities, link: &LinkModel) {
    capabilities.link_bits_per_s = link.bits_per_s;
    capabilities.requests_per_s = link.ops_per_s;
    capabilities.round_trip = link.round_trip();
    capabilities.cq_depth = link.cq_depth.map_or(u64::MAX, u64::from);
    if let Some(rate) = link.bits_per_s {
        // A quarter of what two round trips carry.
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
        Ok(Arc::new(Registration {
            key: self.keys.fetch_add(1, Ordering::Relaxed),
            len: memory.len() as u64,
            _memory: memory,
        }))
    }

    fn import(&self, _: PeerSlot, key: &KeyMaterial, _: Duration) -> Result<Arc<dyn RemoteMemory>> {
        Ok(Arc::new(Import { key: *key }))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        if self.shared.open.swap(true, Ordering::AcqRel) {
            let context = "the domain's endpoint is open already: drop it first";
            return Err(Error::new(ErrorKind::Busy, "open an endpoint", context));
        }
        let most = self.capabilities.send_depth;
        let depth = config.send_depth.unwrap_or(most).clamp(1, most) as usize;
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (shared, clock) = (Arc::clone(&self.shared), Arc::clone(&self.clock));
        let port = self.port.as_ref().map(|(_, port)| Arc::clone(port));
        Ok(Box::new(NullEndpoint::new(shared, clock, depth, self.imms_per_poll, model, port)))
    }
}

impl Connector for NullDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        let mut slot = PeerSlot(0);
        self.change(|peers| {
            slot = PeerSlot(peers.next);
            peers.next += 1;
        });
        let place = self.port.as_ref().map(|_| [&self.id.to_le_bytes()[..], &slot.0.to_le_bytes()].concat());
        Ok((slot, [OFFER, &place.unwrap_or_default()].concat()))
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let Some(reached) = offer.strip_prefix(OFFER).and_then(|place| self.reached(place)) else {
            let context = "the offer is not that of such a null device: open the same devices on both \
                           sides, behind one switch or none";
            return Err(Error::new(ErrorKind::Protocol, "connect", context));
        };
        self.change(|peers| {
            peers.first.get_or_insert(slot);
            peers.ports.extend(reached.map(|reached| (slot, reached)));
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

/// A registration of memory that nothing will touch.
struct Registration {
    key: u64,
    len: u64,
    _memory: Arc<dyn Memory>,
}

impl MemoryRegion for Registration {
    fn lkey(&self) -> u64 {
        self.key
    }

    fn key(&self) -> KeyMaterial {
        KeyMaterial { base: 0, key: self.key, len: self.len }
    }

    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct Import {
    key: KeyMaterial,
}

impl RemoteMemory for Import {
    fn rkey(&self) -> u64 {
        self.key.key
    }

    fn base(&self) -> u64 {
        self.key.base
    }
}
