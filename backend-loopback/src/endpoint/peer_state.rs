//! The endpoint's state of one peer: both halves of the connection, and what arrives.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use multirail_spi::{Completions, ErrorKind, Event, PeerSlot, ReceiveRequest, TakeMessage, WorkKind};

use crate::gpu;
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::regions::Regions;
use crate::segment::lease_table::DEVICE_MEMORY;
use crate::segment::message_ring::{self, Arrival, RING_ENTRIES, RingReceiver, WaitingMessage};
use crate::segment::touch;
use crate::staging;
use crate::status::status;

/// Events that the endpoint takes from one peer before it goes on to the next peer.
const EVENTS_PER_PEER: usize = 32;

/// One peer of an endpoint, from the poll that first sees it to `PeerGone`.
pub(super) struct PeerState {
    pub(super) inbound: Arc<Inbound>,
    pub(super) outbound: Option<Arc<Outbound>>,
    pub(super) leaving: bool,
    /// Whether [`WatchedPeers`](super::watched_peers::WatchedPeers) has this peer.
    pub(super) is_watched: bool,
    /// Whether something came from the peer since the last look for silent peers.
    pub(super) has_written: bool,
    /// The kind of a request for which the peer's message ring had no room.
    pub(super) blocked: Option<WorkKind>,
    slot: PeerSlot,
    receiver: RingReceiver,
}

impl PeerState {
    /// Takes the receiving end of the message ring. Returns `None` if another endpoint has it.
    pub(super) fn new(slot: PeerSlot, inbound: Arc<Inbound>) -> Option<Self> {
        let receiver = inbound.take_receiver()?;
        let (is_watched, has_written, leaving) = (false, false, false);
        Some(Self {
            inbound,
            outbound: None,
            leaving,
            is_watched,
            has_written,
            blocked: None,
            slot,
            receiver,
        })
    }

    /// Returns the receiving end for the next endpoint.
    pub(super) fn detach(self) {
        self.inbound.return_receiver(self.receiver);
    }

    /// Touches the pages that the first request in either direction would touch: those of segments and staging
    /// buffers.
    #[cold]
    pub(super) fn warm_up(&self) {
        touch(self.inbound.layout());
        message_ring::warm_up(self.inbound.layout());
        self.inbound.staging_buffer().into_iter().for_each(touch);
        if let Some(outbound) = &self.outbound {
            touch(outbound.layout());
            message_ring::warm_up(outbound.layout());
            outbound.staging_buffer().into_iter().for_each(touch);
        }
    }

    /// Takes events that have arrived, up to [`EVENTS_PER_PEER`] imms. Returns true if there was an event.
    pub(super) fn receive(
        &mut self,
        receives: &mut VecDeque<ReceiveRequest>,
        regions: &Regions,
        into: &mut Completions,
    ) -> bool {
        if self.leaving || self.receiver.is_broken() {
            return false;
        }
        let before = into.spare();
        // Receives that were posted meanwhile.
        while self.receiver.has_waiting()
            && into.spare() > 0
            && let Some(event) = self.next_message(receives, regions)
        {
            let _ = into.push(event);
        }
        for _ in 0..into.spare().min(EVENTS_PER_PEER) {
            let Some(arrival) = self.receiver.next_arrival(self.inbound.layout()) else { break };
            let event = match arrival {
                Arrival::Imm(imm) => Event::Imm { peer: self.slot, imm },
                Arrival::Message(message) => match receives.pop_front() {
                    Some(receive) => self.deliver(&message, &receive, regions),
                    None => {
                        self.receiver.keep(message);
                        continue;
                    }
                },
            };
            let _ = into.push(event);
        }
        self.after_taking();
        let has_received = into.spare() < before;
        self.has_written |= has_received;
        has_received
    }

    /// Serves slots of the peer's staging buffer. Does so only once the connection to the peer is complete, so that
    /// the peer can be woken.
    #[cold]
    pub(super) fn serve_staging(&mut self, regions: &Regions) {
        let (Some(buffer), Some(outbound)) = (self.inbound.staging_buffer(), &self.outbound) else { return };
        let at = self.inbound.served.load(Ordering::Relaxed);
        if self.leaving || self.receiver.is_broken() || !buffer.is_posted(at) {
            return;
        }
        let (served, sleeps) = staging::serve(buffer, at, regions);
        self.inbound.served.fetch_add(served, Ordering::Relaxed);
        if sleeps {
            outbound.wake();
        }
    }

    /// Takes the next message into the next posted receive. `None` if there is no message, or no receive.
    fn next_message(&mut self, receives: &mut VecDeque<ReceiveRequest>, regions: &Regions) -> Option<Event> {
        if receives.is_empty() {
            return None;
        }
        let message = self.receiver.pop_message()?;
        let receive = receives.pop_front()?;
        Some(self.deliver(&message, &receive, regions))
    }

    /// Takes a message into a receive.
    #[inline]
    fn deliver(&mut self, message: &WaitingMessage, receive: &ReceiveRequest, regions: &Regions) -> Event {
        let layout = self.inbound.layout();
        let fits = message.len as u64 <= receive.len;
        let len = if fits { message.len } else { 0 };
        let mut taken = if fits { Ok(()) } else { Err(ErrorKind::TooLarge) };
        let is_taken = if receive.lkey & DEVICE_MEMORY != 0 {
            let mut bytes = vec![0; len];
            // SAFETY: `bytes` has `len` bytes, and is this function's.
            let is_taken = unsafe { self.receiver.take_message(layout, message, bytes.as_mut_ptr(), len) };
            taken = taken
                .and_then(|()| if is_taken { gpu::store_message(regions, receive, &bytes) } else { Ok(()) });
            is_taken
        } else {
            // SAFETY: the receive is posted and not ended: this endpoint may write its span, by the contract of
            // `post_recv`.
            unsafe { self.receiver.take_message(layout, message, receive.local, len) }
        };
        if !is_taken {
            // There was no memory for the payload.
            taken = taken.and(Err(ErrorKind::Exhausted));
        }
        match taken {
            Ok(()) => {
                let (id, len, imm) = (receive.id, message.len as u64, message.imm);
                Event::Received { id, peer: self.slot, len, imm }
            }
            Err(kind) => Event::ReceiveFailed { id: receive.id, status: status(kind) },
        }
    }

    pub(super) fn slot(&self) -> PeerSlot {
        self.slot
    }

    /// Takes the messages for which no receive is posted.
    pub(super) fn take_unclaimed(&mut self, take: &mut TakeMessage<'_>) {
        while let Some(message) = self.receiver.pop_message() {
            let mut bytes = vec![0; message.len];
            // SAFETY: `bytes` has the length of the message, and is this function's.
            let is_taken = unsafe {
                self.receiver.take_message(self.inbound.layout(), &message, bytes.as_mut_ptr(), bytes.len())
            };
            if is_taken {
                take(self.slot, &bytes, message.imm);
            }
        }
        self.after_taking();
    }

    /// Follows each taking from the ring: wakes a peer that waits for room, and disconnects one whose ring is broken.
    #[inline]
    fn after_taking(&mut self) {
        if self.receiver.has_made_room(self.inbound.layout()) {
            self.outbound.iter().for_each(|outbound| outbound.wake());
        }
        if self.receiver.is_broken() {
            self.shut_out();
        }
    }

    /// Disconnects the peer, unless this side has done so.
    #[cold]
    fn shut_out(&self) {
        if self.inbound.is_closed() {
            return;
        }
        tracing::warn!(
            peer = self.slot.0,
            "loopback: the message ring of a peer has an invalid entry, or no memory; the peer is disconnected"
        );
        self.inbound.close();
        self.outbound.iter().for_each(|outbound| outbound.close());
    }

    /// The imms that arrived before the connection ended, and the messages for which receives are posted: their writes
    /// and sends have succeeded.
    pub(super) fn remaining_arrivals(
        &mut self,
        receives: &mut VecDeque<ReceiveRequest>,
        regions: &Regions,
        mut push: impl FnMut(Event),
    ) {
        for _ in 0..RING_ENTRIES {
            let Some(imm) = self.receiver.next_imm(self.inbound.layout()) else { break };
            push(Event::Imm { peer: self.slot, imm });
        }
        for _ in 0..RING_ENTRIES {
            let Some(event) = self.next_message(receives, regions) else { break };
            push(event);
        }
        self.after_taking();
    }

    /// Arms the ring of a silent peer. Returns false if the endpoint must go on to look at it.
    pub(super) fn may_be_left(&mut self) -> bool {
        let may_be_left = self.blocked.is_none() && self.receiver.next_message().is_none() && self.arm(false);
        if !may_be_left {
            self.disarm();
        }
        may_be_left
    }

    /// Asks the peer for a wakeup at its next entry, and when a full message ring has room again. Returns false if
    /// there is something to do already.
    pub(super) fn arm(&mut self, can_receive: bool) -> bool {
        let may_sleep = match (self.blocked.take(), &self.outbound) {
            (Some(kind), Some(outbound)) => message_ring::request_room(outbound.layout(), kind),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let is_posted = || {
            let buffer = self.inbound.staging_buffer().filter(|_| self.outbound.is_some());
            buffer.is_some_and(|buffer| buffer.is_posted(self.inbound.served.load(Ordering::Relaxed)))
        };
        let can_go_on = || can_receive && self.receiver.has_waiting() || is_posted();
        // A broken ring is armed too, but nothing more is taken from its peer.
        let nothing_arrived = self.leaving
            || self.receiver.arm(self.inbound.layout()) && (self.receiver.is_broken() || !can_go_on());
        nothing_arrived && may_sleep
    }

    /// Returns true if the peer has written since the endpoint stopped to watch it. The peer has then taken the arming
    /// of its ring back, in its own segment, where no other peer can change that.
    pub(super) fn has_written_unwatched(&self) -> bool {
        !self.is_watched && !self.leaving && !self.receiver.is_armed(self.inbound.layout())
    }

    /// Withdraws the request of [`arm`](Self::arm) for the next entry.
    pub(super) fn disarm(&mut self) {
        self.receiver.disarm(self.inbound.layout());
    }
}
