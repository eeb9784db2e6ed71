//! Posting a run: one call of libfabric for each work request.

use std::ffi::c_void;
use std::ptr::null_mut;

use libfabric_sys as sys;
use multirail_spi::{Piece, WorkKind, WorkRequest};

use crate::context::Contexts;
use crate::fabric_endpoint::Queues;
use crate::peers::Destination;
use crate::settings;
use crate::tag::Tag;

/// How an endpoint posts requests.
pub(crate) struct PostConfig {
    /// The bytes of completion data.
    pub(crate) cq_data_size: usize,
    /// Whether a completion of a message may have completion data without the flag that says so. The backend
    /// sends each message with completion data then (`flags`).
    pub(crate) omits_data_flag: bool,
    /// The most writes or reads under one doorbell: 1 or [`MAX_BATCH`].
    pub(crate) max_batch: usize,
    /// Local memory with its descriptor, for requests without bytes: EFA's provider reads the descriptor of every
    /// request.
    pub(crate) empty_source: (*mut u8, u64),
}

impl PostConfig {
    pub(crate) fn new(queues: &Queues, empty_source: (*mut u8, u64)) -> Self {
        let device = &queues.device;
        let cq_data_size = device.info.domain().cq_data_size;
        let omits_data_flag = cq_data_size >= 8 && settings::omits_data_flag(&device.info);
        Self { cq_data_size, omits_data_flag, max_batch: device.max_batch(), empty_source }
    }
}

// SAFETY: the pointer is handed to libfabric, and never followed here.
unsafe impl Send for PostConfig {}

/// Posts requests of a run until libfabric refuses one. Returns the number of posted requests, and libfabric's code for
/// the next one, 0 if there is none.
///
/// `first` is the index of the first of `pieces` in the run.
///
/// # Safety
/// As `Endpoint::post`.
#[inline]
pub(crate) unsafe fn submit(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    destination: &Destination,
    config: &PostConfig,
) -> (usize, isize) {
    // SAFETY: by the caller.
    unsafe {
        match run.kind {
            WorkKind::Send => post_messages(queues, contexts, run, (first, pieces), destination, config),
            _ => post_rma(queues, contexts, run, (first, pieces), destination, config),
        }
    }
}

fn flags(run: &WorkRequest, cq_data_size: usize) -> u64 {
    let mut flags = u64::from(sys::FI_COMPLETION);
    if run.imm.is_some() || (run.kind == WorkKind::Send && cq_data_size >= 8) {
        flags |= u64::from(sys::FI_REMOTE_CQ_DATA);
    }
    flags
}

/// Posts writes or reads.
unsafe fn post_rma(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    destination: &Destination,
    config: &PostConfig,
) -> (usize, isize) {
    let mut local = sys::iovec { iov_base: null_mut(), iov_len: 0 };
    let mut remote = sys::fi_rma_iov { addr: 0, len: 0, key: run.rkey };
    let mut desc = run.lkey as *mut _;
    let (local, remote, desc) = (&raw mut local, &raw mut remote, &raw mut desc);
    let mut msg = sys::fi_msg_rma {
        msg_iov: local,
        desc,
        iov_count: 1,
        addr: destination.address,
        rma_iov: remote,
        rma_iov_count: 1,
        context: null_mut(),
        data: Tag { peer_tag: Some(destination.peer_tag), imm: run.imm }.to_data(config.cq_data_size),
    };
    let (ep, plain) = (queues.ep.as_ptr(), flags(run, config.cq_data_size));
    // SAFETY: an open endpoint has the table, which lives as long.
    let calls = unsafe { &*(*ep).rma };
    let (call, delivered) = match run.kind {
        WorkKind::Read => (calls.readmsg, plain),
        _ => (calls.writemsg, plain | u64::from(sys::FI_DELIVERY_COMPLETE)),
    };
    let Some(call) = call else { return (0, -(sys::FI_ENOSYS as isize)) };
    let post = |piece: &Piece, context, more: u64| {
        msg.context = context;
        // SAFETY: `local`, `remote` and `desc` point to variables of this call; what `msg` points to is copied before
        // libfabric returns, and the spans are the caller's.
        unsafe {
            (*local).iov_base = piece.local.cast();
            (*local).iov_len = piece.len as usize;
            (*remote).len = piece.len as usize;
            (*remote).addr = piece.remote;
            if piece.len > 0 {
                return call(ep, &raw const msg, delivered | more);
            }
            // A request without bytes does not ask for FI_DELIVERY_COMPLETE: it delivers nothing, and shm of 1.17 would
            // never complete it.
            let target = destination.empty_write_target;
            ((*remote).addr, (*remote).key) = (target.base, target.key);
            ((*local).iov_base, *desc) = (config.empty_source.0.cast(), config.empty_source.1 as *mut _);
            let code = call(ep, &raw const msg, plain | more);
            (*desc, (*remote).key) = (run.lkey as *mut _, run.rkey);
            code
        }
    };
    match config.max_batch {
        1 => post_each::<1>(contexts, run, (first, pieces), post),
        _ => post_each::<MAX_BATCH>(contexts, run, (first, pieces), post),
    }
}

/// Posts messages.
unsafe fn post_messages(
    queues: &Queues,
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    destination: &Destination,
    config: &PostConfig,
) -> (usize, isize) {
    let size = config.cq_data_size;
    // With EFA's own protocols, a card acknowledges a message before the peer's provider has seen it. If the peer's card
    // or endpoint is lost then, so is the message, unless its end waits for the peer's provider.
    let delivered = match queues.device.info.uses_efa_protocols() {
        true => u64::from(sys::FI_DELIVERY_COMPLETE),
        false => 0,
    };
    let flags = flags(run, size) | delivered;
    post_each::<1>(contexts, run, (first, pieces), |piece, context, _| {
        let (start, lkey) = if piece.len == 0 { config.empty_source } else { (piece.local, run.lkey) };
        let iovec = sys::iovec { iov_base: start.cast(), iov_len: piece.len as usize };
        let mut desc = lkey as *mut _;
        let msg = sys::fi_msg {
            msg_iov: &raw const iovec,
            desc: &raw mut desc,
            iov_count: 1,
            addr: destination.address,
            context,
            data: Tag { peer_tag: Some(destination.peer_tag), imm: run.imm }.to_data(size),
        };
        // SAFETY: by the caller; what `msg` points to is copied before this returns.
        unsafe { sys::fi_sendmsg(queues.ep.as_ptr(), &raw const msg, flags) }
    })
}

/// The most writes or reads under one doorbell. Perplexity measured this with 32 cards: posting up to 16 writes
/// before each poll raised the bandwidth from 47.6 to 80.9 % of their line rate.
pub(crate) const MAX_BATCH: usize = 16;

/// Posts one piece after another, each with its own context, until `post` gives an error. Returns the number of posted
/// pieces and that error, or 0.
///
/// Up to `N` pieces share one doorbell: all but the last of them have the flag FI_MORE. If libfabric refuses one of
/// them, none of the pieces of that doorbell counts as posted, and their contexts are free again. In 2.1 this is so: a
/// call with FI_MORE fails only on an endpoint without FI_RMA, that is, at the first piece (`efa_rma_post_write`). If
/// the last call fails, rdma-core takes all pieces of the doorbell back (`efa_send_wr_complete`).
///
/// The caller guarantees a free context for each piece.
#[inline]
fn post_each<const N: usize>(
    contexts: &mut Contexts,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
    mut post: impl FnMut(&Piece, *mut c_void, u64) -> isize,
) -> (usize, isize) {
    let no_context = -(sys::FI_EAGAIN as isize);
    let mut reservation = contexts.reserve(run.id + first as u64, run.peer);
    let mut posted = 0;
    for batch in pieces.chunks(N) {
        let Some((last, others)) = batch.split_last() else { break };
        for piece in others {
            let code = reservation
                .take()
                .map_or(no_context, |context| post(piece, context, u64::from(sys::FI_MORE)));
            if code != 0 {
                return (posted, code);
            }
        }
        let code = reservation.take().map_or(no_context, |context| post(last, context, 0));
        if code != 0 {
            return (posted, code);
        }
        reservation.commit();
        posted += batch.len();
    }
    (posted, 0)
}
