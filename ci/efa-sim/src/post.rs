//! The calls through which a program posts requests and receives to a queue pair.

use std::ffi::{c_int, c_void};
use std::slice::from_raw_parts;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys as ib;

use crate::device::INLINE;
use crate::memory::AddressHandle;
use crate::page::{PostedReceive, RECEIVE_BUFFERS, ReceiveBuffer};
use crate::queue_pair::{SimQueuePair, lock};
use crate::request::{BUFFERS, RequestBytes, RequestOperation, SendRequest};

/// Fills in the calls that build requests one after another (`ibv_wr_post(3)`).
pub(crate) fn set_calls(ex: &mut ib::ibv_qp_ex) {
    ex.wr_start = Some(start);
    ex.wr_complete = Some(complete);
    ex.wr_abort = Some(abort);
    ex.wr_send = Some(send);
    ex.wr_send_imm = Some(send_imm);
    ex.wr_rdma_write = Some(rdma_write);
    ex.wr_rdma_write_imm = Some(rdma_write_imm);
    ex.wr_rdma_read = Some(rdma_read);
    ex.wr_set_ud_addr = Some(set_ud_addr);
    ex.wr_set_sge = Some(set_sge);
    ex.wr_set_sge_list = Some(set_sge_list);
    ex.wr_set_inline_data = Some(set_inline_data);
    ex.wr_set_inline_data_list = Some(set_inline_data_list);
}

/// The queue pair that contains `ex`.
///
/// # Safety
/// `ex` is part of a pair of this library that is not destroyed.
unsafe fn pair<'a>(ex: *mut ib::ibv_qp_ex) -> &'a SimQueuePair {
    // SAFETY: by the caller.
    unsafe { &*ex.cast() }
}

unsafe extern "C" fn start(ex: *mut ib::ibv_qp_ex) {
    // SAFETY: verbs passes objects of this library.
    lock(&unsafe { pair(ex) }.building).clear();
}

unsafe extern "C" fn complete(ex: *mut ib::ibv_qp_ex) -> c_int {
    // SAFETY: verbs passes objects of this library.
    let pair = unsafe { pair(ex) };
    let requests = std::mem::take(&mut *lock(&pair.building));
    pair.post(requests)
}

unsafe extern "C" fn abort(ex: *mut ib::ibv_qp_ex) {
    // SAFETY: verbs passes objects of this library.
    lock(&unsafe { pair(ex) }.building).clear();
}

/// Begins a request.
///
/// # Safety
/// As [`pair`].
unsafe fn begin(ex: *mut ib::ibv_qp_ex, operation: RequestOperation, imm: Option<u32>) {
    // SAFETY: by the caller.
    let pair = unsafe { pair(ex) };
    let request = SendRequest {
        id: pair.ex.wr_id,
        operation,
        imm,
        is_signaled: pair.signals_all || pair.ex.wr_flags & ib::IBV_SEND_SIGNALED != 0,
        remote: None,
        queue: 0,
        secret: 0,
        from: pair.ex.qp_base.qp_num,
        source: RequestBytes::Inline(0, [0; INLINE]),
        fault: None,
        finds_no_receive: false,
        due: None,
    };
    lock(&pair.building).push(request);
}

/// Changes the request that is being built.
///
/// # Safety
/// As [`pair`].
unsafe fn change(ex: *mut ib::ibv_qp_ex, act: impl FnOnce(&mut SendRequest)) {
    // SAFETY: by the caller.
    if let Some(request) = lock(&unsafe { pair(ex) }.building).last_mut() {
        act(request);
    }
}

unsafe extern "C" fn send(ex: *mut ib::ibv_qp_ex) {
    // SAFETY: verbs passes objects of this library.
    unsafe { begin(ex, RequestOperation::Send, None) };
}

unsafe extern "C" fn send_imm(ex: *mut ib::ibv_qp_ex, imm: u32) {
    // SAFETY: verbs passes objects of this library.
    unsafe { begin(ex, RequestOperation::Send, Some(imm)) };
}

unsafe extern "C" fn rdma_write(ex: *mut ib::ibv_qp_ex, key: u32, addr: u64) {
    // SAFETY: verbs passes objects of this library.
    unsafe { begin(ex, RequestOperation::Write { key, addr }, None) };
}

unsafe extern "C" fn rdma_write_imm(ex: *mut ib::ibv_qp_ex, key: u32, addr: u64, imm: u32) {
    // SAFETY: verbs passes objects of this library.
    unsafe { begin(ex, RequestOperation::Write { key, addr }, Some(imm)) };
}

unsafe extern "C" fn rdma_read(ex: *mut ib::ibv_qp_ex, key: u32, addr: u64) {
    // SAFETY: verbs passes objects of this library.
    unsafe { begin(ex, RequestOperation::Read { key, addr }, None) };
}

unsafe extern "C" fn set_ud_addr(ex: *mut ib::ibv_qp_ex, ah: *mut ib::ibv_ah, queue: u32, secret: u32) {
    // SAFETY: verbs passes a pair and a handle of this library.
    unsafe {
        let remote = (*ah.cast::<AddressHandle>()).remote.clone();
        change(ex, |request| (request.remote, request.queue, request.secret) = (remote, queue, secret));
    }
}

unsafe extern "C" fn set_sge(ex: *mut ib::ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ib::ibv_sge { addr, length, lkey };
    // SAFETY: verbs passes objects of this library.
    unsafe { change(ex, |request| request.source = memory(&[sge])) };
}

unsafe extern "C" fn set_sge_list(ex: *mut ib::ibv_qp_ex, count: usize, list: *const ib::ibv_sge) {
    // SAFETY: verbs passes a list of `count` entries.
    unsafe { change(ex, |request| request.source = memory(slice(list, count))) };
}

unsafe extern "C" fn set_inline_data(ex: *mut ib::ibv_qp_ex, addr: *mut c_void, length: usize) {
    let data = ib::ibv_data_buf { addr, length };
    // SAFETY: verbs passes readable bytes.
    unsafe { change(ex, |request| request.source = inline(&[data])) };
}

unsafe extern "C" fn set_inline_data_list(
    ex: *mut ib::ibv_qp_ex,
    count: usize,
    list: *const ib::ibv_data_buf,
) {
    // SAFETY: verbs passes a list of `count` readable pieces.
    unsafe { change(ex, |request| request.source = inline(slice(list, count))) };
}

/// A slice of `count` items. `list` may be null if it is empty.
///
/// # Safety
/// Otherwise `list` has `count` items.
unsafe fn slice<'a, T>(list: *const T, count: usize) -> &'a [T] {
    // SAFETY: by the caller.
    if count == 0 { &[] } else { unsafe { from_raw_parts(list, count) } }
}

fn memory(list: &[ib::ibv_sge]) -> RequestBytes {
    let mut buffers = [(ReceiveBuffer::default(), 0); BUFFERS];
    for (place, sge) in list.iter().enumerate() {
        let Some(buffer) = buffers.get_mut(place) else { return RequestBytes::TooMuch };
        *buffer = (ReceiveBuffer { addr: sge.addr, len: sge.length.into() }, sge.lkey);
    }
    RequestBytes::Memory(list.len(), buffers)
}

/// # Safety
/// The pieces are readable.
unsafe fn inline(list: &[ib::ibv_data_buf]) -> RequestBytes {
    let (mut len, mut bytes) = (0, [0; INLINE]);
    for piece in list {
        let Some(room) = bytes.get_mut(len..len + piece.length) else { return RequestBytes::TooMuch };
        // SAFETY: by the caller.
        room.copy_from_slice(unsafe { slice(piece.addr.cast(), piece.length) });
        len += piece.length;
    }
    RequestBytes::Inline(len, bytes)
}

/// Whether the program has sent by [`post_send`], as libfabric 1.17 does. It knows rdma-core up to version 44, which
/// reports the end of every request as that of a send.
pub(crate) static IS_OLD_PROVIDER: AtomicBool = AtomicBool::new(false);

/// `ibv_post_send(3)`. If a request of the list is refused, `bad` gets the first such request.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ib::ibv_qp,
    mut wr: *mut ib::ibv_send_wr,
    bad: *mut *mut ib::ibv_send_wr,
) -> c_int {
    IS_OLD_PROVIDER.store(true, Ordering::Relaxed);
    // SAFETY: verbs passes a pair of this library, and a list.
    unsafe {
        let pair = pair(qp.cast());
        while let Some(this) = wr.as_ref() {
            let imm = || Some(this.__bindgen_anon_1.imm_data);
            let (operation, imm) = match this.opcode {
                ib::IBV_WR_SEND => (RequestOperation::Send, None),
                ib::IBV_WR_SEND_WITH_IMM => (RequestOperation::Send, imm()),
                // A request of this kind has no field for the address of a datagram.
                _ => {
                    *bad = wr;
                    return libc::EINVAL;
                }
            };
            let sges = slice(this.sg_list, this.num_sge.max(0) as usize);
            let source = match this.send_flags & ib::IBV_SEND_INLINE != 0 {
                true => {
                    let data = |sge: &ib::ibv_sge| ib::ibv_data_buf {
                        addr: sge.addr as *mut c_void,
                        length: sge.length as usize,
                    };
                    inline(&sges.iter().map(data).collect::<Vec<_>>())
                }
                false => memory(sges),
            };
            let ud = this.wr.ud;
            let request = SendRequest {
                id: this.wr_id,
                operation,
                imm,
                is_signaled: pair.signals_all || this.send_flags & ib::IBV_SEND_SIGNALED != 0,
                remote: (*ud.ah.cast::<AddressHandle>()).remote.clone(),
                queue: ud.remote_qpn,
                secret: ud.remote_qkey,
                from: pair.ex.qp_base.qp_num,
                source,
                fault: None,
                finds_no_receive: false,
                due: None,
            };
            let code = pair.post(vec![request]);
            if code != 0 {
                *bad = wr;
                return code;
            }
            wr = this.next;
        }
    }
    0
}

/// `ibv_post_recv(3)`.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ib::ibv_qp,
    mut wr: *mut ib::ibv_recv_wr,
    bad: *mut *mut ib::ibv_recv_wr,
) -> c_int {
    // SAFETY: verbs passes a pair of this library, and a list.
    unsafe {
        let pair = pair(qp.cast());
        while let Some(this) = wr.as_ref() {
            let mut receive = PostedReceive { id: this.wr_id, ..PostedReceive::default() };
            let sges = slice(this.sg_list, this.num_sge.max(0) as usize);
            for (buffer, sge) in receive.buffers.iter_mut().zip(sges) {
                *buffer = ReceiveBuffer { addr: sge.addr, len: sge.length.into() };
            }
            let is_ours = |sge: &ib::ibv_sge| sge.length == 0 || pair.may_receive(sge);
            let code = match pair.queue() {
                _ if sges.len() > RECEIVE_BUFFERS || !sges.iter().all(is_ours) => libc::EINVAL,
                // As on a real card, which the library does not ask: nothing comes of the receive. (libfabric 2.1 crashes if
                // it is refused.)
                _ if pair.is_dead() => 0,
                Some(queue) if queue.post(receive, pair.receives) => 0,
                _ => libc::ENOMEM,
            };
            if code != 0 {
                *bad = wr;
                return code;
            }
            wr = this.next;
        }
    }
    0
}
