//! What the clones of a fabric share, and how it ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::group::Group;
use super::placement::PlacementPolicy;
use super::transport::Transport;
use super::{lock, tenant};
use crate::control::{Bootstrap, ControlSettings, ControlThread, HandshakeLimiter, Identity, TaskTracker};
use crate::engine::{Control, EngineHandle};
use crate::index::{IndexVec, TransportIndex};
use crate::region::RegionInner;
use crate::retained::RetainedMemory;
use crate::spi::Revocation;
use crate::{Access, Clock, Error, ErrorKind, Op, Peer, PeerId, Region, Result, Time};

pub(crate) struct FabricInner {
    pub(super) id: u64,
    pub(super) tenancy: tenant::Tenancy,
    pub(super) identity: Identity,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) default_deadline: Duration,
    pub(super) transports: IndexVec<TransportIndex, Transport>,
    pub(super) placement: PlacementPolicy,
    pub(super) settings: ControlSettings,
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) control: Mutex<Option<Arc<ControlThread>>>,
    /// What `control` has under way, where its end does not await it. Stays when that is taken.
    pub(super) closing_tasks: OnceLock<Arc<TaskTracker>>,
    /// Bounds the handshakes of peers that come to a listener.
    pub(super) handshakes: HandshakeLimiter,
    pub(super) published: Mutex<HashMap<String, Region>>,
    pub(super) peers: Mutex<HashMap<PeerId, Peer>>,
    pub(super) next_region: AtomicU64,
    /// What the regions have let go, as long as a rail may touch it.
    pub(super) retained: Weak<RetainedMemory>,
    pub(super) closed: AtomicBool,
}

impl FabricInner {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    pub(crate) fn default_deadline(&self) -> Duration {
        self.default_deadline
    }

    /// Rails of all transports.
    pub(crate) fn rails(&self) -> usize {
        self.groups().map(|group| group.rails.len()).sum()
    }

    /// Label and domain ids of each transport, as descriptors name them.
    pub(crate) fn addresses(&self) -> Vec<(String, Vec<u64>)> {
        self.transports.iter().map(Transport::address).collect()
    }

    /// When an operation submitted `now` must have ended.
    pub(crate) fn deadline(&self, now: Time, span: Option<Duration>) -> Time {
        now.after(span.unwrap_or(self.default_deadline))
    }

    /// The engine that waits of the whole fabric look to.
    pub(crate) fn first_engine(&self) -> &Arc<EngineHandle> {
        self.transports[TransportIndex::FIRST].first_engine()
    }

    /// The engine that a single receive is posted on: that of the first transport that reaches a connected
    /// peer, or of the first of all while no peer is connected.
    pub(super) fn receiving_engine(&self) -> &Arc<EngineHandle> {
        let reached =
            |peer: &Peer| peer.0.first_links().find(|link| link.is_up()).map(|link| link.engine.transport);
        let first = lock(&self.peers).values().filter_map(reached).min();
        self.transports[first.unwrap_or(TransportIndex::FIRST)].first_engine()
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Starts a revocation: peers are told, and each engine that may use the region ends what it has under way there,
    /// takes the keys of its rails back, and waits until they are quiet.
    pub(crate) fn revoke(&self, region: &Arc<RegionInner>) -> Result<Op> {
        region.revoke_at_once();
        for peer in lock(&self.peers).values() {
            peer.announce_revoked(region.id);
        }
        self.check_open("revoke")?;
        let deadline = self.deadline(self.now(), None);
        let (mut parts, mut busy) = (Vec::new(), None);
        for group in self.groups() {
            let engine = &group.engine;
            if !region.is_registered_on(engine.transport, group.rails.clone()) {
                continue;
            }
            // Also where nobody can wait for it.
            let id = engine.insert("revoke").map_err(|error| busy = Some(error)).ok();
            engine.control(Control::Revoke { id, region: Arc::clone(region), deadline });
            parts.extend(id.map(|id| Op::pending(Arc::clone(engine), id)));
        }
        parts.extend(self.late_write_error(region).map(|error| Op::ready(Err(error))));
        match busy {
            Some(error) => Err(error),
            None => Ok(Op::all(parts)),
        }
    }

    /// Why bytes of connected peers may still land in a region whose keys are taken back, if they may.
    fn late_write_error(&self, region: &RegionInner) -> Option<Error> {
        if !region.access.contains(Access::REMOTE_WRITE) {
            return None;
        }
        let peers = lock(&self.peers);
        let is_connected = |transport: TransportIndex| {
            let mut links = peers.values().flat_map(|peer| &peer.0.links);
            links.any(|link| link.is_up() && link.engine.transport == transport)
        };
        let is_late = |transport: &&Transport| {
            let number = transport.first_engine().transport;
            transport.domains[0].capabilities().revocation == Revocation::Late
                && region.is_registered_on(number, 0..transport.domains.len())
                && is_connected(number)
        };
        let transport = self.transports.iter().find(is_late)?;
        let why = format!(
            "the peers' key is taken back and refused from now on, but transport {:?} does not say when it has \
             finished what it was receiving: bytes may land until the peers' writes have ended, or their connections",
            transport.label
        );
        Some(Error::new(ErrorKind::Unsupported, "revoke", why))
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: PeerId) {
        let peer = lock(&self.peers).remove(&peer);
        drop(peer);
    }

    /// The rail groups of all transports.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.transports.iter().flat_map(|transport| &transport.groups)
    }

    /// Takes a turn of every engine if this fabric is caller-driven.
    pub(crate) fn drive(&self) -> bool {
        self.groups().filter(|group| group.engine.drive()).count() > 0
    }

    /// The control thread, started with the first listen or connect.
    pub(crate) fn control_thread(&self, operation: &'static str) -> Result<Arc<ControlThread>> {
        // Let go after the lock: if it is the last handle of the parent, that closes its
        // tenants, and so this one.
        let parent = self.parent();
        let mut control = lock(&self.control);
        // Under the lock, so that `close` finds whatever is started here.
        self.check_open(operation)?;
        if let Some(thread) = &*control {
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(self.start_control_thread(parent.as_deref())?);
        *control = Some(Arc::clone(&thread));
        if let Some(tasks) = thread.tasks() {
            let _ = self.closing_tasks.set(tasks);
        }
        Ok(thread)
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, operation, "the fabric was closed"));
        }
        Ok(())
    }
}
