//! What libibverbs' header defines inline: calls through the table of a device.

use core::ffi::c_int;

use crate::generated::*;

/// One inline call. A table without the entry answers `EOPNOTSUPP`, as the call itself would fail.
macro_rules! inline_call {
    ($(#[$doc:meta])* fn $name:ident($object:ident: *mut $kind:ty $(, $arg:ident: $type:ty)*) = $entry:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As its page in libibverbs' manual: the object is open, and pointers are valid for as long
        /// as that page says.
        #[inline]
        pub unsafe fn $name($object: *mut $kind $(, $arg: $type)*) -> c_int {
            // SAFETY: an open object has its device, whose table lives as long; the rest is the caller's.
            unsafe {
                match (*(*$object).context).ops.$entry {
                    Some(entry) => entry($object $(, $arg)*),
                    None => EOPNOTSUPP,
                }
            }
        }
    };
}

/// Linux' number, which is no part of libibverbs' headers.
const EOPNOTSUPP: c_int = 95;

inline_call!(/// Posts a chain of requests; an errno, and then `bad` is the first that was not taken.
    fn ibv_post_send(qp: *mut ibv_qp, chain: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) = post_send);
inline_call!(/// Posts a chain of receives to a shared queue; likewise.
    fn ibv_post_srq_recv(srq: *mut ibv_srq, chain: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) = post_srq_recv);
inline_call!(/// Reads up to `room` completions: how many, or a negative number.
    fn ibv_poll_cq(cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) = poll_cq);
inline_call!(/// Asks for an event with the next completion.
    fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) = req_notify_cq);
