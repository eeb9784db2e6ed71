//! Queue pairs: their creation, change and destruction.

use std::ffi::c_int;
use std::mem::zeroed;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_sys as ib;

use crate::completions::SimCompletionQueue;
use crate::device::{card_of, refuse};
use crate::efadv::{DRIVER_TYPE_SRD, QP_UNSOLICITED_WRITE_RECV, QpInitAttr};
use crate::host::SimHost;
use crate::page::{QUEUES, RECEIVES, ReceiveQueue};
use crate::post;
use crate::request::SendRequest;
use crate::work::ActiveRequests;

/// The number of calls that later versions of verbs append to `ibv_qp_ex`. All of them are null.
const LATER: usize = 8;

/// A queue pair.
#[repr(C)]
pub(crate) struct SimQueuePair {
    pub(crate) ex: ib::ibv_qp_ex,
    later: [usize; LATER],
    pub(crate) card: usize,
    pub(crate) slot: usize,
    /// The most requests that may be posted, and the most receives.
    pub(crate) depth: u32,
    pub(crate) receives: u32,
    /// True if every request has a completion, whether it asks for one or not.
    pub(crate) signals_all: bool,
    pub(crate) active: Mutex<ActiveRequests>,
    /// Requests between `wr_start` and `wr_complete`.
    pub(crate) building: Mutex<Vec<SendRequest>>,
}

/// Locks a mutex. No holder panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a queue pair.
///
/// # Safety
/// `context` is open, and `attr` has the fields of this version.
unsafe fn create(
    context: *mut ib::ibv_context,
    attr: *mut ib::ibv_qp_init_attr_ex,
    is_unsolicited: bool,
) -> *mut ib::ibv_qp {
    // A place gets a new number at each use, so that an old number never fits the present pair.
    static GENERATION: AtomicU32 = AtomicU32::new(0);
    let Some(host) = SimHost::get() else { return refuse(libc::ENODEV) };
    // SAFETY: by the caller.
    let (attr, card) = unsafe { (&*attr, card_of(context)) };
    if host.card(card).is_dead.load(Ordering::Relaxed) != 0 {
        return refuse(libc::EIO);
    }
    let cap = attr.cap;
    if cap.max_recv_wr > 4 * RECEIVES as u32 || attr.send_cq.is_null() || attr.recv_cq.is_null() {
        return refuse(libc::EINVAL);
    }
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed) % 2047 + 1;
    let taken = |(slot, queue): (usize, &ReceiveQueue)| {
        // A number has 16 bits (`efa_ep_addr`).
        let number = generation * QUEUES as u32 + slot as u32;
        let taken = queue.number.compare_exchange(0, u32::MAX, Ordering::AcqRel, Ordering::Acquire);
        taken.is_ok().then_some((slot, number))
    };
    let Some((slot, number)) = host.card(card).queues.iter().enumerate().find_map(taken) else {
        return refuse(libc::ENOMEM);
    };
    let queue = &host.card(card).queues[slot];
    queue.open();
    queue.is_unsolicited.store(is_unsolicited.into(), Ordering::Release);
    // SAFETY: zero is a value of the structure.
    let mut ex: ib::ibv_qp_ex = unsafe { zeroed() };
    let base = &mut ex.qp_base;
    (base.context, base.qp_context, base.pd) = (context, attr.qp_context, attr.pd);
    (base.send_cq, base.recv_cq) = (attr.send_cq, attr.recv_cq);
    (base.handle, base.qp_num, base.qp_type) = (number, number, attr.qp_type);
    post::set_calls(&mut ex);
    let seed = host.config.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(number);
    let pair = Box::into_raw(Box::new(SimQueuePair {
        ex,
        later: [0; LATER],
        card,
        slot,
        depth: cap.max_send_wr.max(1),
        receives: cap.max_recv_wr.min(RECEIVES as u32),
        signals_all: attr.sq_sig_all != 0,
        active: Mutex::new(ActiveRequests::new(seed)),
        building: Mutex::default(),
    }));
    // SAFETY: both completion queues were made by this library, and the pair lives until it is destroyed.
    unsafe {
        (*attr.recv_cq.cast::<SimCompletionQueue>()).attach(pair);
        (*attr.send_cq.cast::<SimCompletionQueue>()).attach(pair);
    }
    pair.cast()
}

/// `efadv_create_qp_ex(3)`.
///
/// # Safety
/// As [`create`]; `efa` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_create_qp_ex(
    context: *mut ib::ibv_context,
    attr: *mut ib::ibv_qp_init_attr_ex,
    efa: *mut QpInitAttr,
    len: u32,
) -> *mut ib::ibv_qp {
    if (len as usize) < size_of::<QpInitAttr>() {
        return refuse(libc::EINVAL);
    }
    // SAFETY: by the caller.
    unsafe {
        if (*efa).comp_mask != 0 || (*efa).driver_qp_type != DRIVER_TYPE_SRD {
            return refuse(libc::EOPNOTSUPP);
        }
        let is_unsolicited = (*efa).flags & QP_UNSOLICITED_WRITE_RECV != 0;
        if is_unsolicited && SimHost::get().is_none_or(|host| !host.config.write || !host.config.unsolicited)
        {
            return refuse(libc::EOPNOTSUPP);
        }
        create(context, attr, is_unsolicited)
    }
}

pub(crate) unsafe extern "C" fn create_datagram(
    context: *mut ib::ibv_context,
    attr: *mut ib::ibv_qp_init_attr_ex,
) -> *mut ib::ibv_qp {
    // SAFETY: verbs passes objects of this library.
    unsafe { create(context, attr, false) }
}

/// `ibv_modify_qp(3)`. Remote cards find the pair once it is ready to receive.
///
/// # Safety
/// `qp` was made by this library, and `attr` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ib::ibv_qp,
    attr: *mut ib::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: by the caller.
    let (pair, attr) = unsafe { (&mut *qp.cast::<SimQueuePair>(), &*attr) };
    let Some(queue) = pair.queue() else { return libc::ENODEV };
    if mask as u32 & ib::IBV_QP_QKEY != 0 {
        queue.secret.store(attr.qkey, Ordering::Release);
    }
    if mask as u32 & ib::IBV_QP_STATE != 0 {
        pair.ex.qp_base.state = attr.qp_state;
        if attr.qp_state == ib::IBV_QPS_RTR {
            queue.number.store(pair.ex.qp_base.qp_num, Ordering::Release);
        }
    }
    0
}

/// `ibv_destroy_qp(3)`.
///
/// # Safety
/// `qp` was made by this library, and no code uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ib::ibv_qp) -> c_int {
    let pair = qp.cast::<SimQueuePair>();
    // SAFETY: by the caller.
    unsafe {
        (*pair).send_queue().detach(pair);
        (*pair).recv_queue().detach(pair);
        if let Some(queue) = (*pair).queue() {
            queue.close();
        }
        drop(Box::from_raw(pair));
    }
    0
}

/// `ibv_qp_to_qp_ex(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_qp_to_qp_ex(qp: *mut ib::ibv_qp) -> *mut ib::ibv_qp_ex {
    qp.cast()
}

/// `ibv_query_qp_data_in_order(3)`: the card promises no order.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(_: *mut ib::ibv_qp, _: ib::ibv_wr_opcode, _: u32) -> c_int {
    0
}
