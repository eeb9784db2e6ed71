//! The calls that libfabric's headers define inline. They go through the tables of an object.

use core::ffi::{c_char, c_int, c_void};

use crate::generated::*;

/// Defines one inline call. It returns `-FI_ENOSYS` if the table lacks the entry, as libfabric's own calls do.
macro_rules! inline_call {
    ($(#[$doc:meta])* fn $name:ident($object:ident: *mut $kind:ty $(, $arg:ident: $type:ty)*) -> $ret:ty
        = [$($table:ident).+] $entry:ident($($pass:expr),*)) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The contract is on the call's page in libfabric's manual: the object is open, and pointers are valid
        /// for as long as that page says.
        #[inline]
        pub unsafe fn $name($object: *mut $kind $(, $arg: $type)*) -> $ret {
            // SAFETY: an open object has a table, which lives as long as the object; the caller upholds the rest.
            unsafe {
                match (*(*$object).$($table).+).$entry {
                    Some(entry) => entry($($pass),*),
                    None => -(FI_ENOSYS as $ret),
                }
            }
        }
    };
}

inline_call!(/// Closes an object.
    fn fi_close(fid: *mut fid) -> c_int = [ops] close(fid));
inline_call!(/// Binds `bfid` to an endpoint.
    fn fi_ep_bind(ep: *mut fid_ep, bfid: *mut fid, flags: u64) -> c_int
        = [fid.ops] bind(&raw mut (*ep).fid, bfid, flags));
inline_call!(/// Binds an event queue to a domain.
    fn fi_domain_bind(domain: *mut fid_domain, bfid: *mut fid, flags: u64) -> c_int
        = [fid.ops] bind(&raw mut (*domain).fid, bfid, flags));
inline_call!(/// Binds a memory region to an endpoint (`FI_MR_ENDPOINT`).
    fn fi_mr_bind(mr: *mut fid_mr, bfid: *mut fid, flags: u64) -> c_int
        = [fid.ops] bind(&raw mut (*mr).fid, bfid, flags));
inline_call!(/// Controls an object: `FI_GETWAIT` and others.
    fn fi_control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int = [ops] control(fid, command, arg));
inline_call!(/// The address of an endpoint.
    fn fi_getname(ep: *mut fid_ep, addr: *mut c_void, len: *mut usize) -> c_int
        = [cm] getname(&raw mut (*ep).fid, addr, len));
inline_call!(/// Names an endpoint.
    fn fi_setname(ep: *mut fid_ep, addr: *mut c_void, len: usize) -> c_int
        = [cm] setname(&raw mut (*ep).fid, addr, len));
inline_call!(/// Sets an option of an endpoint.
    fn fi_setopt(ep: *mut fid_ep, level: c_int, name: c_int, value: *const c_void, len: usize) -> c_int
        = [ops] setopt(&raw mut (*ep).fid, level, name, value, len));
inline_call!(/// Reads an option of an endpoint.
    fn fi_getopt(ep: *mut fid_ep, level: c_int, name: c_int, value: *mut c_void, len: *mut usize) -> c_int
        = [ops] getopt(&raw mut (*ep).fid, level, name, value, len));
inline_call!(/// Cancels what was posted with `context`.
    fn fi_cancel(ep: *mut fid_ep, context: *mut c_void) -> isize = [ops] cancel(&raw mut (*ep).fid, context));

inline_call!(/// Opens a domain.
    fn fi_domain(fabric: *mut fid_fabric, info: *mut fi_info, domain: *mut *mut fid_domain, context: *mut c_void)
        -> c_int = [ops] domain(fabric, info, domain, context));
inline_call!(/// Opens an event queue.
    fn fi_eq_open(fabric: *mut fid_fabric, attr: *mut fi_eq_attr, eq: *mut *mut fid_eq, context: *mut c_void)
        -> c_int = [ops] eq_open(fabric, attr, eq, context));
inline_call!(/// Whether it is safe to wait on the descriptors of `count` objects.
    fn fi_trywait(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int
        = [ops] trywait(fabric, fids, count));

inline_call!(/// Opens an address vector.
    fn fi_av_open(domain: *mut fid_domain, attr: *mut fi_av_attr, av: *mut *mut fid_av, context: *mut c_void)
        -> c_int = [ops] av_open(domain, attr, av, context));
inline_call!(/// Opens a completion queue.
    fn fi_cq_open(domain: *mut fid_domain, attr: *mut fi_cq_attr, cq: *mut *mut fid_cq, context: *mut c_void)
        -> c_int = [ops] cq_open(domain, attr, cq, context));
inline_call!(/// Opens a counter.
    fn fi_cntr_open(domain: *mut fid_domain, attr: *mut fi_cntr_attr, cntr: *mut *mut fid_cntr,
        context: *mut c_void) -> c_int = [ops] cntr_open(domain, attr, cntr, context));
inline_call!(/// Opens an endpoint.
    fn fi_endpoint(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep, context: *mut c_void)
        -> c_int = [ops] endpoint(domain, info, ep, context));
inline_call!(/// Registers memory as `attr` says, which is a [`fi_mr_attr_1_20`](crate::fi_mr_attr_1_20) where GPU
    /// memory (`FI_HMEM`) was asked for from 1.19 on.
    fn fi_mr_regattr(domain: *mut fid_domain, attr: *const fi_mr_attr, flags: u64, mr: *mut *mut fid_mr)
        -> c_int = [mr] regattr(&raw mut (*domain).fid, attr, flags, mr));

inline_call!(/// Inserts `count` addresses; gives how many went in.
    fn fi_av_insert(av: *mut fid_av, addr: *const c_void, count: usize, into: *mut fi_addr_t, flags: u64,
        context: *mut c_void) -> c_int = [ops] insert(av, addr, count, into, flags, context));
inline_call!(/// Removes `count` addresses.
    fn fi_av_remove(av: *mut fid_av, addr: *mut fi_addr_t, count: usize, flags: u64) -> c_int
        = [ops] remove(av, addr, count, flags));

inline_call!(/// Reads completions; gives how many, or `-FI_EAGAIN`, or `-FI_EAVAIL` for an error.
    fn fi_cq_read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize = [ops] read(cq, buf, count));
inline_call!(/// As [`fi_cq_read`], with the addresses of the senders.
    fn fi_cq_readfrom(cq: *mut fid_cq, buf: *mut c_void, count: usize, from: *mut fi_addr_t) -> isize
        = [ops] readfrom(cq, buf, count, from));
inline_call!(/// Reads a completion that is an error.
    fn fi_cq_readerr(cq: *mut fid_cq, buf: *mut fi_cq_err_entry, flags: u64) -> isize
        = [ops] readerr(cq, buf, flags));
inline_call!(/// Reads an event that is an error.
    fn fi_eq_readerr(eq: *mut fid_eq, buf: *mut fi_eq_err_entry, flags: u64) -> isize
        = [ops] readerr(eq, buf, flags));

inline_call!(/// Posts a write.
    fn fi_writemsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize = [rma] writemsg(ep, msg, flags));
inline_call!(/// Posts a read.
    fn fi_readmsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize = [rma] readmsg(ep, msg, flags));
inline_call!(/// Posts a message.
    fn fi_sendmsg(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize = [msg] sendmsg(ep, msg, flags));
inline_call!(/// Posts a receive.
    fn fi_recvmsg(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize = [msg] recvmsg(ep, msg, flags));

/// Reads a counter. Returns 0 if the provider has no counters.
///
/// # Safety
/// The contract is on the call's page in libfabric's manual.
#[inline]
pub unsafe fn fi_cntr_read(cntr: *mut fid_cntr) -> u64 {
    // SAFETY: by the caller.
    unsafe { (*(*cntr).ops).read.map_or(0, |read| read(cntr)) }
}

/// Enables an endpoint.
///
/// # Safety
/// The contract is on the call's page in libfabric's manual.
pub unsafe fn fi_enable(ep: *mut fid_ep) -> c_int {
    // SAFETY: by the caller.
    unsafe { fi_control(&raw mut (*ep).fid, FI_ENABLE as c_int, core::ptr::null_mut()) }
}

/// The provider's text for one of its error numbers, or null if it has none. The text belongs to
/// the provider, or is in `buf`.
///
/// # Safety
/// The contract is on the call's page in libfabric's manual.
pub unsafe fn fi_cq_strerror(
    cq: *mut fid_cq,
    code: c_int,
    data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: by the caller.
    unsafe {
        match (*(*cq).ops).strerror {
            Some(strerror) => strerror(cq, code, data, buf, len),
            None => core::ptr::null(),
        }
    }
}
