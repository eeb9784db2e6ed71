//! The calls through which a program polls a completion queue.

use std::ffi::c_int;
use std::mem::{offset_of, zeroed};
use std::sync::atomic::Ordering;

use rdma_sys as ib;

use crate::completions::{Completion, SimCompletionQueue};
use crate::efadv::{self, CqEx};

/// The calls of libefa.
pub(crate) const EFA: efadv::Cq =
    efadv::Cq { comp_mask: 0, wc_read_sgid: read_sgid, wc_is_unsolicited: is_unsolicited };

/// Fills in the calls of verbs (`ibv_create_cq_ex(3)`).
pub(crate) fn set_calls(ex: &mut CqEx) {
    ex.start_poll = Some(start_poll);
    ex.next_poll = Some(next_poll);
    ex.end_poll = Some(end_poll);
    ex.read_opcode = Some(read_opcode);
    ex.read_vendor_err = Some(read_vendor_err);
    ex.read_byte_len = Some(read_byte_len);
    ex.read_imm_data = Some(read_imm);
    ex.read_qp_num = Some(read_qp_num);
    ex.read_src_qp = Some(read_src_qp);
    ex.read_wc_flags = Some(read_wc_flags);
    ex.read_slid = Some(read_slid);
    ex.read_sl = Some(read_sl);
    ex.read_dlid_path_bits = Some(read_dlid_path_bits);
}

/// # Safety
/// The queue was made by this library.
unsafe fn queue<'a>(ex: *mut CqEx) -> &'a SimCompletionQueue {
    // SAFETY: by the caller.
    unsafe { &*ex.cast() }
}

/// # Safety
/// As [`queue`], and a poll has started and not ended.
unsafe fn current(ex: *mut CqEx) -> Completion {
    // SAFETY: by the caller; only the polling thread writes it.
    unsafe { *queue(ex).current.get() }
}

/// Makes the next completion the current one. Returns ENOENT if there is none.
///
/// # Safety
/// As [`current`].
unsafe fn advance(ex: *mut CqEx) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        let Some(completion) = queue(ex).next() else { return libc::ENOENT };
        (*ex).wr_id = completion.id;
        (*ex).status = completion.status.verbs();
        *queue(ex).current.get() = completion;
    }
    0
}

unsafe extern "C" fn start_poll(ex: *mut CqEx, attr: *mut ib::ibv_poll_cq_attr) -> c_int {
    // SAFETY: verbs passes objects of this library.
    unsafe {
        if (*attr).comp_mask != 0 {
            return libc::EINVAL;
        }
        while queue(ex).is_polled.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        let code = advance(ex);
        if code != 0 {
            end_poll(ex);
        }
        code
    }
}

unsafe extern "C" fn next_poll(ex: *mut CqEx) -> c_int {
    // SAFETY: verbs passes objects of this library.
    unsafe { advance(ex) }
}

unsafe extern "C" fn end_poll(ex: *mut CqEx) {
    // SAFETY: verbs passes objects of this library.
    unsafe { queue(ex) }.is_polled.store(false, Ordering::Release);
}

/// Defines a call that returns a field of the current completion.
macro_rules! field {
    ($name:ident, $type:ty, $of:expr) => {
        unsafe extern "C" fn $name(ex: *mut CqEx) -> $type {
            let of: fn(Completion) -> $type = $of;
            // SAFETY: verbs passes objects of this library.
            of(unsafe { current(ex) })
        }
    };
}
field!(read_opcode, ib::ibv_wc_opcode, |completion| completion.opcode);
field!(read_vendor_err, u32, |completion| completion.status as u32);
field!(read_byte_len, u32, |completion| completion.len);
field!(read_imm, u32, |completion| completion.imm);
field!(read_qp_num, u32, |completion| completion.queue);
field!(read_src_qp, u32, |completion| completion.from_queue);
field!(read_wc_flags, ib::ibv_wc_flags, |completion| completion.flags);
field!(read_slid, u32, |completion| completion.handle);
field!(read_sl, u8, |_| 0);
field!(read_dlid_path_bits, u8, |_| 0);

unsafe extern "C" fn read_sgid(efa: *mut efadv::Cq, gid: *mut ib::ibv_gid) -> c_int {
    // SAFETY: libefa passes the `efa` part of a queue.
    unsafe {
        (*gid).raw = current(efa.byte_sub(offset_of!(SimCompletionQueue, efa)).cast()).from;
    }
    0
}

unsafe extern "C" fn is_unsolicited(efa: *mut efadv::Cq) -> bool {
    // SAFETY: libefa passes the `efa` part of a queue.
    unsafe { current(efa.byte_sub(offset_of!(SimCompletionQueue, efa)).cast()).is_unsolicited }
}

/// `ibv_poll_cq(3)`.
pub(crate) unsafe extern "C" fn poll(cq: *mut ib::ibv_cq, most: c_int, wc: *mut ib::ibv_wc) -> c_int {
    // SAFETY: verbs passes a queue of this library, and memory for `most` completions.
    unsafe {
        for place in 0..most {
            let Some(completion) = (*cq.cast::<SimCompletionQueue>()).next() else { return place };
            let wc = &mut *wc.add(place as usize);
            *wc = zeroed();
            (wc.wr_id, wc.status, wc.opcode) = (completion.id, completion.status.verbs(), completion.opcode);
            (wc.vendor_err, wc.byte_len) = (completion.status as u32, completion.len);
            (wc.qp_num, wc.src_qp) = (completion.queue, completion.from_queue);
            wc.__bindgen_anon_1.imm_data = completion.imm;
            (wc.wc_flags, wc.slid) = (completion.flags, completion.handle as u16);
        }
    }
    most
}

pub(crate) unsafe extern "C" fn notify(_: *mut ib::ibv_cq, _: c_int) -> c_int {
    libc::EOPNOTSUPP
}
