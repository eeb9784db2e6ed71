//! What an endpoint lends to the initiator and the target of a connection while they work.

use std::collections::VecDeque;

use multirail_spi::{Event, PeerSlot, WorkRequest};

use crate::copies::Copies;
use crate::gpu_memory::RegisteredGpuMemory;
use crate::region::StagedRegions;

/// The parts of an endpoint that an initiator or a target uses.
pub(crate) struct Context<'a> {
    pub copies: &'a mut Copies<CopyTag>,
    pub regions: &'a StagedRegions,
    pub gpu_memory: &'a RegisteredGpuMemory,
    /// Internal work requests that the endpoint posts to this connection's peer.
    pub outbox: &'a mut VecDeque<WorkRequest>,
    /// Events that the endpoint reports to the engine.
    pub events: &'a mut VecDeque<Event>,
    /// Set if anything changed, so that the worker polls again instead of sleeping.
    pub made_progress: &'a mut bool,
    /// Set if `events` reports an imm whose bytes the inner device wrote: the endpoint then flushes before the engine
    /// sees the imm.
    pub needs_flush: &'a mut bool,
}

/// What a copy is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CopyTag {
    /// A slot of this process as initiator.
    Initiator { peer: PeerSlot, slot: usize },
    /// A slot of this process as target.
    Target { peer: PeerSlot, slot: usize },
    /// The receive with this ID.
    Receive { id: u64 },
}
