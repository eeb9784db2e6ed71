//! One request as libfabric takes it.

use std::ffi::c_void;

use libfabric_sys as sys;
use transport_core::spi::{WorkKind, WorkRequest};

use crate::peers::Remote;
use crate::queues::Queues;
use crate::tag::Tag;

/// Hands one request to libfabric.
///
/// # Safety
/// As `Endpoint::post`; `context` is not posted.
pub(crate) unsafe fn submit(
    queues: &Queues,
    request: &WorkRequest,
    remote: &Remote,
    data: usize,
    context: *mut c_void,
) -> isize {
    let iovec = sys::iovec { iov_base: request.local.cast(), iov_len: request.len as usize };
    let mut desc = request.lkey as *mut c_void;
    let tag = Tag { slot: Some(remote.slot), imm: request.imm };
    let mut flags = u64::from(sys::FI_COMPLETION);
    if request.imm.is_some() || (request.kind == WorkKind::Send && data >= 8) {
        flags |= u64::from(sys::FI_REMOTE_CQ_DATA);
    }
    let ep = queues.ep.as_ptr();
    if request.kind == WorkKind::Send {
        let msg = sys::fi_msg {
            msg_iov: &raw const iovec,
            desc: &raw mut desc,
            iov_count: 1,
            addr: remote.address,
            context,
            data: tag.to_data(data),
        };
        // SAFETY: by the caller; what `msg` points to is copied before this returns.
        return unsafe { sys::fi_sendmsg(ep, &raw const msg, flags) };
    }
    let (addr, key) = match request.len {
        // Nothing is to be delivered; and shm of 1.17 never completes such a write of no bytes.
        0 => (remote.landing.base, remote.landing.key),
        _ => {
            if request.kind == WorkKind::Write {
                flags |= u64::from(sys::FI_DELIVERY_COMPLETE);
            }
            (request.remote, request.rkey)
        }
    };
    let there = sys::fi_rma_iov { addr, len: request.len as usize, key };
    let msg = sys::fi_msg_rma {
        msg_iov: &raw const iovec,
        desc: &raw mut desc,
        iov_count: 1,
        addr: remote.address,
        rma_iov: &raw const there,
        rma_iov_count: 1,
        context,
        data: tag.to_data(data),
    };
    // SAFETY: as above.
    unsafe {
        match request.kind {
            WorkKind::Read => sys::fi_readmsg(ep, &raw const msg, flags),
            _ => sys::fi_writemsg(ep, &raw const msg, flags),
        }
    }
}
