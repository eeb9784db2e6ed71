//! The state of a peer that the handles of a user, the fabric and the engines share.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{CountedRails, Link, PeerEvents};
use crate::flow_control::Grantee;
use crate::imm::ImmCounts;
use crate::index::{AtomicGroup, GroupIndex, IndexVec, Number, TransportIndex};
use crate::trace::PeerName;
use crate::{Control, Error, ErrorKind, PeerId, Result, Work};

/// The backlog of a group, in bytes, from which on the next operation goes to another group. Pages that move again and
/// again cost up to four times as much when they go from one core's caches to another's (benches/README.md); waiting
/// for so much backlog takes 100 µs.
const LONG_BACKLOG: u64 = 4 << 20;

/// A connected peer: its links, its imm counts, and whether it is alive.
///
/// The last field is the owner's part. An engine holds the peer as `Arc<PeerState>`, and reaches all fields but the
/// last without a virtual call.
pub struct PeerState<C: ?Sized = dyn PeerEvents> {
    pub id: PeerId,
    /// One link per rail group of every local transport, in order of preference.
    pub links: IndexVec<GroupIndex, Link>,
    /// The range of `links` of each transport.
    groups_of: IndexVec<TransportIndex, Range<GroupIndex>>,
    /// The rail group for the next operation that any group may carry: that of the last such operation, while the
    /// group keeps up.
    pub preferred_group: AtomicGroup,
    pub imms: ImmCounts,
    is_alive: AtomicBool,
    close_reason: OnceLock<Error>,
    /// The owner's side of the peer. An engine calls it, by [`PeerEvents`], when something rare happens.
    pub context: C,
}

impl<C> PeerState<C> {
    /// A peer that was connected over `links`: one per rail group of every local transport, in order of preference.
    pub fn new(id: PeerId, links: Vec<Link>, context: C) -> Self {
        let groups_of = groups_of(&links);
        let preferred_group = first_preferred_group(&links, &groups_of);
        Self {
            id,
            groups_of,
            preferred_group: AtomicGroup::new(preferred_group),
            links: links.into(),
            imms: ImmCounts::default(),
            is_alive: AtomicBool::new(true),
            close_reason: OnceLock::new(),
            context,
        }
    }
}

impl<C: ?Sized> PeerState<C> {
    // ---- the end of the connection ----

    /// Whether the peer is connected, as far as this side knows.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.is_alive.load(Ordering::Acquire)
    }

    /// Returns an error unless the peer is connected.
    #[inline]
    pub fn check_alive(&self) -> Result<()> {
        if self.is_alive() { Ok(()) } else { Err(self.gone()) }
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
    pub fn set_close_reason(&self, error: Error) -> bool {
        let first = self.close_reason.set(error).is_ok();
        if first {
            self.is_alive.store(false, Ordering::Release);
        }
        first
    }

    // ---- links ----

    /// The links of a transport, one per rail group.
    #[inline]
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

    /// The index of the link, among `links`, with the smallest backlog; among equals, that of the preferred group.
    pub fn least_backlog<'a>(&self, links: impl Iterator<Item = &'a Link>) -> usize {
        let preferred_group = self.preferred_group.load();
        let order = |link: &Link| match link.backlog.weight() / LONG_BACKLOG {
            0 => (0, link.engine.group != preferred_group),
            times => (times, false),
        };
        links.enumerate().min_by_key(|(_, link)| order(link)).map_or(0, |(index, _)| index)
    }

    /// The link that carries `work` if no rail of `group` can: of another rail group of the same transport that reaches both
    /// regions, chosen as for a new operation. Links with rails in service come first.
    #[cold]
    pub fn link_around(&self, group: GroupIndex, work: &Work) -> Option<&Link> {
        let others = || {
            self.links_of(self.links[group].engine.transport).iter().filter(|link| link.engine.group != group)
        };
        [CountedRails::InService, CountedRails::Working].into_iter().find_map(|counted| {
            let reach: Vec<_> = others().filter(|link| link.capacity(work, counted) > 0).collect();
            reach.get(self.least_backlog(reach.iter().copied())).copied()
        })
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
}

impl<C: PeerEvents + ?Sized> PeerState<C> {
    /// The peer as a grant policy knows it.
    pub fn grantee(&self) -> Grantee<'_> {
        let identity = self.context.identity();
        Grantee { id: self.id, host: identity.host, tenant: identity.tenant }
    }

    /// The peer's name in dumps.
    pub fn name(&self) -> PeerName {
        let identity = self.context.identity();
        PeerName {
            id: self.id.number(),
            host: identity.host.into(),
            incarnation: identity.incarnation,
            address: identity.address.map(Into::into),
        }
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
