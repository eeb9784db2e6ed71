//! Completions as events.

use std::ffi::c_int;

use multirail_spi::{ErrorKind, Event, PeerSlot, Status};
use rdma_sys as ib;

use crate::endpoint::VerbsEndpoint;
use crate::posted::Ended;
use crate::receives::{IMM, RECEIVE};
use crate::status::of_completion;

/// Completions read by one call.
const AT_ONCE: usize = 64;
/// Where they are read into.
pub(crate) fn entries() -> Vec<ib::ibv_wc> {
    // SAFETY: zero is a value of the structure.
    vec![unsafe { std::mem::zeroed() }; AT_ONCE]
}

/// `wc_flags`: it has an imm (`IBV_WC_WITH_IMM`).
const WITH_IMM: u32 = 2;

impl VerbsEndpoint {
    /// Reads about `room` completions and files their events; whether there were any.
    #[inline]
    pub(crate) fn drain(&mut self, room: usize) -> bool {
        let mut any = false;
        self.is_drained = false;
        if self.is_lost {
            self.tell_loss();
            return false;
        }
        while self.waiting.len() < room {
            let most = self.entries.len().min(room - self.waiting.len()) as c_int;
            let into = self.entries.as_mut_ptr();
            // SAFETY: the queue is open, and there is room for so many.
            let count = unsafe { ib::ibv_poll_cq(self.shared.card.cq.as_ptr(), most, into) };
            if count != 0 {
                self.file(count);
                any |= count > 0;
            }
            if count < most {
                self.is_drained = count >= 0;
                break;
            }
        }
        any | self.deliver()
    }

    /// Files what was read: so many completions, or an error.
    fn file(&mut self, count: c_int) {
        let entries = std::mem::take(&mut self.entries);
        for entry in entries.iter().take(count.max(0) as usize) {
            match entry.wr_id & RECEIVE {
                0 => self.ended(entry),
                _ => self.received(entry),
            }
        }
        self.entries = entries;
        if count < 0 {
            self.lose(count);
        }
    }

    /// Hands messages to the receives that get them; whether there were any.
    #[inline]
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some(delivered) = self.receives.next(&self.shared.card) {
            let id = delivered.id;
            self.waiting.push_back(match delivered.failed {
                None => Event::Received { id, peer: delivered.from, len: delivered.len, imm: delivered.imm },
                Some(status) => Event::ReceiveFailed { id, status },
            });
            any = true;
        }
        any
    }

    /// A request of ours is over.
    fn ended(&mut self, entry: &ib::ibv_wc) {
        // Of a queue pair that is gone.
        let Some(ring) = self.rings.get_mut(entry.qp_num) else { return };
        let (waiting, requests) = (&mut self.waiting, &mut self.requests);
        let tell = |Ended { first, count }| {
            *requests -= count as usize;
            waiting.push_back(Event::Done { first, count });
        };
        if entry.status == ib::IBV_WC_SUCCESS {
            return ring.posted.done(entry.wr_id, tell);
        }
        let failed = ring.posted.failed(entry.wr_id, tell);
        let (slot, is_flushed) = (ring.slot, entry.status == ib::IBV_WC_WR_FLUSH_ERR);
        let status = of_completion(entry.status);
        if !is_flushed {
            ring.cause = Some(status);
        }
        let cause = ring.cause;
        tracing::debug!(qp = entry.qp_num, status.code, vendor = entry.vendor_err, "a request failed");
        if let Some(request) = failed {
            self.requests -= 1;
            match status.kind {
                _ if is_flushed => self.flushed(request, cause),
                // A process that is killed loses its keys before its queue pairs.
                ErrorKind::RemoteAccess => {
                    self.waiting.push_back(Event::FailedUnconfirmed { id: request.id, peer: slot, status });
                }
                _ => self.waiting.push_back(Event::Failed { id: request.id, status }),
            }
        }
        self.breaks(slot, Some(entry.qp_num));
    }

    /// The connection of `slot` failed, by the queue pair `number` if there is one: the peer is to be told of the next.
    pub(crate) fn breaks(&mut self, slot: PeerSlot, number: Option<u32>) {
        if self.shared.peers.broke(slot, number) {
            self.waiting.push_back(Event::EndpointChanged);
            // The other queue pairs stop before the peer is told: a late packet of this connection must not land on
            // what comes over the next one.
            self.refresh();
        }
    }

    /// The peer that a queue pair is connected with.
    fn owner(&self, number: u32) -> Option<PeerSlot> {
        self.rings.get(number).map(|ring| ring.slot).filter(|slot| self.knows(*slot))
    }

    /// As `owner`, of a queue pair that is not known here: it was connected since the slots were looked at, or the
    /// control side is connecting it now. The peer that has connected its own side may send before this side's join is
    /// over, and the card acknowledges that; so the slots say whose the queue pair is while it is being connected.
    #[cold]
    fn new_owner(&mut self, number: u32) -> Option<PeerSlot> {
        self.refresh();
        self.owner(number).or_else(|| self.shared.peers.owner(number))
    }

    /// Something of a peer's has taken a receive.
    fn received(&mut self, entry: &ib::ibv_wc) {
        let from = match entry.status {
            ib::IBV_WC_SUCCESS => self.owner(entry.qp_num).or_else(|| self.new_owner(entry.qp_num)),
            _ => None,
        };
        // SAFETY: what the union holds where the flag says so, or an imm came for certain.
        let imm = u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data });
        if entry.wr_id & IMM == IMM {
            self.receives.took_imm(&self.shared.card);
            match from {
                Some(peer) => self.waiting.push_back(Event::Imm { peer, imm }),
                None => tracing::debug!(imm, "an imm of a peer that is gone, or was none"),
            }
            return;
        }
        let buffer = (entry.wr_id & !RECEIVE) as u32;
        match from {
            Some(peer) => {
                let imm = (entry.wc_flags & WITH_IMM != 0).then_some(imm);
                self.receives.arrived(buffer, peer, entry.byte_len, imm);
            }
            None => self.receives.give(&self.shared.card, buffer),
        }
    }

    /// The card does not work any more. Its queue pairs are destroyed before anyone is told of the loss: whatever the
    /// card still does, it writes no byte of a peer's from then on, and sends none of ours.
    fn lose(&mut self, code: c_int) {
        if std::mem::replace(&mut self.is_lost, true) {
            return;
        }
        let status = Status { kind: ErrorKind::DeviceLost, code };
        for ring in self.rings.all() {
            for Ended { first, count } in ring.posted.take_all() {
                let failed = (first..first + u64::from(count)).map(|id| Event::Failed { id, status });
                self.waiting.extend(failed);
            }
        }
        self.requests = 0;
        let replays = self.replays.drain(..).map(|request| Event::Failed { id: request.id, status });
        self.waiting.extend(replays);
        let receives = self.receives.take_wanted();
        self.waiting.extend(receives.into_iter().map(|id| Event::ReceiveFailed { id, status }));
        self.destroy_queue_pairs();
        self.loss = Some(status);
        self.tell_loss();
    }

    /// Tells the loss of the device, unless it is told, once no join is under way: the control side destroys the queue
    /// pairs that it was connecting, and until then bytes may come over them.
    fn tell_loss(&mut self) {
        if let Some(status) = self.loss.take_if(|_| !self.shared.peers.is_joining()) {
            self.waiting.push_back(Event::DeviceLost { status });
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
