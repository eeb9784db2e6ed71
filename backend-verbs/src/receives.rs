//! Receives: without buffers for imms, and buffers of ours for messages.
//!
//! A receive that was given to a shared queue cannot be taken back, so that users' buffers must not
//! be there: messages land in buffers of this side and are copied to the receive whose turn it is.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    Access, HostBuffer, Memory, MemoryRegion, PeerSlot, PostResult, ReceiveRequest, Result, Status,
};
use rdma_sys as ib;

use crate::domain::PortQueues;
use crate::far::FarRegion;
use crate::region::Registered;
use crate::status::{STORE_FAILED, of_completion};

/// Bytes of a message, at most: a buffer is as large.
pub(crate) const MESSAGE: usize = 64 << 10;
/// Buffers for messages.
pub(crate) const BUFFERS: u32 = 128;
/// Receives for imms.
pub(crate) const IMMS: u32 = 4096;
/// Imms that are replaced together.
const REFILL: usize = 64;

/// In a `wr_id`: it is a receive.
pub(crate) const RECEIVE: u64 = 1 << 63;
/// It is one for imms.
pub(crate) const IMM: u64 = RECEIVE | 1 << 62;

/// A message that waits for a receive.
struct ReceivedMessage {
    buffer: u32,
    from: PeerSlot,
    len: u32,
    imm: Option<u32>,
}

/// A receive, and the region that a message is stored into where the processor cannot follow its address.
struct Wanted {
    request: ReceiveRequest,
    far: Option<FarRegion>,
}

/// A message that has found one.
pub(crate) struct Delivered {
    pub id: u64,
    pub from: PeerSlot,
    /// Bytes.
    pub len: u64,
    /// Why the message is not there, if it is not.
    pub failed: Option<Status>,
    pub imm: Option<u32>,
}

/// Dropped in order: the keys before the memory.
pub(crate) struct Receives {
    region: Registered,
    memory: Arc<HostBuffer>,
    waiting: VecDeque<ReceivedMessage>,
    wanted: VecDeque<Wanted>,
    /// Imms that have taken a receive since some were posted.
    taken: usize,
}

// SAFETY: addresses of buffers that their owners promised to keep, used by one thread.
unsafe impl Send for Receives {}

impl Receives {
    /// Fills both queues of a card.
    pub(crate) fn open(card: &PortQueues) -> Result<Self> {
        let memory = Arc::new(HostBuffer::new(MESSAGE * BUFFERS as usize)?);
        // SAFETY: nobody holds references into the buffer.
        let region = unsafe { Registered::new(&card.device, memory.clone(), Access::LOCAL, false) }?;
        let mut this =
            Self { region, memory, waiting: VecDeque::new(), wanted: VecDeque::new(), taken: IMMS as usize };
        while this.taken > 0 {
            this.refill(card, 1);
        }
        (0..BUFFERS).for_each(|buffer| this.give(card, buffer));
        Ok(this)
    }

    /// Gives a buffer to the card, that nobody wants what is in.
    pub(crate) fn give(&self, card: &PortQueues, buffer: u32) {
        let at = self.memory.as_ptr().wrapping_add(buffer as usize * MESSAGE);
        let mut sge =
            ib::ibv_sge { addr: at as u64, length: MESSAGE as u32, lkey: self.region.lkey() as u32 };
        let mut receive = ib::ibv_recv_wr {
            wr_id: RECEIVE | u64::from(buffer),
            next: std::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is open and the buffer registered; what is pointed to is copied.
        let code = unsafe { ib::ibv_post_srq_recv(card.messages.as_ptr(), &raw mut receive, &raw mut bad) };
        if code != 0 {
            tracing::error!(code, "a buffer for messages is not taken back by the card");
        }
    }

    /// An imm has taken a receive.
    #[inline]
    pub(crate) fn took_imm(&mut self, card: &PortQueues) {
        self.taken += 1;
        self.refill(card, REFILL);
    }

    /// Posts receives for imms, if `least` are missing.
    fn refill(&mut self, card: &PortQueues, least: usize) {
        if self.taken < least {
            return;
        }
        let count = self.taken.min(REFILL);
        let empty = ib::ibv_recv_wr {
            wr_id: IMM,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let mut chain = [empty; REFILL];
        for place in 1..count {
            let (before, next) = chain.split_at_mut(place);
            before[place - 1].next = &raw mut next[0];
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is open; the chain lives in this call, which copies it.
        let code = unsafe { ib::ibv_post_srq_recv(card.imms.as_ptr(), chain.as_mut_ptr(), &raw mut bad) };
        if code != 0 {
            tracing::error!(code, "receives for imms are not taken by the card");
        }
        self.taken -= count;
    }

    /// A message has come into a buffer.
    pub(crate) fn arrived(&mut self, buffer: u32, from: PeerSlot, len: u32, imm: Option<u32>) {
        self.waiting.push_back(ReceivedMessage { buffer, from, len, imm });
    }

    /// A peer is gone: what it has sent and nobody has received is dropped. Its slot will be another's.
    pub(crate) fn forget(&mut self, card: &PortQueues, peer: PeerSlot) {
        let (theirs, others): (Vec<_>, Vec<_>) =
            self.waiting.drain(..).partition(|arrival| arrival.from == peer);
        self.waiting = VecDeque::from_iter(others);
        theirs.iter().for_each(|arrival| self.give(card, arrival.buffer));
    }

    /// Takes receives over, `most` at a time.
    pub(crate) fn want(&mut self, card: &PortQueues, receives: &[ReceiveRequest], most: usize) -> PostResult {
        let count = receives.len().min(most.saturating_sub(self.wanted.len()));
        for (accepted, request) in receives[..count].iter().enumerate() {
            match card.device.far.to_receive_into(request.lkey) {
                Ok(far) => self.wanted.push_back(Wanted { request: *request, far }),
                Err(why) => return PostResult { accepted, error: Some(why) },
            }
        }
        PostResult { accepted: count, error: None }
    }

    /// Takes a receive back, if it is here.
    pub(crate) fn cancel(&mut self, id: u64) -> bool {
        let place = self.wanted.iter().position(|wanted| wanted.request.id == id);
        place.and_then(|place| self.wanted.remove(place)).is_some()
    }

    /// All receives, which will get nothing any more.
    pub(crate) fn take_wanted(&mut self) -> Vec<u64> {
        self.wanted.drain(..).map(|wanted| wanted.request.id).collect()
    }

    /// The next message and the receive that gets it.
    #[inline]
    pub(crate) fn next(&mut self, card: &PortQueues) -> Option<Delivered> {
        if self.wanted.is_empty() || self.waiting.is_empty() { None } else { self.deliver(card) }
    }

    fn deliver(&mut self, card: &PortQueues) -> Option<Delivered> {
        let arrival = self.waiting.pop_front()?;
        let wanted = self.wanted.pop_front()?;
        let failed = self.copy(&arrival, &wanted).err();
        self.give(card, arrival.buffer);
        let ReceivedMessage { from, len, imm, .. } = arrival;
        Some(Delivered { id: wanted.request.id, from, len: len.into(), failed, imm })
    }

    /// Copies a message from the buffer that it came into to where it is wanted.
    fn copy(&self, arrival: &ReceivedMessage, wanted: &Wanted) -> Result<(), Status> {
        let Wanted { request, far } = wanted;
        if u64::from(arrival.len) > request.len {
            return Err(of_completion(ib::IBV_WC_LOC_LEN_ERR));
        }
        let from = self.memory.as_ptr().wrapping_add(arrival.buffer as usize * MESSAGE);
        if let Some(region) = far {
            // SAFETY: the card has given the buffer back, and it has as many bytes, which no one changes.
            let bytes = unsafe { std::slice::from_raw_parts(from, arrival.len as usize) };
            let stored = region.store(request.local, bytes);
            return stored.map_err(|kind| Status { kind, code: STORE_FAILED });
        }
        // SAFETY: as above; the receive's range is valid, the processor may follow its address, it has
        // room, and nobody else touches it until its end is told.
        unsafe { std::ptr::copy_nonoverlapping(from, request.local, arrival.len as usize) };
        Ok(())
    }
}
