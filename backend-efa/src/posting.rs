//! Posting on a lane, until libfabric has no room.

use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{Piece, PostResult, ReceiveRequest, WorkRequest};

use crate::endpoint::EfaEndpoint;
use crate::lane::Turn;
use crate::peers::Remote;
use crate::queues::Queues;
use crate::report::AT_ONCE;
use crate::status::status;
use crate::submit::submit;

/// libfabric's answer where there is no room now.
pub(crate) const FULL: isize = -(sys::FI_EAGAIN as isize);
/// What is posted to a device that does not work any more.
pub(crate) const NO_DEVICE: isize = -(sys::FI_ENODEV as isize);

/// Attempts in a row at a request that libfabric has no room for.
const TRIES: usize = 16;

/// What a post of `accepted` requests comes to, the next of which got `code`.
pub(crate) fn refused(accepted: usize, code: isize) -> PostResult {
    PostResult { accepted, error: (code != FULL).then(|| status(code as i32)) }
}

/// A post to an endpoint that is lost.
pub(crate) fn lost() -> PostResult {
    refused(0, NO_DEVICE)
}

impl EfaEndpoint {
    /// Posts a run to a peer of this lane: how many were taken, and libfabric's answer to the next.
    ///
    /// # Safety
    /// As `Endpoint::post`.
    pub(crate) unsafe fn post_run(
        &mut self,
        turn: &mut Turn<'_>,
        run: &WorkRequest,
        pieces: &[Piece],
        remote: &Remote,
    ) -> (usize, isize) {
        let (mut taken, mut tries) = (0, 0);
        loop {
            let Turn { queues, posted, .. } = turn;
            let room = (self.send_depth - posted.requests).min(posted.spare()).min(pieces.len() - taken);
            let next = (taken, &pieces[taken..taken + room]);
            // SAFETY: by the caller; contexts stay where they are until the completion.
            let (more, code) = unsafe { submit(queues, posted, run, next, remote, &self.local) };
            self.outstanding[run.peer.0 as usize] += more as u32;
            posted.requests += more;
            taken += more;
            tries = if more > 0 { 0 } else { tries + 1 };
            match code {
                0 if taken == pieces.len() => return (taken, 0),
                0 => return (taken, FULL),
                // What is full may be so for less than a turn of the engine takes.
                code if code == FULL && tries < TRIES => self.drain(turn, AT_ONCE),
                code => return (taken, self.refusal(turn.queues, code)),
            }
        }
    }

    /// What the refusal of a post comes to; of a dead device it is noted.
    fn refusal(&mut self, queues: &Queues, code: isize) -> isize {
        let code = queues.device.refusal(code);
        self.is_lost |= code == NO_DEVICE;
        code
    }

    /// Posts the backend's own receives that are idle, and hands on what came into others.
    #[cold]
    pub(crate) fn post_own(&mut self) {
        let Some(mut own) = self.own.take() else { return };
        own.tell(&mut self.waiting);
        if !own.idle.is_empty()
            && let Some(mut lane) = self.lane.take()
        {
            // SAFETY: the memory is registered, and kept until the endpoint is closed.
            let posted = unsafe { self.post_receives(&mut lane.turn(), &own.idle) };
            own.idle.drain(..posted.accepted);
            self.lane = Some(lane);
        }
        self.own = Some(own);
    }

    /// Posts receives on a lane.
    ///
    /// # Safety
    /// As `Endpoint::post_recv`.
    pub(crate) unsafe fn post_receives(
        &mut self,
        turn: &mut Turn<'_>,
        batch: &[ReceiveRequest],
    ) -> PostResult {
        let Turn { queues, posted, .. } = turn;
        // A card's own receives are of 16 bits (`efa_io_rx_desc` of rdma-core); its packets are shorter.
        let longest = if queues.device.info.is_direct() { u64::from(u16::MAX) } else { u64::MAX };
        for (accepted, receive) in batch.iter().enumerate() {
            if posted.receives == self.recv_depth {
                return refused(accepted, FULL);
            }
            let Some(context) = posted.take_receive(receive) else { return refused(accepted, FULL) };
            let iovec =
                sys::iovec { iov_base: receive.local.cast(), iov_len: receive.len.min(longest) as usize };
            let mut desc = receive.lkey as *mut c_void;
            let msg = sys::fi_msg {
                msg_iov: &raw const iovec,
                desc: &raw mut desc,
                iov_count: 1,
                addr: sys::FI_ADDR_UNSPEC,
                context,
                data: 0,
            };
            let flags = u64::from(sys::FI_COMPLETION);
            // SAFETY: by the caller; the context stays where it is until the completion.
            let code = unsafe { sys::fi_recvmsg(queues.ep.as_ptr(), &raw const msg, flags) };
            if code != 0 {
                posted.end(context);
                if code != FULL && queues.device.info.has_states() {
                    // By a message that was there already, of which an error is reported as well (2.1,
                    // `efa_rdm_srx_start`).
                    self.retire(posted, context);
                }
                return refused(accepted, self.refusal(queues, code));
            }
            posted.receives += 1;
        }
        PostResult { accepted: batch.len(), error: None }
    }
}
