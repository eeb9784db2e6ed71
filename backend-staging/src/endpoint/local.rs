//! A connection, as the endpoint sees it, and what its two ends work with.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{Event, PeerSlot, WorkRequest};

use crate::copies::Copies;
use crate::far::Far;
use crate::link::Link;
use crate::outlet::Outlet;
use crate::region::Regions;
use crate::service::Service;

/// A connection, as the endpoint sees it.
pub(super) struct Local {
    pub(super) link: Arc<Link>,
    pub(super) outlet: Outlet,
    pub(super) service: Service,
    pub(super) outbox: VecDeque<WorkRequest>,
}

/// What a copy was for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Copied {
    /// A slot of this side's requests.
    Ours { peer: PeerSlot, slot: usize },
    /// One of the peer's.
    Theirs { peer: PeerSlot, slot: usize },
    /// A receive.
    Received { id: u64 },
}

/// What the two ends of a connection work with.
pub(crate) struct Around<'a> {
    pub copies: &'a mut Copies<Copied>,
    pub regions: &'a Regions,
    pub far: &'a Far,
    /// Requests to be posted to that peer.
    pub outbox: &'a mut VecDeque<WorkRequest>,
    /// What is to be told.
    pub events: &'a mut VecDeque<Event>,
    pub has_moved: &'a mut bool,
    /// An imm has been told of whose bytes the card wrote.
    pub has_told: &'a mut bool,
}

/// [`Around`], without a peer.
pub(super) struct Surroundings<'a> {
    pub(super) copies: &'a mut Copies<Copied>,
    pub(super) regions: &'a Regions,
    pub(super) far: &'a Far,
    pub(super) events: &'a mut VecDeque<Event>,
    pub(super) has_moved: &'a mut bool,
    pub(super) has_told: &'a mut bool,
}

impl Surroundings<'_> {
    pub(super) fn with<'a>(&'a mut self, outbox: &'a mut VecDeque<WorkRequest>) -> Around<'a> {
        Around {
            copies: self.copies,
            regions: self.regions,
            far: self.far,
            outbox,
            events: self.events,
            has_moved: self.has_moved,
            has_told: self.has_told,
        }
    }
}
