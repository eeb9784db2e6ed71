//! The state of a peer that its clones, its fabric and the engines share.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{Barriers, Peer, PeerId};
use crate::control::{Identity, SessionHandle};
use crate::engine::Control;
use crate::engine::peer::Link;
use crate::engine::waker_set::WakerSet;
use crate::fabric::FabricInner;
use crate::imm::ImmCounts;
use crate::index::{AtomicGroup, GroupIndex, IndexVec, Number, TransportIndex};
use crate::observe::PeerName;
use crate::remote::RemoteInner;
use crate::{Clock, Error, ErrorKind, Result};

/// The state of a peer. Its checks of requests are in `request.rs`, its submission of operations in `submit.rs`.
pub(crate) struct PeerInner {
    pub id: PeerId,
    pub fabric_id: u64,
    pub fabric: Weak<FabricInner>,
    /// The fabric's clock, and the deadline of operations that state none.
    pub clock: Arc<dyn Clock>,
    pub default_deadline: Duration,
    tenant: Arc<str>,
    pub identity: Identity,
    /// One link per rail group of every local transport, in order of preference.
    pub links: IndexVec<GroupIndex, Link>,
    /// The range of `links` of each transport.
    groups_of: IndexVec<TransportIndex, Range<GroupIndex>>,
    /// The rail group for the next operation that any group may carry: that of the last such operation, while the
    /// group keeps up.
    pub preferred_group: AtomicGroup,
    pub imms: ImmCounts,
    pub barriers: Barriers,
    pub session: SessionHandle,
    is_alive: AtomicBool,
    close_reason: OnceLock<Error>,
    close_wakers: Mutex<WakerSet<()>>,
    imports: Mutex<Imports>,
    /// In a pair within this process: the other side's handle of this connection.
    pub in_process_peer: OnceLock<Weak<PeerInner>>,
    /// The address that the control connection leads to.
    pub address: OnceLock<String>,
    /// When the last frame came over the control connection.
    heard: Mutex<Option<Instant>>,
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

impl PeerInner {
    pub fn new(
        id: PeerId,
        fabric: &Arc<FabricInner>,
        identity: Identity,
        links: Vec<Link>,
        session: SessionHandle,
    ) -> Self {
        let groups_of = groups_of(&links);
        let preferred_group = first_preferred_group(&links, &groups_of);
        Self {
            id,
            fabric_id: fabric.id(),
            fabric: Arc::downgrade(fabric),
            clock: Arc::clone(fabric.clock()),
            default_deadline: fabric.default_deadline(),
            tenant: Arc::clone(fabric.tenant_name()),
            identity,
            groups_of,
            preferred_group: AtomicGroup::new(preferred_group),
            links: links.into(),
            imms: ImmCounts::default(),
            barriers: Barriers::default(),
            session,
            is_alive: AtomicBool::new(true),
            close_reason: OnceLock::new(),
            close_wakers: Mutex::default(),
            imports: Mutex::default(),
            in_process_peer: OnceLock::new(),
            address: OnceLock::new(),
            heard: Mutex::default(),
        }
    }

    /// The name of this side's tenant that the peer belongs to. Empty if it belongs to the fabric itself.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The peer's name in dumps.
    pub fn name(&self) -> PeerName {
        PeerName {
            id: self.id.0.get(),
            host: self.identity.host.clone(),
            incarnation: self.identity.incarnation,
            address: self.address.get().cloned(),
        }
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

    // ---- the end of the connection ----

    /// Whether the peer is connected, as far as this side knows.
    pub fn is_alive(&self) -> bool {
        self.is_alive.load(Ordering::Acquire)
    }

    /// Returns an error unless the peer is connected.
    #[inline]
    pub fn check_alive(&self) -> Result<()> {
        if self.is_alive.load(Ordering::Acquire) { Ok(()) } else { Err(self.gone()) }
    }

    #[cold]
    fn gone(&self) -> Error {
        self.close_reason().unwrap_or_else(|| Error::new(ErrorKind::PeerDied, "peer", "the peer is gone"))
    }

    /// The reason why the peer is gone, once it is.
    pub fn close_reason(&self) -> Option<Error> {
        self.close_reason.get().cloned()
    }

    /// Sets the close reason. Returns `false` if there is one already.
    pub(super) fn set_close_reason(&self, error: Error) -> bool {
        let first = self.close_reason.set(error).is_ok();
        if first {
            self.is_alive.store(false, Ordering::Release);
        }
        first
    }

    /// The wakers of the futures that wait for the peer's end.
    pub(super) fn close_wakers(&self) -> MutexGuard<'_, WakerSet<()>> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.close_wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- links ----

    /// The links of a transport, one per rail group.
    pub fn links_of(&self, transport: TransportIndex) -> &[Link] {
        &self.links[self.groups_of[transport].clone()]
    }

    /// The links of each transport.
    pub fn links_by_transport(&self) -> impl Iterator<Item = &[Link]> {
        self.groups_of.iter().map(|groups| &self.links[groups.clone()])
    }

    /// The first link of each transport.
    pub fn first_links(&self) -> impl Iterator<Item = &Link> {
        self.groups_of.iter().map(|groups| &self.links[groups.start])
    }

    /// The first link of a transport. All links of a transport agree on its label, and on whether they are up.
    #[inline]
    pub fn first_link_of(&self, transport: TransportIndex) -> &Link {
        &self.links[self.groups_of[transport].start]
    }

    /// Tells the other rail groups of the transport of `group` that credit was given back: operations there may wait
    /// for it. The operation that gave it back ran over `group`.
    pub fn notify_other_groups(&self, group: GroupIndex) {
        for link in self.links_of(self.links[group].engine.transport) {
            if link.engine.group != group {
                link.engine.control(Control::GrantReceived { link: link.index });
            }
        }
    }

    /// Tells the peer the new address of a rail, if the rail has one: rail `rail` of the link over `group`.
    pub fn announce_relocation(&self, group: GroupIndex, rail: usize) {
        let link = &self.links[group];
        for (_, pair) in link.pairs().filter(|(of, _)| *of == rail) {
            let connector = pair.domain.connector();
            let announced = connector.next_offer(pair.slot).and_then(|offer| {
                let Some(offer) = offer else { return Ok(()) };
                if let Some(other) = self.in_process_peer() {
                    let answer = other.note_relocation(&link.label, pair.pair, &offer)?;
                    return pair.renew(|connector| connector.finish_renewal(pair.slot, &answer));
                }
                self.session.moved(&link.label, pair.pair, offer);
                Ok(())
            });
            if let Err(error) = announced {
                tracing::warn!(
                    %error,
                    rail,
                    "this side could not tell a peer the new address of a rail: the peer is not reached over it"
                );
            }
        }
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

/// The range of links of each transport.
fn groups_of(links: &[Link]) -> IndexVec<TransportIndex, Range<GroupIndex>> {
    let mut start = GroupIndex::FIRST;
    let ranges = links.chunk_by(|a, b| a.engine.transport == b.engine.transport).map(|links| {
        let groups = start..start.plus(links.len());
        start = groups.end;
        groups
    });
    ranges.collect()
}

/// The rail group for the first operation to a new peer that any group may carry: one of the first transport that
/// reaches the peer. Different peers begin with different groups.
fn first_preferred_group(
    links: &[Link],
    groups_of: &IndexVec<TransportIndex, Range<GroupIndex>>,
) -> GroupIndex {
    let Some(first) = links.iter().find(|link| link.is_up()) else { return GroupIndex::FIRST };
    let groups = &groups_of[first.engine.transport];
    let count = groups.end.position() - groups.start.position();
    groups.start.plus(first.index as usize % count)
}

#[cfg(test)]
impl PeerInner {
    /// The state of a connected peer of no fabric and without links.
    pub fn alone() -> Self {
        Self {
            id: PeerId::next(),
            fabric_id: 0,
            fabric: Weak::new(),
            clock: Arc::new(crate::SystemClock::default()),
            default_deadline: Duration::ZERO,
            tenant: "".into(),
            identity: Identity { incarnation: 1, host: String::new() },
            links: Vec::new().into(),
            groups_of: Vec::new().into(),
            preferred_group: AtomicGroup::new(GroupIndex::FIRST),
            imms: ImmCounts::default(),
            barriers: Barriers::default(),
            session: SessionHandle::detached(),
            is_alive: AtomicBool::new(true),
            close_reason: OnceLock::new(),
            close_wakers: Mutex::default(),
            imports: Mutex::default(),
            in_process_peer: OnceLock::new(),
            address: OnceLock::new(),
            heard: Mutex::default(),
        }
    }
}
