//! The links of a peer, by transport.

use std::ops::Range;

use super::{Peer, PeerInner};
use crate::engine::Control;
use crate::engine::peer::Link;
use crate::index::{GroupIndex, IndexVec, Number, TransportIndex};

impl Peer {
    /// Which transport reaches the peer over which rails, why others do not, and what
    /// carries bytes to the regions imported from it.
    pub fn explain(&self) -> String {
        let mut text = format!("{} ({}):", self.id(), self.0.identity.host);
        let mut taken = false;
        for links in self.0.routes() {
            let link = &links[0];
            let rails = links.iter().flat_map(|link| &link.rails).flatten().count();
            let groups = match links.len() {
                1 => String::new(),
                groups => format!(" in {groups} groups"),
            };
            let verdict = match &link.refused {
                Some(reason) => format!("not used: {reason}"),
                None if taken => format!("{rails} rails{groups}, stands by"),
                None => format!("{rails} rails{groups}, taken"),
            };
            taken |= link.is_up();
            text.push_str(&format!("\n  {}: {verdict}", link.label));
        }
        let mut paths: Vec<_> = self.0.imported().iter().map(|remote| remote.path()).collect();
        paths.sort_unstable();
        for same in paths.chunk_by(|a, b| a == b) {
            text.push_str(&format!("\n  regions by {}: {}", same[0], same.len()));
        }
        text
    }
}

/// Which links belong to the same transport.
pub(super) fn routes(links: &[Link]) -> IndexVec<TransportIndex, Range<GroupIndex>> {
    let mut start = GroupIndex::FIRST;
    let routes = links.chunk_by(|a, b| a.engine.transport == b.engine.transport).map(|links| {
        let route = start..start.plus(links.len());
        start = route.end;
        route
    });
    routes.collect()
}

/// The rail group that the first operation to a new peer goes over, where any will do: one of those of
/// the first transport that reaches the peer. Peers begin with different ones.
pub(super) fn first_home(links: &[Link], routes: &IndexVec<TransportIndex, Range<GroupIndex>>) -> GroupIndex {
    let Some(first) = links.iter().find(|link| link.is_up()) else { return GroupIndex::FIRST };
    let route = &routes[first.engine.transport];
    let groups = route.end.place() - route.start.place();
    route.start.plus(first.index as usize % groups)
}

impl PeerInner {
    /// The links of a transport, one per rail group.
    pub fn route(&self, transport: TransportIndex) -> &[Link] {
        &self.links[self.routes[transport].clone()]
    }

    /// The links of every transport.
    pub fn routes(&self) -> impl Iterator<Item = &[Link]> {
        self.routes.iter().map(|route| &self.links[route.clone()])
    }

    /// Something was given back that operations over the other rail groups of a transport
    /// may wait for; the operation that gave it back went over `group`.
    pub fn tell_others(&self, group: GroupIndex) {
        for link in self.route(self.links[group].engine.transport) {
            if link.engine.group != group {
                link.engine.control(Control::GrantReceived { link: link.index });
            }
        }
    }

    /// The first link of every transport.
    pub fn leads(&self) -> impl Iterator<Item = &Link> {
        self.routes.iter().map(|route| &self.links[route.start])
    }

    /// A transport's first link: what holds for it holds for the others.
    #[inline]
    pub fn lead(&self, transport: TransportIndex) -> &Link {
        &self.links[self.routes[transport].start]
    }
}
