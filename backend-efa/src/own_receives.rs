//! Receives of the backend's own, on cards where a write with an imm takes one.
//!
//! A card without unsolicited write receive needs a posted receive for each of its peers' writes with an imm
//! (`FI_RX_CQ_DATA` of fi_getinfo(3)), and takes receives in order, whatever comes. The user posts receives for
//! messages, and perhaps none. So only the backend's own receives are posted to the card, each as long as the longest
//! message; the user's wait here, and a message is copied into the first of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use multirail_spi::{
    Access, ErrorKind, Event, HostBuffer, MemoryRegion, PeerSlot, ReceiveRequest, Result, Status,
    copy::{self, CopyStrategy},
};

use crate::domain::Shared;
use crate::region::Registered;

/// Receives that are posted: an imm that finds none waits until the worker has polled.
const MOST: u32 = 256;
/// Buffers begin at multiples of a cache line.
const LINE: u64 = 64;

/// A message in a receive of ours, which no receive of the user's was there for.
struct Unclaimed {
    receive: ReceiveRequest,
    peer: PeerSlot,
    len: u64,
    imm: Option<u32>,
}

pub(crate) struct OwnReceives {
    /// Where the buffers are.
    range: Range<usize>,
    /// Those to be posted.
    pub(crate) idle: Vec<ReceiveRequest>,
    /// The user's, in order.
    wanted: VecDeque<ReceiveRequest>,
    unclaimed: VecDeque<Unclaimed>,
    _region: Arc<Registered>,
}

impl OwnReceives {
    /// For an endpoint of a domain where imms take receives; `None` where they do not.
    pub(crate) fn open(shared: &Shared) -> Result<Option<Self>> {
        if !shared.device.imms_take_receives {
            return Ok(None);
        }
        let each = shared.capabilities.max_message.next_multiple_of(LINE);
        let count = u64::from(shared.capabilities.recv_depth.min(MOST));
        let memory = Arc::new(HostBuffer::new((count * each) as usize)?);
        // SAFETY: nobody holds references into the buffer.
        let region = Arc::new(unsafe { Registered::new(&shared.device, memory, Access::LOCAL) }?);
        shared.registrations.add(&region);
        let ((start, _), lkey) = (region.here(), region.lkey());
        let receive = |index: u64| {
            let local = start.wrapping_add((index * each) as usize);
            ReceiveRequest { id: index, local, lkey, len: each }
        };
        Ok(Some(Self {
            range: start as usize..start as usize + (count * each) as usize,
            idle: (0..count).map(receive).collect(),
            wanted: VecDeque::new(),
            unclaimed: VecDeque::new(),
            _region: region,
        }))
    }

    /// Whether a receive is one of these.
    pub(crate) fn has(&self, receive: &ReceiveRequest) -> bool {
        self.range.contains(&(receive.local as usize))
    }

    /// Takes receives of the user's, as many as `depth` allows; how many.
    ///
    /// # Safety
    /// As `Endpoint::post_recv`.
    pub(crate) unsafe fn want(&mut self, batch: &[ReceiveRequest], depth: usize) -> usize {
        let taken = batch.len().min(depth.saturating_sub(self.wanted.len()));
        self.wanted.extend(&batch[..taken]);
        taken
    }

    /// Takes a receive of the user's back; whether it was here.
    pub(crate) fn recall(&mut self, id: u64) -> bool {
        let place = self.wanted.iter().position(|receive| receive.id == id);
        place.is_some_and(|place| self.wanted.remove(place).is_some())
    }

    /// Takes all receives of the user's back.
    pub(crate) fn recall_all(&mut self) -> impl Iterator<Item = ReceiveRequest> {
        std::mem::take(&mut self.wanted).into_iter()
    }

    /// A message has come into a receive of ours.
    pub(crate) fn arrived(&mut self, receive: ReceiveRequest, peer: PeerSlot, len: u64, imm: Option<u32>) {
        self.unclaimed.push_back(Unclaimed { receive, peer, len, imm });
    }

    /// A peer has left: its messages that nobody has received are dropped.
    pub(crate) fn forget(&mut self, peer: PeerSlot) {
        let Self { idle, unclaimed, .. } = self;
        unclaimed.retain(|message| {
            let stays = message.peer != peer;
            if !stays {
                idle.push(message.receive);
            }
            stays
        });
    }

    /// Hands messages to receives of the user's, as far as there are both.
    pub(crate) fn tell(&mut self, into: &mut VecDeque<Event>) {
        while !self.wanted.is_empty()
            && let Some(Unclaimed { receive, peer, len, imm }) = self.unclaimed.pop_front()
            && let Some(wanted) = self.wanted.pop_front()
        {
            let id = wanted.id;
            into.push_back(match len <= wanted.len {
                true => {
                    // SAFETY: the user's buffer is valid until it is told, by who posted it; ours holds a message of
                    // that length, and is posted again only afterwards.
                    unsafe { copy::copy(CopyStrategy::Plain, wanted.local, receive.local, len as usize) };
                    Event::Received { id, peer, len, imm }
                }
                false => {
                    let code = libfabric_sys::FI_ETRUNC as i32;
                    Event::ReceiveFailed { id, status: Status { kind: ErrorKind::TooLarge, code } }
                }
            });
            self.idle.push(receive);
        }
    }
}
