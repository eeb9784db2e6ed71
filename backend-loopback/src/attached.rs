//! A peer as the endpoint's thread sees it: what arrives from it, and the way to it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use multirail_spi::{Completions, ErrorKind, Event, PeerSlot, ReceiveRequest, WorkKind};

use crate::gpu::{self, FAR};
use crate::lane::{self, ENTRIES, Inlet};
use crate::peer::{Inbound, Outbound};
use crate::region::Regions;
use crate::segment::touch;
use crate::status::status;

/// Events taken from one peer before the next one's turn.
const TURN: usize = 32;

/// One peer of an endpoint, from its first sight to `PeerGone`.
pub(crate) struct Attached {
    pub(crate) inbound: Arc<Inbound>,
    pub(crate) outbound: Option<Arc<Outbound>>,
    pub(crate) leaving: bool,
    /// The kind of request that its lane had no room for.
    pub(crate) starved: Option<WorkKind>,
    peer: PeerSlot,
    inlet: Inlet,
}

/// Takes events from all lanes, in turns.
#[inline]
pub(crate) fn listen(
    all: &mut [Option<Attached>],
    turn: &mut usize,
    receives: &mut VecDeque<ReceiveRequest>,
    regions: &Regions,
    into: &mut Completions,
) {
    let mut silent = 0;
    while silent < all.len() && into.spare() > 0 {
        *turn = if *turn + 1 < all.len() { *turn + 1 } else { 0 };
        let heard = all[*turn].as_mut().is_some_and(|peer| peer.hear(receives, regions, into));
        silent = if heard { 0 } else { silent + 1 };
    }
}

impl Attached {
    /// Takes over the receiving end, unless another endpoint has it.
    pub(crate) fn new(peer: PeerSlot, inbound: Arc<Inbound>) -> Option<Self> {
        let inlet = inbound.take_inlet()?;
        Some(Self { inbound, outbound: None, leaving: false, starved: None, peer, inlet })
    }

    /// Puts the receiving end back for the next endpoint.
    pub(crate) fn detach(self) {
        self.inbound.return_inlet(self.inlet);
    }

    /// Faults in what the first request either way would: lanes, boards and stages.
    #[cold]
    pub(crate) fn warm_up(&self) {
        touch(self.inbound.layout());
        self.inbound.stage().into_iter().for_each(touch);
        if let Some(outbound) = &self.outbound {
            touch(outbound.layout());
            outbound.stage().into_iter().for_each(touch);
        }
    }

    /// Takes up to a turn's worth of what has arrived. Whether there was any.
    pub(crate) fn hear(
        &mut self,
        receives: &mut VecDeque<ReceiveRequest>,
        regions: &Regions,
        into: &mut Completions,
    ) -> bool {
        if self.leaving || self.inlet.is_broken() {
            return false;
        }
        let layout = self.inbound.layout();
        let before = into.spare();
        for _ in 0..before.min(TURN) {
            let Some(imm) = self.inlet.next_imm(layout) else { break };
            let _ = into.push(Event::Imm { peer: self.peer, imm });
        }
        while into.spare() > 0 {
            let Some(message) = self.inlet.next_message() else { break };
            let Some(receive) = receives.pop_front() else { break };
            let fits = message.len as u64 <= receive.len;
            let len = if fits { message.len } else { 0 };
            let mut taken = if fits { Ok(()) } else { Err(ErrorKind::TooLarge) };
            if receive.lkey & FAR != 0 {
                let mut bytes = vec![0; len];
                // SAFETY: the bytes are ours, and as many.
                unsafe { self.inlet.take_message(layout, bytes.as_mut_ptr(), len) };
                taken = taken.and_then(|()| gpu::message::store(regions, &receive, &bytes));
            } else {
                // SAFETY: the receive is posted and not ended: its span is ours to write,
                // by the contract of `post_recv`.
                unsafe { self.inlet.take_message(layout, receive.local, len) };
            }
            let _ = into.push(match taken {
                Ok(()) => {
                    let (id, len, imm) = (receive.id, message.len as u64, message.imm);
                    Event::Received { id, peer: self.peer, len, imm }
                }
                Err(kind) => Event::ReceiveFailed { id: receive.id, status: status(kind) },
            });
        }
        if self.inlet.made_room(layout) {
            self.outbound.iter().for_each(|outbound| outbound.ring());
        }
        if self.inlet.is_broken() {
            tracing::warn!(
                peer = self.peer.0,
                "loopback: a peer wrote nonsense into its lane; it is cut off"
            );
            self.inbound.close();
            self.outbound.iter().for_each(|outbound| outbound.hang_up());
        }
        into.spare() < before
    }

    /// Moves staged bytes for the peer, up to a turn's worth. Only once it can be told.
    #[cold]
    pub(crate) fn serve(&mut self, regions: &Regions) {
        let (Some(stage), Some(outbound)) = (self.inbound.stage(), &self.outbound) else { return };
        let at = self.inbound.served.load(Ordering::Relaxed);
        if self.leaving || self.inlet.is_broken() || !stage.is_due(at) {
            return;
        }
        let (served, sleeps) = stage.serve(at, regions);
        self.inbound.served.fetch_add(served, Ordering::Relaxed);
        if sleeps {
            outbound.ring();
        }
    }

    /// The immediate data that arrived before the end.
    pub(crate) fn last_words(&mut self) -> impl Iterator<Item = Event> {
        let next = || Some(Event::Imm { peer: self.peer, imm: self.inlet.next_imm(self.inbound.layout())? });
        std::iter::from_fn(next).take(ENTRIES)
    }

    /// Asks to be rung at the next arrival, and when a full lane has room again.
    /// `false` if something is there already.
    pub(crate) fn arm(&mut self, can_receive: bool) -> bool {
        let may_sleep = match (self.starved.take(), &self.outbound) {
            (Some(kind), Some(outbound)) => lane::starve(outbound.layout(), kind),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let staged = || self.inbound.stage().filter(|_| self.outbound.is_some());
        let quiet = self.leaving
            || self.inlet.arm(self.inbound.layout())
                && !(can_receive && self.inlet.next_message().is_some())
                && !staged().is_some_and(|stage| stage.is_due(self.inbound.served.load(Ordering::Relaxed)));
        quiet && may_sleep
    }

    /// Takes that back.
    pub(crate) fn disarm(&mut self) {
        self.inlet.disarm(self.inbound.layout());
    }
}
