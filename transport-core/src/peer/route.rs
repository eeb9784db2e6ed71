//! The links of a peer, by transport.

use std::ops::Range;

use super::PeerInner;
use crate::engine::Control;
use crate::link::Link;

/// Which links belong to the same transport.
pub(super) fn routes(links: &[Link]) -> Vec<Range<usize>> {
    let mut start = 0;
    let routes = links.chunk_by(|a, b| a.engine.transport == b.engine.transport).map(|links| {
        let route = start..start + links.len();
        start = route.end;
        route
    });
    routes.collect()
}

impl PeerInner {
    /// The links of a transport, one per rail group.
    pub fn route(&self, transport: usize) -> &[Link] {
        &self.links[self.routes[transport].clone()]
    }

    /// The links of every transport.
    pub fn routes(&self) -> impl Iterator<Item = &[Link]> {
        self.routes.iter().map(|route| &self.links[route.clone()])
    }

    /// Something was given back that operations over the other rail groups of a transport
    /// may wait for; `position` is the link of who gave it.
    pub fn tell_others(&self, position: usize) {
        for link in self.route(self.links[position].engine.transport) {
            if link.engine.position != position {
                link.engine.control(Control::Granted { link: link.index });
            }
        }
    }

    /// A transport's first link: what holds for it holds for the others.
    #[inline]
    pub fn lead(&self, transport: usize) -> &Link {
        &self.links[self.routes[transport].start]
    }
}
