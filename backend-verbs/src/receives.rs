//! Posted receives: receives without buffers for imms, and receives with buffers of this backend for messages.
//!
//! A receive that is posted to a shared queue cannot be cancelled, so the user's buffers are not posted there. A
//! message lands in a buffer of the backend, which copies it to the user's next receive.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    Access, HostBuffer, Memory, MemoryRegion, PeerSlot, PostResult, ReceiveRequest, Result, Status,
    TakeMessage,
};
use rdma_sys as ib;

use crate::device_memory::DeviceRegion;
use crate::domain::PortQueues;
use crate::region::Registered;
use crate::status::{STORE_FAILED, of_completion};

/// The most bytes of a message, and the size of a buffer.
pub(crate) const MESSAGE: usize = 64 << 10;
/// The number of buffers for messages.
pub(crate) const BUFFERS: u32 = 128;
/// The number of receives for imms.
pub(crate) const IMMS: u32 = 4096;
/// The number of receives for imms that are posted together.
const REFILL: usize = 64;

/// The bit of a `wr_id` that marks a receive.
pub(crate) const RECEIVE: u64 = 1 << 63;
/// The bits of a `wr_id` that mark a receive for imms.
pub(crate) const IMM: u64 = RECEIVE | 1 << 62;

/// A message that waits for a receive.
struct ReceivedMessage {
    buffer: u32,
    from: PeerSlot,
    len: u32,
    imm: Option<u32>,
}

/// A receive of the user. `device_region` is the region of its memory if the processor cannot access that.
struct UserReceive {
    request: ReceiveRequest,
    device_region: Option<DeviceRegion>,
}

/// A message that was copied to a receive.
pub(crate) struct Delivered {
    pub id: u64,
    pub from: PeerSlot,
    /// The bytes of the message.
    pub len: u64,
    /// The reason why the message was not copied, if it was not.
    pub failed: Option<Status>,
    pub imm: Option<u32>,
}

/// All receives of a port. The fields are dropped in order: the keys before the memory.
pub(crate) struct Receives {
    region: Registered,
    memory: Arc<HostBuffer>,
    /// Messages that wait for a receive of the user.
    messages: VecDeque<ReceivedMessage>,
    /// Receives of the user that wait for a message.
    receives: VecDeque<UserReceive>,
    /// Receives for imms that arrivals have taken and that are not posted again.
    taken_by_imms: usize,
}

// SAFETY: the pointers are addresses of buffers that their owners promised to keep, and one thread at a time uses them.
unsafe impl Send for Receives {}

impl Receives {
    /// Posts the receives of both shared queues.
    pub(crate) fn open(card: &PortQueues) -> Result<Self> {
        let memory = Arc::new(HostBuffer::new(MESSAGE * BUFFERS as usize)?);
        // SAFETY: no code holds references into the buffer.
        let region = unsafe { Registered::new(&card.device, memory.clone(), Access::LOCAL, false) }?;
        let mut this = Self {
            region,
            memory,
            messages: VecDeque::new(),
            receives: VecDeque::new(),
            taken_by_imms: IMMS as usize,
        };
        while this.taken_by_imms > 0 {
            this.refill(card, 1);
        }
        (0..BUFFERS).for_each(|buffer| this.post_buffer(card, buffer));
        Ok(this)
    }

    /// Posts a buffer for messages. Its content is not needed any more.
    pub(crate) fn post_buffer(&self, card: &PortQueues, buffer: u32) {
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
        // SAFETY: the queue is open, the buffer is registered, and the call copies the structures.
        let code = unsafe { ib::ibv_post_srq_recv(card.messages.as_ptr(), &raw mut receive, &raw mut bad) };
        if code != 0 {
            tracing::error!(code, "the card does not take a buffer for messages");
        }
    }

    /// Counts a receive that an imm has taken, and posts new ones from time to time.
    #[inline]
    pub(crate) fn took_imm(&mut self, card: &PortQueues) {
        self.taken_by_imms += 1;
        self.refill(card, REFILL);
    }

    /// Posts receives for imms, if at least `least` are missing.
    fn refill(&mut self, card: &PortQueues, least: usize) {
        if self.taken_by_imms < least {
            return;
        }
        let count = self.taken_by_imms.min(REFILL);
        let empty = ib::ibv_recv_wr {
            wr_id: IMM,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let mut chain = [empty; REFILL];
        for index in 1..count {
            let (before, next) = chain.split_at_mut(index);
            before[index - 1].next = &raw mut next[0];
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is open; the chain outlives the call, which copies it.
        let code = unsafe { ib::ibv_post_srq_recv(card.imms.as_ptr(), chain.as_mut_ptr(), &raw mut bad) };
        if code != 0 {
            tracing::error!(code, "the card does not take receives for imms");
        }
        self.taken_by_imms -= count;
    }

    /// Keeps a message that has arrived in a buffer.
    pub(crate) fn arrived(&mut self, buffer: u32, from: PeerSlot, len: u32, imm: Option<u32>) {
        self.messages.push_back(ReceivedMessage { buffer, from, len, imm });
    }

    /// Drops the messages of a peer that has left, because another peer gets its slot.
    pub(crate) fn forget(&mut self, card: &PortQueues, peer: PeerSlot) {
        let (dropped, others): (Vec<_>, Vec<_>) =
            self.messages.drain(..).partition(|arrival| arrival.from == peer);
        self.messages = VecDeque::from_iter(others);
        dropped.iter().for_each(|arrival| self.post_buffer(card, arrival.buffer));
    }

    /// Takes the messages that wait for a receive: those of one peer, or all.
    pub(crate) fn take_unclaimed(
        &mut self,
        card: &PortQueues,
        peer: Option<PeerSlot>,
        take: &mut TakeMessage<'_>,
    ) {
        let is_meant = |arrival: &ReceivedMessage| peer.is_none_or(|peer| peer == arrival.from);
        let (taken, others): (Vec<_>, Vec<_>) = self.messages.drain(..).partition(is_meant);
        self.messages = VecDeque::from_iter(others);
        for arrival in taken {
            let start = self.memory.as_ptr().wrapping_add(arrival.buffer as usize * MESSAGE);
            // SAFETY: the card has completed the buffer, which has at least `len` bytes. It is posted again only below.
            let bytes = unsafe { std::slice::from_raw_parts(start, arrival.len as usize) };
            take(arrival.from, bytes, arrival.imm);
            self.post_buffer(card, arrival.buffer);
        }
    }

    /// Adds receives of the user, up to `most` at a time.
    pub(crate) fn add(&mut self, card: &PortQueues, receives: &[ReceiveRequest], most: usize) -> PostResult {
        let count = receives.len().min(most.saturating_sub(self.receives.len()));
        for (accepted, request) in receives[..count].iter().enumerate() {
            match card.device.device_regions.to_receive_into(request.lkey) {
                Ok(device_region) => {
                    self.receives.push_back(UserReceive { request: *request, device_region })
                }
                Err(why) => return PostResult { accepted, error: Some(why) },
            }
        }
        PostResult { accepted: count, error: None }
    }

    /// Removes a receive of the user. Returns false if it is not here.
    pub(crate) fn cancel(&mut self, id: u64) -> bool {
        let index = self.receives.iter().position(|receive| receive.request.id == id);
        index.and_then(|index| self.receives.remove(index)).is_some()
    }

    /// Removes all receives of the user and returns their ids.
    pub(crate) fn take_all(&mut self) -> Vec<u64> {
        self.receives.drain(..).map(|receive| receive.request.id).collect()
    }

    /// Copies the next message to the next receive of the user, if there are both.
    #[inline]
    pub(crate) fn next(&mut self, card: &PortQueues) -> Option<Delivered> {
        if self.receives.is_empty() || self.messages.is_empty() { None } else { self.deliver(card) }
    }

    fn deliver(&mut self, card: &PortQueues) -> Option<Delivered> {
        let arrival = self.messages.pop_front()?;
        let receive = self.receives.pop_front()?;
        let failed = self.copy(&arrival, &receive).err();
        self.post_buffer(card, arrival.buffer);
        let ReceivedMessage { from, len, imm, .. } = arrival;
        Some(Delivered { id: receive.request.id, from, len: len.into(), failed, imm })
    }

    /// Copies a message from its buffer to a receive.
    fn copy(&self, arrival: &ReceivedMessage, receive: &UserReceive) -> Result<(), Status> {
        let UserReceive { request, device_region } = receive;
        if u64::from(arrival.len) > request.len {
            return Err(of_completion(ib::IBV_WC_LOC_LEN_ERR, false));
        }
        let from = self.memory.as_ptr().wrapping_add(arrival.buffer as usize * MESSAGE);
        if let Some(region) = device_region {
            // SAFETY: the card has completed the buffer, which has at least `len` bytes. No code changes them.
            let bytes = unsafe { std::slice::from_raw_parts(from, arrival.len as usize) };
            let stored = region.store(request.local, bytes);
            return stored.map_err(|kind| Status { kind, code: STORE_FAILED });
        }
        // SAFETY: as above; the receive's range is valid and large enough, the processor can access it, and no other
        // code touches it until its end is reported.
        unsafe { std::ptr::copy_nonoverlapping(from, request.local, arrival.len as usize) };
        Ok(())
    }
}
