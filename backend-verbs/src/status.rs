//! Converts errnos and completion statuses of libibverbs to errors and statuses of the engine.

use std::ffi::CStr;

use multirail_spi::{Error, ErrorKind, Status};
use rdma_sys as ib;

use crate::objects::library;

/// The errno of a request that the card does not support.
pub(crate) const EINVAL: i32 = 22;

/// Statuses of this backend. Those of libibverbs are not negative.
pub(crate) const NO_STORE: i32 = -1;
pub(crate) const STORE_FAILED: i32 = -2;
pub(crate) const NOT_REGISTERED: i32 = -3;

/// Converts the status of a failed completion. Only its `wr_id`, `status`, `qp_num` and
/// `vendor_err` are valid (ibv_poll_cq(3)).
pub(crate) fn of_completion(status: ib::ibv_wc_status, is_software: bool) -> Status {
    let kind = match status {
        ib::IBV_WC_REM_ACCESS_ERR | ib::IBV_WC_REM_INV_REQ_ERR => ErrorKind::RemoteAccess,
        ib::IBV_WC_LOC_PROT_ERR => ErrorKind::LocalAccess,
        ib::IBV_WC_LOC_LEN_ERR => ErrorKind::TooLarge,
        // The peer does not answer over this path, or not any more.
        ib::IBV_WC_RETRY_EXC_ERR | ib::IBV_WC_RNR_RETRY_EXC_ERR | ib::IBV_WC_RESP_TIMEOUT_ERR => {
            ErrorKind::Unreachable
        }
        // Soft-RoCE has no route to the peer (`rxe_requester`, `prepare4`): the interface is down, or its address is
        // gone. A card reports a wrong request this way.
        ib::IBV_WC_LOC_QP_OP_ERR if is_software => ErrorKind::Unreachable,
        // The request was behind a failed one. It was not executed, or that is unknown.
        ib::IBV_WC_WR_FLUSH_ERR | ib::IBV_WC_REM_ABORT_ERR => ErrorKind::Unreachable,
        ib::IBV_WC_FATAL_ERR => ErrorKind::DeviceLost,
        _ => ErrorKind::Io,
    };
    Status { kind, code: status as i32 }
}

/// The text of a status: of this backend, or of libibverbs for a completion.
pub(crate) fn error_text(code: i32) -> String {
    match code {
        NO_STORE => {
            "the processor cannot follow the address of the receive's memory, and its owner copies nothing in: \
             implement Memory::store, or receive into host memory"
        }
        STORE_FAILED => "the owner of the receive's memory did not copy the message into it (Memory::store)",
        NOT_REGISTERED => "the region of the receive is not registered any more: it was revoked",
        code => return completion(code),
    }
    .to_owned()
}

fn completion(code: i32) -> String {
    let words = library().ok().map(|library| {
        // SAFETY: the call takes any number and returns a string that lives as long as the library.
        unsafe { library.wc_status_str(code as ib::ibv_wc_status) }
    });
    match words.filter(|words| !words.is_null()) {
        None => format!("status {code}"),
        Some(words) => {
            // SAFETY: as above.
            let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
            format!("completion status {code}, {words}")
        }
    }
}

/// The error of a call that returned `errno`. `what` names the object or the purpose of the call.
pub(crate) fn os_error(operation: &'static str, what: &str, errno: i32) -> Error {
    let why = std::io::Error::from_raw_os_error(errno);
    let (kind, advice) = match errno {
        // ENOMEM, ENOSPC
        12 | 28 => {
            (ErrorKind::Exhausted, "; the card has no more of them, or RLIMIT_MEMLOCK is too low (ulimit -l)")
        }
        // EAGAIN
        11 => (ErrorKind::Exhausted, "; the control group of the process allows no more (rdma.max)"),
        // EPERM, EACCES
        1 | 13 => (ErrorKind::Permission, "; give the process /dev/infiniband"),
        // ENOSYS, EOPNOTSUPP
        38 | 95 => (ErrorKind::Unsupported, ""),
        _ => (ErrorKind::Io, ""),
    };
    Error::new(kind, operation, format!("libibverbs refuses {what}: {why}{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_their_kinds() {
        let of = |status| of_completion(status, false).kind;
        assert_eq!(of(ib::IBV_WC_REM_ACCESS_ERR), ErrorKind::RemoteAccess);
        assert_eq!(of(ib::IBV_WC_RETRY_EXC_ERR), ErrorKind::Unreachable);
        assert_eq!(of(ib::IBV_WC_WR_FLUSH_ERR), ErrorKind::Unreachable);
        assert_eq!(of(ib::IBV_WC_GENERAL_ERR), ErrorKind::Io);
        assert_eq!(of(ib::IBV_WC_LOC_QP_OP_ERR), ErrorKind::Io);
        assert_eq!(of_completion(ib::IBV_WC_LOC_QP_OP_ERR, true).kind, ErrorKind::Unreachable);
    }

    #[test]
    fn a_receive_that_is_refused_says_what_to_do() {
        assert!(error_text(NO_STORE).contains("Memory::store, or receive into host memory"));
    }

    #[test]
    fn errnos_say_what_to_do() {
        assert!(os_error("open", "a queue pair", 12).to_string().contains("ulimit -l"));
        assert!(os_error("open", "a queue pair", 11).to_string().contains("rdma.max"));
        assert_eq!(os_error("open", "a device", 13).kind(), ErrorKind::Permission);
    }
}
