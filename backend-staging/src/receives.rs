//! Receives into staged memory. A message arrives in a *bounce buffer*: host memory that is registered with the inner
//! device. From there it is copied into the staged memory.

use std::collections::HashMap;
use std::sync::Arc;

use multirail_spi::{
    Access, Domain, ErrorKind, Event, HostBuffer, Memory, MemoryRegion, ReceiveRequest, Result,
};

use crate::copies::{Copies, CopyTag};
use crate::region::StagedRegion;
use crate::wr_id::staging_status;

/// The staged receives of an endpoint.
#[derive(Default)]
pub(crate) struct StagedReceives {
    /// The outstanding receives, by the engine's ID.
    outstanding: HashMap<u64, StagedReceive>,
    /// Bounce buffers for reuse.
    unused: Vec<BounceBuffer>,
}

struct StagedReceive {
    buffer: BounceBuffer,
    /// The user's region, and the address in it.
    region: Arc<StagedRegion>,
    local: *mut u8,
    /// The event that reports the message to the engine, once it has arrived.
    received: Option<Event>,
}

// SAFETY: `local` is the address of an outstanding receive, as in `ReceiveRequest`.
unsafe impl Send for StagedReceive {}

/// Registered host memory for one message.
struct BounceBuffer {
    /// Dropped before the memory.
    region: Arc<dyn MemoryRegion>,
    memory: Arc<HostBuffer>,
}

impl BounceBuffer {
    fn new(domain: &dyn Domain, len: usize) -> Result<Self> {
        let memory = Arc::new(HostBuffer::new(len)?);
        // SAFETY: there are no references into the memory: the device writes it, and copies read it.
        let region = unsafe { domain.register(Arc::clone(&memory) as _, Access::LOCAL) }?;
        Ok(Self { region, memory })
    }
}

impl StagedReceives {
    /// Adds a receive into `region`, and returns the receive that the caller posts to the inner endpoint instead.
    pub(crate) fn add(
        &mut self,
        domain: &dyn Domain,
        receive: &ReceiveRequest,
        region: Arc<StagedRegion>,
    ) -> Result<ReceiveRequest> {
        let len = receive.len.max(1) as usize;
        let buffer = match self.unused.iter().position(|unused| unused.memory.len() >= len) {
            Some(index) => self.unused.swap_remove(index),
            None => BounceBuffer::new(domain, len)?,
        };
        let posted = ReceiveRequest { local: buffer.memory.as_ptr(), lkey: buffer.region.lkey(), ..*receive };
        let staged = StagedReceive { buffer, region, local: receive.local, received: None };
        self.outstanding.insert(receive.id, staged);
        Ok(posted)
    }

    /// Removes a receive, and keeps its bounce buffer for reuse. Does nothing if the receive is not staged.
    pub(crate) fn remove(&mut self, id: u64) {
        self.unused.extend(self.outstanding.remove(&id).map(|receive| receive.buffer));
    }

    /// Takes an event of the inner endpoint, and returns the event to report now. Returns `None` if a message has to be
    /// copied first.
    pub(crate) fn on_event(&mut self, event: Event, copies: &mut Copies) -> Option<Event> {
        let (Event::Received { id, .. } | Event::ReceiveFailed { id, .. }) = event else {
            return Some(event);
        };
        let Some(receive) = self.outstanding.get_mut(&id) else { return Some(event) };
        match event {
            Event::Received { len, .. } if len > 0 => {
                receive.received = Some(event);
                self.copy(id, len, copies);
                None
            }
            _ => {
                self.remove(id);
                Some(event)
            }
        }
    }

    fn copy(&mut self, id: u64, len: u64, copies: &mut Copies) {
        let Some(receive) = self.outstanding.get(&id) else { return };
        let ends = (receive.local, receive.buffer.memory.as_ptr().cast_const(), len);
        // SAFETY: the receive is outstanding, so its buffer is valid by the contract of `post_recv`. The device has
        // written `len` bytes, which are within both buffers.
        while !unsafe { copies.begin(receive.region.location, None, ends, CopyTag::Receive { id }) } {
            copies.make_room();
            copies.launch();
        }
    }

    /// Ends the receive whose message was copied, and returns the event to report.
    pub(crate) fn on_copied(&mut self, id: u64, result: Result<(), ErrorKind>) -> Option<Event> {
        let received = self.outstanding.get(&id)?.received;
        self.remove(id);
        match result {
            Ok(()) => received,
            Err(kind) => Some(Event::ReceiveFailed { id, status: staging_status(kind) }),
        }
    }
}
