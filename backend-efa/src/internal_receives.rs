//! Internal receives: those that the backend posts itself, on cards where a peer's write with an imm consumes a
//! receive.
//!
//! A card without unsolicited write receive needs a posted receive for each write with an imm of its peers
//! (`FI_RX_CQ_DATA` of fi_getinfo(3)). Whatever arrives consumes the receives in the order of posting. The user posts
//! receives for messages, and perhaps none. So the backend posts only internal receives to the card, each as long as
//! the longest message. The user's receives wait here, and the backend copies each message into the first of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use multirail_spi::{
    Access, ErrorKind, Event, HostBuffer, MemoryRegion, PeerSlot, ReceiveRequest, Result, Status,
    TakeMessage,
    copy::{self, CopyStrategy},
};

use crate::domain::DomainState;
use crate::region::RegisteredRegion;

/// The most internal receives. An imm that finds no receive waits until the worker has polled.
const MAX_RECEIVES: u32 = 256;
/// Buffers begin at multiples of a cache line.
const LINE: u64 = 64;

/// A message in an internal receive, for which the user has posted no receive yet.
struct Unclaimed {
    receive: ReceiveRequest,
    peer: PeerSlot,
    len: u64,
    imm: Option<u32>,
}

/// The internal receives of an endpoint, and the user's receives.
pub(crate) struct InternalReceives {
    /// The addresses of the buffers.
    range: Range<usize>,
    /// The internal receives that are to be posted.
    pub(crate) unposted: Vec<ReceiveRequest>,
    /// The user's receives, in the order of posting.
    user_receives: VecDeque<ReceiveRequest>,
    unclaimed: VecDeque<Unclaimed>,
    _region: Arc<RegisteredRegion>,
}

impl InternalReceives {
    /// Creates the internal receives of a domain's endpoint; `None` if imms consume no receives there.
    pub(crate) fn open(domain: &DomainState) -> Result<Option<Self>> {
        if !domain.device.imms_consume_receives {
            return Ok(None);
        }
        let each = domain.capabilities.max_message.next_multiple_of(LINE);
        let count = u64::from(domain.capabilities.recv_depth.min(MAX_RECEIVES));
        let memory = Arc::new(HostBuffer::new((count * each) as usize)?);
        // SAFETY: nobody holds references into the buffer.
        let region = Arc::new(unsafe { RegisteredRegion::new(&domain.device, memory, Access::LOCAL) }?);
        domain.registrations.add(&region);
        let ((start, _), lkey) = (region.start_and_lkey(), region.lkey());
        let receive = |index: u64| {
            let local = start.wrapping_add((index * each) as usize);
            ReceiveRequest { id: index, local, lkey, len: each }
        };
        Ok(Some(Self {
            range: start as usize..start as usize + (count * each) as usize,
            unposted: (0..count).map(receive).collect(),
            user_receives: VecDeque::new(),
            unclaimed: VecDeque::new(),
            _region: region,
        }))
    }

    /// Whether a receive is an internal one.
    pub(crate) fn contains(&self, receive: &ReceiveRequest) -> bool {
        self.range.contains(&(receive.local as usize))
    }

    /// Adds receives of the user, at most up to `depth` in all. Returns how many it added.
    ///
    /// # Safety
    /// As `Endpoint::post_recv`.
    pub(crate) unsafe fn add_user_receives(&mut self, batch: &[ReceiveRequest], depth: usize) -> usize {
        let taken = batch.len().min(depth.saturating_sub(self.user_receives.len()));
        self.user_receives.extend(&batch[..taken]);
        taken
    }

    /// Removes a receive of the user. Returns whether it was here.
    pub(crate) fn cancel(&mut self, id: u64) -> bool {
        let index = self.user_receives.iter().position(|receive| receive.id == id);
        index.is_some_and(|index| self.user_receives.remove(index).is_some())
    }

    /// Removes all receives of the user.
    pub(crate) fn take_user_receives(&mut self) -> impl Iterator<Item = ReceiveRequest> {
        std::mem::take(&mut self.user_receives).into_iter()
    }

    /// Keeps a message that has arrived in an internal receive.
    pub(crate) fn add_message(
        &mut self,
        receive: ReceiveRequest,
        peer: PeerSlot,
        len: u64,
        imm: Option<u32>,
    ) {
        self.unclaimed.push_back(Unclaimed { receive, peer, len, imm });
    }

    /// Drops the messages of a peer that has left.
    pub(crate) fn drop_messages_of(&mut self, peer: PeerSlot) {
        let Self { unposted, unclaimed, .. } = self;
        unclaimed.retain(|message| {
            let stays = message.peer != peer;
            if !stays {
                unposted.push(message.receive);
            }
            stays
        });
    }

    /// Takes the messages for which the user has posted no receive: those of one peer, or all.
    pub(crate) fn take_unclaimed(&mut self, peer: Option<PeerSlot>, take: &mut TakeMessage<'_>) {
        let is_meant = |message: &Unclaimed| peer.is_none_or(|peer| peer == message.peer);
        let (taken, others): (Vec<_>, Vec<_>) = self.unclaimed.drain(..).partition(is_meant);
        self.unclaimed = VecDeque::from_iter(others);
        for Unclaimed { receive, peer, len, imm } in taken {
            // SAFETY: this receive is an internal one that a message of that length has consumed: `add_message`. It is
            // posted again only later.
            let bytes = unsafe { std::slice::from_raw_parts(receive.local, len as usize) };
            take(peer, bytes, imm);
            self.unposted.push(receive);
        }
    }

    /// Copies messages into the user's receives, as long as there are messages and receives. Reports the messages.
    pub(crate) fn deliver(&mut self, into: &mut VecDeque<Event>) {
        while !self.user_receives.is_empty()
            && let Some(Unclaimed { receive, peer, len, imm }) = self.unclaimed.pop_front()
            && let Some(user_receive) = self.user_receives.pop_front()
        {
            let id = user_receive.id;
            into.push_back(match len <= user_receive.len {
                true => {
                    // SAFETY: by who posted it, the user's buffer is valid until its receive is reported; ours holds a
                    // message of that length, and is posted again only afterwards.
                    unsafe {
                        copy::copy(CopyStrategy::Plain, user_receive.local, receive.local, len as usize);
                    }
                    Event::Received { id, peer, len, imm }
                }
                false => {
                    let code = libfabric_sys::FI_ETRUNC as i32;
                    Event::ReceiveFailed { id, status: Status { kind: ErrorKind::TooLarge, code } }
                }
            });
            self.unposted.push(receive);
        }
    }
}
