//! Runs of requests as libfabric takes them, one call each.

use std::ffi::c_void;
use std::ptr::null_mut;

use libfabric_sys as sys;
use multirail_spi::{Piece, WorkKind, WorkRequest};

use crate::context::Contexts;
use crate::peers::Remote;
use crate::queues::Queues;
use crate::settings;
use crate::tag::Tag;

/// What requests need to know of this side.
pub(crate) struct Local {
    /// Bytes of completion data.
    pub(crate) data: usize,
    /// Whether messages may come with it unsaid, and all have it.
    pub(crate) hides_data: bool,
    /// Writes that are posted with one doorbell: 1, or up to [`BATCH`].
    pub(crate) batch: usize,
    /// Memory and its descriptor, for requests without bytes: EFA's provider follows what a
    /// request names, however short it is.
    pub(crate) place: (*mut u8, u64),
}

impl Local {
    /// Of an endpoint, whose domain has such a `place`.
    pub(crate) fn new(queues: &Queues, place: (*mut u8, u64)) -> Self {
        let device = &queues.device;
        let data = device.info.domain().cq_data_size;
        let hides_data = data >= 8 && settings::hides_data(&device.info);
        Self { data, hides_data, batch: device.batch(), place }
    }
}

// SAFETY: the pointer is handed to libfabric, and never followed here.
unsafe impl Send for Local {}

/// Hands requests of a run to libfabric until it refuses one: how many it took, and its answer
/// to the one after them, 0 if there is none.
///
/// `first` is the place of `pieces` in the run.
///
/// # Safety
/// As `Endpoint::post`.
#[inline]
pub(crate) unsafe fn submit(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    remote: &Remote,
    local: &Local,
) -> (usize, isize) {
    // SAFETY: by the caller.
    unsafe {
        match run.kind {
            WorkKind::Send => send(queues, contexts, run, (first, pieces), remote, local),
            _ => access(queues, contexts, run, (first, pieces), remote, local),
        }
    }
}

fn flags(run: &WorkRequest, data: usize) -> u64 {
    let mut flags = u64::from(sys::FI_COMPLETION);
    if run.imm.is_some() || (run.kind == WorkKind::Send && data >= 8) {
        flags |= u64::from(sys::FI_REMOTE_CQ_DATA);
    }
    flags
}

/// Writes and reads.
unsafe fn access(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    remote: &Remote,
    local: &Local,
) -> (usize, isize) {
    let data = local.data;
    let mut iovec = sys::iovec { iov_base: null_mut(), iov_len: 0 };
    let mut there = sys::fi_rma_iov { addr: 0, len: 0, key: run.rkey };
    let mut desc = run.lkey as *mut _;
    let (here, there, desc) = (&raw mut iovec, &raw mut there, &raw mut desc);
    let mut msg = sys::fi_msg_rma {
        msg_iov: here,
        desc,
        iov_count: 1,
        addr: remote.address,
        rma_iov: there,
        rma_iov_count: 1,
        context: null_mut(),
        data: Tag { peer_tag: Some(remote.peer_tag), imm: run.imm }.to_data(data),
    };
    let (ep, plain) = (queues.ep.as_ptr(), flags(run, data));
    // SAFETY: an open endpoint has the table, which lives as long.
    let calls = unsafe { &*(*ep).rma };
    let (call, delivered) = match run.kind {
        WorkKind::Read => (calls.readmsg, plain),
        _ => (calls.writemsg, plain | u64::from(sys::FI_DELIVERY_COMPLETE)),
    };
    let Some(call) = call else { return (0, -(sys::FI_ENOSYS as isize)) };
    let post = |piece: &Piece, context, more: u64| {
        msg.context = context;
        // SAFETY: both point to what lives in this call; what `msg` points to is copied before
        // libfabric returns, and the spans are the caller's.
        unsafe {
            (*here).iov_base = piece.local.cast();
            (*here).iov_len = piece.len as usize;
            (*there).len = piece.len as usize;
            (*there).addr = piece.remote;
            if piece.len > 0 {
                return call(ep, &raw const msg, delivered | more);
            }
            // Nothing is to be delivered; and shm of 1.17 never completes such a write then.
            ((*there).addr, (*there).key) = (remote.landing.base, remote.landing.key);
            ((*here).iov_base, *desc) = (local.place.0.cast(), local.place.1 as *mut _);
            let code = call(ep, &raw const msg, plain | more);
            (*desc, (*there).key) = (run.lkey as *mut _, run.rkey);
            code
        }
    };
    match local.batch {
        1 => each::<1>(contexts, run, (first, pieces), post),
        _ => each::<BATCH>(contexts, run, (first, pieces), post),
    }
}

/// Messages.
unsafe fn send(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    remote: &Remote,
    local: &Local,
) -> (usize, isize) {
    let data = local.data;
    each::<1>(contexts, run, (first, pieces), |piece, context, _| {
        let (start, lkey) = if piece.len == 0 { local.place } else { (piece.local, run.lkey) };
        let iovec = sys::iovec { iov_base: start.cast(), iov_len: piece.len as usize };
        let mut desc = lkey as *mut _;
        let msg = sys::fi_msg {
            msg_iov: &raw const iovec,
            desc: &raw mut desc,
            iov_count: 1,
            addr: remote.address,
            context,
            data: Tag { peer_tag: Some(remote.peer_tag), imm: run.imm }.to_data(data),
        };
        // SAFETY: by the caller; what `msg` points to is copied before this returns.
        unsafe { sys::fi_sendmsg(queues.ep.as_ptr(), &raw const msg, flags(run, data)) }
    })
}

/// The most writes of a batch. Posting up to 16 before polling is the step that Perplexity's ladder
/// climbs from 47.6 to 80.9 % of 32 cards.
pub(crate) const BATCH: usize = 16;

/// Posts piece by piece, each with a context of its own, until `post` gives an error: how many,
/// and that error.
///
/// Up to `N` go with one doorbell: by FI_MORE, which the last does not have. That one's refusal is
/// the whole batch's (2.1, `efa_rma_post_write`: nothing of it is posted). There are contexts for all.
#[inline]
fn each<const N: usize>(
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    mut post: impl FnMut(&Piece, *mut c_void, u64) -> isize,
) -> (usize, isize) {
    let full = -(sys::FI_EAGAIN as isize);
    let mut taking = contexts.taking(run.id + first as u64, run.peer);
    let mut taken = 0;
    for batch in pieces.chunks(N) {
        let Some((last, others)) = batch.split_last() else { break };
        for piece in others {
            let code = taking.next().map_or(full, |context| post(piece, context, u64::from(sys::FI_MORE)));
            if code != 0 {
                return (taken, code);
            }
        }
        let code = taking.next().map_or(full, |context| post(last, context, 0));
        if code != 0 {
            return (taken, code);
        }
        taking.keep();
        taken += batch.len();
    }
    (taken, 0)
}
