//! A connected peer: its identity, its links, its end.

mod barriers;
mod drain;
mod end;
mod grant;
mod moving;
mod route;
mod session;
mod warm;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::control::{Identity, SessionHandle};
use crate::engine::peer::Link;
use crate::engine::waker_set::WakerSet;
use crate::fabric::FabricInner;
use crate::imm::{ImmCounter, ImmCounts};
use crate::index::{AtomicGroup, GroupIndex, IndexVec, TransportIndex};
use crate::observe::PeerName;
use crate::remote::RemoteInner;
use crate::{Clock, Error, ErrorKind, Result};

pub(crate) use barriers::{Barriers, MAX_AHEAD, Refusal};
pub use drain::Drain;
pub use end::PeerClosed;
pub(crate) use moving::Renewals;

/// A connected peer's number, unique among all fabrics of this process; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub(crate) NonZeroU64);

impl PeerId {
    pub(crate) fn next() -> Self {
        static PEERS: AtomicU64 = AtomicU64::new(1);
        Self(NonZeroU64::new(PEERS.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

impl std::fmt::Display for PeerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peer {}", self.0)
    }
}

/// A connected peer. Clones share the connection; dropping them does not end it.
#[derive(Clone)]
pub struct Peer(pub(crate) Arc<PeerInner>);

pub(crate) struct PeerInner {
    pub id: PeerId,
    pub fabric_id: u64,
    pub fabric: Weak<FabricInner>,
    /// The fabric's clock, and how long an operation may take that says nothing of it.
    pub clock: Arc<dyn Clock>,
    pub default_deadline: Duration,
    tenant: Arc<str>,
    pub identity: Identity,
    /// One per rail group of every local transport, in order of preference.
    pub links: IndexVec<GroupIndex, Link>,
    /// The links of each transport.
    routes: IndexVec<TransportIndex, Range<GroupIndex>>,
    /// Rail group that the next operation goes over, where any will do: the one the last
    /// went over, while it keeps up.
    pub home: AtomicGroup,
    pub imms: ImmCounts,
    pub barriers: Barriers,
    pub session: SessionHandle,
    alive: AtomicBool,
    end: OnceLock<Error>,
    wakers: Mutex<WakerSet<()>>,
    imports: Mutex<Imports>,
    /// In a pair connected within this process: how the other side sees us.
    pub twin: OnceLock<Weak<PeerInner>>,
    /// Where its control connection leads to.
    pub address: OnceLock<String>,
    /// When that was last heard.
    heard: Mutex<Option<Instant>>,
}

/// What we imported of a peer, by the owner's region number.
#[derive(Default)]
struct Imports {
    known: HashMap<u64, Vec<Weak<RemoteInner>>>,
    /// Revoked while it was not imported, newest last: a descriptor may be late.
    revoked: VecDeque<u64>,
}

/// Revocations remembered per peer; a descriptor that comes after so many more is
/// refused by the backend instead.
const REVOCATIONS: usize = 4096;

impl Peer {
    pub(crate) fn new(
        id: PeerId,
        fabric: &Arc<FabricInner>,
        identity: Identity,
        links: Vec<Link>,
        session: SessionHandle,
    ) -> Self {
        let routes = route::routes(&links);
        let home = route::first_home(&links, &routes);
        Self(Arc::new(PeerInner {
            id,
            fabric_id: fabric.id(),
            fabric: Arc::downgrade(fabric),
            clock: Arc::clone(fabric.clock()),
            default_deadline: fabric.default_deadline(),
            tenant: Arc::clone(fabric.tenant_name()),
            identity,
            routes,
            home: AtomicGroup::new(home),
            links: links.into(),
            imms: ImmCounts::default(),
            barriers: Barriers::default(),
            session,
            alive: AtomicBool::new(true),
            end: OnceLock::new(),
            wakers: Mutex::default(),
            imports: Mutex::default(),
            twin: OnceLock::new(),
            address: OnceLock::new(),
            heard: Mutex::default(),
        }))
    }

    /// Its number.
    pub fn id(&self) -> PeerId {
        self.0.id
    }

    /// The number of this opening of the peer's fabric: a restarted peer has another.
    pub fn incarnation(&self) -> u64 {
        self.0.identity.incarnation
    }

    /// The tenant of ours that it is a peer of; empty for the fabric itself.
    pub fn tenant(&self) -> &str {
        &self.0.tenant
    }

    /// Whether it is connected, as far as is known.
    pub fn is_alive(&self) -> bool {
        self.0.alive.load(Ordering::Acquire)
    }

    /// The count of one imm value from this peer.
    pub fn imm(&self, imm: u32) -> ImmCounter {
        ImmCounter { peer: Arc::clone(&self.0), imm }
    }

    /// Tells the other side that a region of ours is revoked.
    pub(crate) fn tell_revoked(&self, region: u64) {
        self.0.session.revoked(region);
        if let Some(twin) = self.twin() {
            twin.note_revoked(twin.incarnation(), region);
        }
    }

    /// Tells the other side that we have reached a barrier.
    pub(crate) fn tell_arrival(&self, barrier: &str) {
        self.0.session.reached(barrier);
        if let Some(twin) = self.twin() {
            // Nobody there to break the protocol: it is this very code.
            let _ = twin.0.barriers.arrived(barrier);
        }
    }

    /// The other side of a connection within this process.
    pub(crate) fn twin(&self) -> Option<Self> {
        self.0.twin.get().and_then(Weak::upgrade).map(Self)
    }

    /// The owner took a region back: later operations on it are refused at once.
    pub(crate) fn note_revoked(&self, incarnation: u64, region: u64) {
        if incarnation != self.incarnation() {
            return;
        }
        let mut imports = self.0.imports();
        if imports.revoked.len() == REVOCATIONS {
            imports.revoked.pop_front();
        }
        imports.revoked.push_back(region);
        for remote in imports.known.remove(&region).iter().flatten().filter_map(Weak::upgrade) {
            remote.revoked.store(true, Ordering::Release);
        }
    }
}

impl PeerInner {
    /// The tenant of ours that it is a peer of.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Why the peer is gone, once it is.
    pub fn death(&self) -> Option<Error> {
        self.end.get().cloned()
    }

    /// Who it is, for dumps.
    pub fn name(&self) -> PeerName {
        PeerName {
            id: self.id.0.get(),
            host: self.identity.host.clone(),
            incarnation: self.identity.incarnation,
            address: self.address.get().cloned(),
        }
    }

    /// Something came over its control connection.
    pub fn is_heard(&self, now: Instant) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// For how long nothing has come over its control connection.
    pub fn silence(&self) -> Option<Duration> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).map(|heard| heard.elapsed())
    }

    /// An error unless the peer is connected.
    #[inline]
    pub fn check_alive(&self) -> Result<()> {
        if self.alive.load(Ordering::Acquire) { Ok(()) } else { Err(self.gone()) }
    }

    #[cold]
    fn gone(&self) -> Error {
        self.death().unwrap_or_else(|| Error::new(ErrorKind::PeerDied, "peer", "the peer is gone"))
    }

    /// Remembers an import, to be marked when its owner revokes it.
    pub fn remember(&self, remote: &Arc<RemoteInner>) {
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

    /// The regions that are imported now.
    fn imported(&self) -> Vec<Arc<RemoteInner>> {
        self.imports().known.values().flatten().filter_map(Weak::upgrade).collect()
    }

    fn wakers(&self) -> MutexGuard<'_, WakerSet<()>> {
        // As with the imports.
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn imports(&self) -> MutexGuard<'_, Imports> {
        // No holder panics half way through a change: poison carries no news.
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl Peer {
    /// A connected peer of no fabric and without links.
    pub(crate) fn alone() -> Self {
        Self(Arc::new(PeerInner {
            id: PeerId::next(),
            fabric_id: 0,
            fabric: Weak::new(),
            clock: Arc::new(crate::SystemClock::default()),
            default_deadline: Duration::ZERO,
            tenant: "".into(),
            identity: Identity { incarnation: 1, host: String::new() },
            links: Vec::new().into(),
            routes: Vec::new().into(),
            home: AtomicGroup::new(GroupIndex::FIRST),
            imms: ImmCounts::default(),
            barriers: Barriers::default(),
            session: SessionHandle::detached(),
            alive: AtomicBool::new(true),
            end: OnceLock::new(),
            wakers: Mutex::default(),
            imports: Mutex::default(),
            twin: OnceLock::new(),
            address: OnceLock::new(),
            heard: Mutex::default(),
        }))
    }
}
