//! Receives into staged memory: the message comes into memory of the host's, and is copied from there.

use std::collections::HashMap;
use std::sync::Arc;

use multirail_spi::{
    Access, Domain, ErrorKind, Event, HostBuffer, Memory, MemoryRegion, ReceiveRequest, Result,
};

use crate::copies::Copies;
use crate::endpoint::Copied;
use crate::region::Entry;
use crate::status::status;

#[derive(Default)]
pub(crate) struct Receives {
    posted: HashMap<u64, Posted>,
    spare: Vec<Bounce>,
}

struct Posted {
    bounce: Bounce,
    entry: Arc<Entry>,
    local: *mut u8,
    /// The message, once it is there.
    arrived: Option<Event>,
}

// SAFETY: `local` is the address of a posted receive, as in `ReceiveRequest`.
unsafe impl Send for Posted {}

/// Memory of the host's for one message. Its registration goes first.
struct Bounce {
    region: Arc<dyn MemoryRegion>,
    memory: Arc<HostBuffer>,
}

impl Bounce {
    fn new(domain: &dyn Domain, len: usize) -> Result<Self> {
        let memory = Arc::new(HostBuffer::new(len)?);
        // SAFETY: nobody holds references into it: the card writes, copies read.
        let region = unsafe { domain.register(Arc::clone(&memory) as _, Access::LOCAL) }?;
        Ok(Self { region, memory })
    }
}

impl Receives {
    /// The receive to be posted in the place of `receive`, which is into `entry`'s memory.
    pub(crate) fn take(
        &mut self,
        domain: &dyn Domain,
        receive: &ReceiveRequest,
        entry: Arc<Entry>,
    ) -> Result<ReceiveRequest> {
        let len = receive.len.max(1) as usize;
        let bounce = match self.spare.iter().position(|spare| spare.memory.len() >= len) {
            Some(place) => self.spare.swap_remove(place),
            None => Bounce::new(domain, len)?,
        };
        let posted = ReceiveRequest { local: bounce.memory.as_ptr(), lkey: bounce.region.lkey(), ..*receive };
        let taken = Posted { bounce, entry, local: receive.local, arrived: None };
        self.posted.insert(receive.id, taken);
        Ok(posted)
    }

    /// A receive was not posted after all.
    pub(crate) fn forget(&mut self, id: u64) {
        self.spare.extend(self.posted.remove(&id).map(|posted| posted.bounce));
    }

    /// Something became of a receive: gives what is to be told now.
    pub(crate) fn event(&mut self, event: Event, copies: &mut Copies<Copied>) -> Option<Event> {
        let (Event::Received { id, .. } | Event::ReceiveFailed { id, .. }) = event else {
            return Some(event);
        };
        let Some(posted) = self.posted.get_mut(&id) else { return Some(event) };
        match event {
            Event::Received { len, .. } if len > 0 => {
                posted.arrived = Some(event);
                self.copy(id, len, copies);
                None
            }
            _ => {
                self.forget(id);
                Some(event)
            }
        }
    }

    fn copy(&mut self, id: u64, len: u64, copies: &mut Copies<Copied>) {
        let Some(posted) = self.posted.get(&id) else { return };
        let ends = (posted.local, posted.bounce.memory.as_ptr().cast_const(), len);
        // SAFETY: the receive has not ended, so that its buffer is valid by the contract of `post_recv`; the card has
        // written `len` bytes, within both buffers.
        while !unsafe { copies.begin(posted.entry.place, None, ends, Copied::Received { id }) } {
            copies.launch();
        }
    }

    /// The copy of a message has ended: what is to be told.
    pub(crate) fn copied(&mut self, id: u64, outcome: Result<(), ErrorKind>) -> Option<Event> {
        let event = self.posted.get(&id)?.arrived;
        self.forget(id);
        match outcome {
            Ok(()) => event,
            Err(kind) => Some(Event::ReceiveFailed { id, status: status(kind) }),
        }
    }
}
