//! The state of a peer that the engines do not know: who it is, its session, and what it has told.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{Barriers, Peer, PeerInner};
use crate::control::{Identity, SessionHandle};
use crate::engine::flow_control::WireGrant;
use crate::engine::index::{GroupIndex, TransportIndex};
use crate::engine::memory::RemoteInner;
use crate::engine::peer::{FenceRequest, PeerEvents, PeerIdentity, PeerProbe};
use crate::engine::waker_set::WakerSet;
use crate::fabric::FabricInner;
use crate::notifications::SendSequence;
use crate::{Clock, Error, PathPolicy};
use multirail_spi::PeerSlot;

/// The state of a peer that the engines do not know.
pub(crate) struct PeerContext {
    /// The peer whose context this is.
    this: Weak<PeerInner>,
    pub fabric_id: u64,
    pub fabric: Weak<FabricInner>,
    /// The fabric's clock, and the deadline of operations that state none.
    pub clock: Arc<dyn Clock>,
    pub default_deadline: Duration,
    /// The fabric's policy, and the peer's: what both allow.
    fabric_policy: PathPolicy,
    path_policy: Mutex<PathPolicy>,
    /// `fabric_id` while any path is allowed, else 0. No fabric has the id 0. So one comparison checks the region's fabric
    /// and finds out whether a policy applies.
    unrestricted_fabric_id: AtomicU64,
    tenant: Arc<str>,
    pub identity: Identity,
    pub barriers: Barriers,
    pub session: SessionHandle,
    close_wakers: Mutex<WakerSet<()>>,
    imports: Mutex<Imports>,
    /// In a pair within this process: the other side's handle of this connection.
    pub in_process_peer: OnceLock<Weak<PeerInner>>,
    /// The address that the control connection leads to.
    pub address: OnceLock<String>,
    /// Whether the program has ended the connection.
    pub is_disconnected_here: AtomicBool,
    /// When the last frame came over the control connection.
    heard: Mutex<Option<Instant>>,
    send_sequence: Mutex<SendSequence>,
}

/// The imports from a peer, by the owner's region number.
#[derive(Default)]
struct Imports {
    known: HashMap<u64, Vec<Weak<RemoteInner>>>,
    /// Regions that were revoked while they were not imported, newest last: their descriptors may arrive later.
    revoked: VecDeque<u64>,
}

/// The revocations to remember per peer. After so many more, the backend refuses a late descriptor instead.
const MAX_REVOCATIONS: usize = 4096;

impl PeerContext {
    /// The context of the peer `this`.
    pub fn new(
        this: &Weak<PeerInner>,
        fabric: &Arc<FabricInner>,
        identity: Identity,
        session: SessionHandle,
    ) -> Self {
        Self {
            this: Weak::clone(this),
            fabric_id: fabric.id(),
            fabric: Arc::downgrade(fabric),
            clock: Arc::clone(fabric.clock()),
            default_deadline: fabric.default_deadline(),
            fabric_policy: fabric.path_policy(),
            path_policy: Mutex::new(fabric.path_policy()),
            unrestricted_fabric_id: AtomicU64::new(unrestricted(fabric.id(), fabric.path_policy())),
            tenant: Arc::clone(fabric.tenant_name()),
            identity,
            barriers: Barriers::default(),
            session,
            close_wakers: Mutex::default(),
            imports: Mutex::default(),
            in_process_peer: OnceLock::new(),
            address: OnceLock::new(),
            is_disconnected_here: AtomicBool::new(false),
            heard: Mutex::default(),
            send_sequence: Mutex::default(),
        }
    }

    /// The order of this side's notifications to the peer.
    pub fn send_sequence(&self) -> MutexGuard<'_, SendSequence> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.send_sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The paths that the fabric and the peer allow.
    pub fn path_policy(&self) -> PathPolicy {
        *self.locked_path_policy()
    }

    fn locked_path_policy(&self) -> MutexGuard<'_, PathPolicy> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.path_policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fabric's id if any path is allowed, else 0.
    #[inline]
    pub fn unrestricted_fabric_id(&self) -> u64 {
        self.unrestricted_fabric_id.load(Ordering::Relaxed)
    }

    /// Sets the peer's own policy.
    pub fn set_path_policy(&self, policy: PathPolicy) {
        let mut locked = self.locked_path_policy();
        let policy = self.fabric_policy.and(policy);
        *locked = policy;
        // Under the lock, so that both always say the same.
        self.unrestricted_fabric_id.store(unrestricted(self.fabric_id, policy), Ordering::Relaxed);
    }

    /// The name of this side's tenant that the peer belongs to. Empty if it belongs to the fabric itself.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The other side's handle of this connection, if both sides are in this process.
    pub fn in_process_peer(&self) -> Option<Peer> {
        self.in_process_peer.get().and_then(Weak::upgrade).map(Peer)
    }

    /// Notes that a frame came over the control connection.
    pub fn note_heard(&self, now: Instant) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// The time since the last frame on the control connection.
    pub fn silence(&self) -> Option<Duration> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).map(|heard| heard.elapsed())
    }

    /// The wakers of the futures that wait for the peer's end.
    pub(super) fn close_wakers(&self) -> MutexGuard<'_, WakerSet<()>> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.close_wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- imports ----

    /// Remembers an import, to mark it when its owner revokes the region.
    pub(super) fn remember_import(&self, remote: &Arc<RemoteInner>) {
        let mut imports = self.imports();
        if imports.revoked.contains(&remote.region) {
            remote.revoked.store(true, Ordering::Release);
            return;
        }
        if imports.known.len().is_power_of_two() {
            imports.known.retain(|_, list| list.iter().any(|known| known.strong_count() > 0));
        }
        let list = imports.known.entry(remote.region).or_default();
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(remote));
    }

    /// Marks all imports of a region as revoked, also later ones.
    pub(super) fn revoke_import(&self, region: u64) {
        let mut imports = self.imports();
        if imports.revoked.len() == MAX_REVOCATIONS {
            imports.revoked.pop_front();
        }
        imports.revoked.push_back(region);
        for remote in imports.known.remove(&region).iter().flatten().filter_map(Weak::upgrade) {
            remote.revoked.store(true, Ordering::Release);
        }
    }

    /// The regions that are imported now.
    pub fn imported(&self) -> Vec<Arc<RemoteInner>> {
        self.imports().known.values().flatten().filter_map(Weak::upgrade).collect()
    }

    fn imports(&self) -> MutexGuard<'_, Imports> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine holds the peer while it calls these, so `this` can be upgraded.
impl PeerEvents for PeerContext {
    fn identity(&self) -> PeerIdentity<'_> {
        PeerIdentity {
            host: &self.identity.host,
            tenant: &self.tenant,
            incarnation: self.identity.incarnation,
            address: self.address.get().map(String::as_str),
        }
    }

    fn failed(&self, error: Error) {
        if let Some(peer) = self.this.upgrade() {
            Peer(peer).fail(error);
        }
    }

    fn grant_renewed(&self, transport: TransportIndex, grant: WireGrant) {
        if let Some(peer) = self.this.upgrade() {
            Peer(peer).announce_grant(transport, grant);
        }
    }

    fn endpoint_changed(&self, group: GroupIndex, rail: usize) {
        if let Some(peer) = self.this.upgrade() {
            Peer(peer).announce_relocation(group, rail);
        }
    }

    fn probe_wanted(&self, probe: PeerProbe) {
        self.session.probe(Box::new(probe));
    }

    fn messages_posted(&self, group: GroupIndex, rail: usize, slot: PeerSlot, count: u64) {
        if let Some(peer) = self.this.upgrade() {
            Peer(peer).announce_messages(group, rail, slot, count);
        }
    }

    fn fence_wanted(&self, group: GroupIndex, request: FenceRequest) {
        // Dropping the request tells the engine that the peer is gone.
        if let Some(peer) = self.this.upgrade() {
            Peer(peer).request_fence(group, request);
        }
    }
}

/// The fabric's id if the policy allows any path, else 0.
fn unrestricted(fabric_id: u64, policy: PathPolicy) -> u64 {
    if policy == PathPolicy::ANY { fabric_id } else { 0 }
}

#[cfg(test)]
impl PeerContext {
    /// The context of a connected peer of no fabric.
    pub fn alone(this: &Weak<PeerInner>) -> Self {
        Self {
            this: Weak::clone(this),
            fabric_id: 0,
            fabric: Weak::new(),
            clock: Arc::new(crate::SystemClock::default()),
            default_deadline: Duration::ZERO,
            fabric_policy: PathPolicy::ANY,
            path_policy: Mutex::new(PathPolicy::ANY),
            unrestricted_fabric_id: AtomicU64::new(0),
            tenant: "".into(),
            identity: Identity { incarnation: 1, host: String::new() },
            barriers: Barriers::default(),
            session: SessionHandle::detached(),
            close_wakers: Mutex::default(),
            imports: Mutex::default(),
            in_process_peer: OnceLock::new(),
            address: OnceLock::new(),
            is_disconnected_here: AtomicBool::new(false),
            heard: Mutex::default(),
            send_sequence: Mutex::default(),
        }
    }
}
