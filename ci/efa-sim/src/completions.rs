//! Completion queues.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rdma_sys as ib;

use crate::device::refuse;
use crate::efadv::{self, CqEx};
use crate::memory::number_of;
use crate::page::{ArrivalRecord, ReceivedKind};
use crate::poll;
use crate::queue_pair::{SimQueuePair, lock};
use crate::request::SendRequest;
use crate::status::CompletionStatus;

/// The completion of a request or a receive.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) status: CompletionStatus,
    pub(crate) opcode: ib::ibv_wc_opcode,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) flags: ib::ibv_wc_flags,
    pub(crate) queue: u32,
    pub(crate) from: [u8; 16],
    pub(crate) from_queue: u32,
    pub(crate) handle: u32,
    pub(crate) is_unsolicited: bool,
}

/// No handle for the sender (rdma-core: an invalid number).
const NO_HANDLE: u32 = 0xffff;

impl Completion {
    const NONE: Self = Self {
        id: 0,
        status: CompletionStatus::Ok,
        opcode: ib::IBV_WC_SEND,
        len: 0,
        imm: 0,
        flags: 0,
        queue: 0,
        from: [0; 16],
        from_queue: 0,
        handle: NO_HANDLE,
        is_unsolicited: false,
    };

    pub(crate) fn of_request(request: &SendRequest, queue: u32, status: CompletionStatus) -> Self {
        let (id, opcode, len) = (request.id, request.opcode(), request.len() as u32);
        Self { id, status, opcode, len, queue, ..Self::NONE }
    }

    pub(crate) fn flushed_receive(id: u64, queue: u32) -> Self {
        Self { id, status: CompletionStatus::Flushed, opcode: ib::IBV_WC_RECV, queue, ..Self::NONE }
    }

    pub(crate) fn of_arrival(arrival: &ArrivalRecord, card: usize, queue: u32) -> Self {
        let is_write = matches!(arrival.kind, ReceivedKind::Write | ReceivedKind::Unsolicited);
        let has_imm = is_write || arrival.kind == ReceivedKind::MessageWithImm;
        Self {
            id: arrival.id,
            status: CompletionStatus::of_code(arrival.status.into()).unwrap_or(CompletionStatus::QpInternal),
            opcode: if is_write { ib::IBV_WC_RECV_RDMA_WITH_IMM } else { ib::IBV_WC_RECV },
            len: arrival.len,
            imm: arrival.imm,
            flags: if has_imm { ib::IBV_WC_WITH_IMM } else { 0 },
            queue,
            from: arrival.from,
            from_queue: arrival.from_queue,
            handle: number_of(card, &arrival.from).map_or(NO_HANDLE, u32::from),
            is_unsolicited: arrival.kind == ReceivedKind::Unsolicited,
        }
    }
}

/// A completion queue.
#[repr(C)]
pub(crate) struct SimCompletionQueue {
    ex: ib::ibv_cq_ex,
    pub(crate) efa: efadv::Cq,
    ready: Mutex<VecDeque<Completion>>,
    pairs: Mutex<Vec<*mut SimQueuePair>>,
    /// True from `start_poll` to `end_poll`, as the lock of rdma-core's queues.
    pub(crate) is_polled: AtomicBool,
    pub(crate) current: UnsafeCell<Completion>,
}

impl SimCompletionQueue {
    pub(crate) fn push(&self, completion: Completion) {
        lock(&self.ready).push_back(completion);
    }

    pub(crate) fn attach(&self, pair: *mut SimQueuePair) {
        let mut pairs = lock(&self.pairs);
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }

    pub(crate) fn detach(&self, pair: *mut SimQueuePair) {
        lock(&self.pairs).retain(|known| *known != pair);
    }

    /// Removes the oldest completion. If there is none, the cards first execute pending requests.
    pub(crate) fn next(&self) -> Option<Completion> {
        if let Some(completion) = lock(&self.ready).pop_front() {
            return Some(completion);
        }
        for pair in &*lock(&self.pairs) {
            // SAFETY: a pair is detached before it is destroyed.
            let pair = unsafe { &**pair };
            pair.progress();
            let number = pair.ex.qp_base.qp_num;
            let is_ours = std::ptr::addr_eq(pair.ex.qp_base.recv_cq, std::ptr::from_ref(self));
            while let Some(arrival) = pair.queue().filter(|_| is_ours).and_then(|queue| queue.pop_arrival()) {
                self.push(Completion::of_arrival(&arrival, pair.card, number));
            }
        }
        lock(&self.ready).pop_front()
    }
}

pub(crate) unsafe extern "C" fn create(
    context: *mut ib::ibv_context,
    attr: *mut ib::ibv_cq_init_attr_ex,
) -> *mut CqEx {
    // SAFETY: verbs passes valid attributes; zero is a value of the other structure.
    let (attr, mut ex): (_, CqEx) = unsafe { (&*attr, zeroed()) };
    // The simulation has no completion channels. libfabric uses none with EFA either.
    if !attr.channel.is_null() {
        return refuse(libc::EOPNOTSUPP);
    }
    (ex.context, ex.cq_context, ex.cqe) = (context, attr.cq_context, attr.cqe as c_int);
    poll::set_calls(&mut ex);
    let completions = SimCompletionQueue {
        ex,
        efa: poll::EFA,
        ready: Mutex::default(),
        pairs: Mutex::default(),
        is_polled: AtomicBool::new(false),
        current: UnsafeCell::new(Completion::NONE),
    };
    Box::into_raw(Box::new(completions)).cast()
}

/// `efadv_create_cq(3)`.
///
/// # Safety
/// An open context, and attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_create_cq(
    context: *mut ib::ibv_context,
    attr: *mut ib::ibv_cq_init_attr_ex,
    _: *mut c_void,
    _: u32,
) -> *mut CqEx {
    // SAFETY: by the caller. Every queue has the features that libefa's attributes can ask for.
    unsafe { create(context, attr) }
}

/// `efadv_cq_from_ibv_cq_ex(3)`.
///
/// # Safety
/// The queue was made by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_cq_from_ibv_cq_ex(ex: *mut CqEx) -> *mut efadv::Cq {
    // SAFETY: by the caller.
    unsafe { &raw mut (*ex.cast::<SimCompletionQueue>()).efa }
}

/// `ibv_destroy_cq(3)`.
///
/// # Safety
/// The queue was made by this library, and no pair uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ib::ibv_cq) -> c_int {
    // SAFETY: by the caller.
    drop(unsafe { Box::from_raw(cq.cast::<SimCompletionQueue>()) });
    0
}
