//! An endpoint of libfabric with its posted requests. The backend's endpoint has one, or two while it replaces one by
//! the next.

use std::sync::MutexGuard;

use libfabric_sys as sys;

use crate::addresses::Owners;
use crate::context::Contexts;
use crate::queues::Queues;

/// The fields are dropped in order: libfabric's endpoint first, after which no context is in use.
pub(crate) struct FabricEndpoint {
    /// Counts the endpoints of a domain.
    pub(crate) number: u32,
    pub(crate) queues: Queues,
    pub(crate) posted: Contexts,
    /// The peers' writes and reads that were counted so far.
    visits: u64,
}

/// An endpoint whose address vector is locked against the control side.
pub(crate) struct EndpointGuard<'a> {
    pub(crate) queues: &'a Queues,
    pub(crate) posted: &'a mut Contexts,
    owners: Option<MutexGuard<'a, Owners>>,
}

impl EndpointGuard<'_> {
    /// The slot of an address, where no peer tag travels beside the bytes.
    pub(crate) fn owner(&self, address: sys::fi_addr_t) -> Option<u32> {
        self.owners.as_ref()?.of(address)
    }
}

impl FabricEndpoint {
    /// Wraps open queues, with room for `contexts` posted requests.
    pub(crate) fn new(number: u32, queues: Queues, contexts: u32) -> Self {
        Self { number, queues, posted: Contexts::new(contexts), visits: 0 }
    }

    /// Locks the address vector.
    pub(crate) fn guard(&mut self) -> EndpointGuard<'_> {
        let Self { queues, posted, .. } = self;
        EndpointGuard { owners: queues.addresses.guard(), queues, posted }
    }

    /// Whether peers wrote or read since the last call, where the provider reports that by a counter alone.
    pub(crate) fn made_progress(&mut self) -> bool {
        let visits = self.queues.visits();
        std::mem::replace(&mut self.visits, visits) != visits
    }
}
