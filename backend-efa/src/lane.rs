//! A lane: an endpoint of libfabric, and what is posted to it. Two while the endpoint moves from
//! one to the next, else one.

use std::sync::MutexGuard;

use libfabric_sys as sys;

use crate::addresses::Owners;
use crate::context::Contexts;
use crate::queues::Queues;

/// Closed in order: libfabric's endpoint first, after which no context is in use.
pub(crate) struct Lane {
    /// Later ones have higher numbers.
    pub(crate) number: u32,
    pub(crate) queues: Queues,
    pub(crate) posted: Contexts,
    /// Peers' writes and reads counted so far.
    visits: u64,
}

/// A lane while nobody else uses it.
pub(crate) struct Turn<'a> {
    pub(crate) queues: &'a Queues,
    pub(crate) posted: &'a mut Contexts,
    owners: Option<MutexGuard<'a, Owners>>,
}

impl Turn<'_> {
    /// The slot of an address, where seats do not travel beside the bytes.
    pub(crate) fn owner(&self, address: sys::fi_addr_t) -> Option<u32> {
        self.owners.as_ref()?.of(address)
    }
}

impl Lane {
    /// Of an open endpoint, with so many contexts.
    pub(crate) fn new(number: u32, queues: Queues, contexts: u32) -> Self {
        Self { number, queues, posted: Contexts::new(contexts), visits: 0 }
    }

    /// Waits until the control side is not at it.
    pub(crate) fn turn(&mut self) -> Turn<'_> {
        let Self { queues, posted, .. } = self;
        Turn { owners: queues.addresses.turn(), queues, posted }
    }

    /// Whether peers wrote or read since the last look, where nothing else tells.
    pub(crate) fn made_progress(&mut self) -> bool {
        let visits = self.queues.visits();
        std::mem::replace(&mut self.visits, visits) != visits
    }
}
