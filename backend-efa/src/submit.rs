//! Runs of requests as libfabric takes them, one call each.

use std::ffi::c_void;
use std::ptr::null_mut;

use libfabric_sys as sys;
use transport_core::spi::{Piece, WorkKind, WorkRequest};

use crate::context::Contexts;
use crate::peers::Remote;
use crate::queues::Queues;
use crate::tag::Tag;

/// Hands requests of a run to libfabric until it refuses one: how many it took, and its answer
/// to the one after them, 0 if there is none.
///
/// `first` is the place of `pieces` in the run; `data` counts bytes of completion data.
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
    data: usize,
) -> (usize, isize) {
    // SAFETY: by the caller.
    unsafe {
        match run.kind {
            WorkKind::Send => send(queues, contexts, run, (first, pieces), remote, data),
            _ => access(queues, contexts, run, (first, pieces), remote, data),
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
    data: usize,
) -> (usize, isize) {
    let mut iovec = sys::iovec { iov_base: null_mut(), iov_len: 0 };
    let mut there = sys::fi_rma_iov { addr: 0, len: 0, key: run.rkey };
    let mut desc = run.lkey as *mut _;
    let (here, there) = (&raw mut iovec, &raw mut there);
    let mut msg = sys::fi_msg_rma {
        msg_iov: here,
        desc: &raw mut desc,
        iov_count: 1,
        addr: remote.address,
        rma_iov: there,
        rma_iov_count: 1,
        context: null_mut(),
        data: Tag { slot: Some(remote.slot), imm: run.imm }.to_data(data),
    };
    let (ep, plain) = (queues.ep.as_ptr(), flags(run, data));
    // SAFETY: an open endpoint has the table, which lives as long.
    let calls = unsafe { &*(*ep).rma };
    let (call, delivered) = match run.kind {
        WorkKind::Read => (calls.readmsg, plain),
        _ => (calls.writemsg, plain | u64::from(sys::FI_DELIVERY_COMPLETE)),
    };
    let Some(call) = call else { return (0, -(sys::FI_ENOSYS as isize)) };
    each(contexts, run, (first, pieces), |piece, context| {
        msg.context = context;
        // SAFETY: both point to what lives in this call; what `msg` points to is copied before
        // libfabric returns, and the spans are the caller's.
        unsafe {
            (*here).iov_base = piece.local.cast();
            (*here).iov_len = piece.len as usize;
            (*there).len = piece.len as usize;
            (*there).addr = piece.remote;
            let mut flags = delivered;
            if piece.len == 0 {
                // Nothing is to be delivered; and shm of 1.17 never completes such a write then.
                (flags, (*there).addr, (*there).key) = (plain, remote.landing.base, remote.landing.key);
            }
            call(ep, &raw const msg, flags)
        }
    })
}

/// Messages.
unsafe fn send(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    remote: &Remote,
    data: usize,
) -> (usize, isize) {
    let mut desc = run.lkey as *mut _;
    each(contexts, run, (first, pieces), |piece, context| {
        let iovec = sys::iovec { iov_base: piece.local.cast(), iov_len: piece.len as usize };
        let msg = sys::fi_msg {
            msg_iov: &raw const iovec,
            desc: &raw mut desc,
            iov_count: 1,
            addr: remote.address,
            context,
            data: Tag { slot: Some(remote.slot), imm: run.imm }.to_data(data),
        };
        // SAFETY: by the caller; what `msg` points to is copied before this returns.
        unsafe { sys::fi_sendmsg(queues.ep.as_ptr(), &raw const msg, flags(run, data)) }
    })
}

/// Posts piece by piece, each with a context of its own, until `post` gives an error: how many,
/// and that error.
#[inline]
fn each(
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    mut post: impl FnMut(&Piece, *mut c_void) -> isize,
) -> (usize, isize) {
    for (place, piece) in pieces.iter().enumerate() {
        let Some(context) = contexts.take_request(run.id + (first + place) as u64, run.peer) else {
            return (place, -(sys::FI_EAGAIN as isize));
        };
        let code = post(piece, context);
        if code != 0 {
            contexts.end(context);
            return (place, code);
        }
    }
    (pieces.len(), 0)
}
