//! What the statuses of an EFA card's completions mean.

use std::ffi::c_int;

use libfabric_sys as sys;

/// The libfabric error for what a card said of a completion, as `fi_cq_err_entry.prov_errno` gives
/// it (`efa_errno.h`, `EFA_IO_COMP_STATUSES`). libfabric's own choice differs between versions:
/// 1.17 says FI_EIO of all. Other numbers are the provider's own, and keep its error.
pub(crate) fn error(status: c_int, otherwise: c_int) -> c_int {
    let error = match status {
        // Flushed, internal error of the queue pair: it does not work any more. Nobody here cancels.
        1 | 2 => sys::FI_ENODEV,
        // Unsupported operation; local key; remote gave nonsense: between this program and the card.
        3 | 5 | 12 => sys::FI_EIO,
        6 | 11 => sys::FI_EMSGSIZE,
        7 => sys::FI_EKEYREJECTED,
        // Reset by the peer.
        8 => sys::FI_ECONNRESET,
        // No such address, no such queue pair there, no receives there, no answer any more, nobody
        // there who knows us, never an answer. From 1.21 on the provider tells 13 by numbers of its own
        // (`FI_EFA_ERR_*_RECV_UNRESP`): of a peer that had answered its handshake, and of one that had not.
        4 | 9 | 10 | 13 | 14 | 15 | 4124 | 4126 => sys::FI_EHOSTUNREACH,
        _ => return otherwise,
    };
    error as c_int
}

#[cfg(test)]
mod tests {
    use multirail_spi::ErrorKind;

    use super::*;
    use crate::status::kind;

    #[test]
    fn statuses_have_their_kinds() {
        let of = |status| kind(error(status, sys::FI_EIO as c_int));
        assert_eq!([1, 2].map(of), [ErrorKind::DeviceLost; 2]);
        assert_eq!([3, 5, 12, 4096].map(of), [ErrorKind::Io; 4]);
        assert_eq!([6, 11].map(of), [ErrorKind::TooLarge; 2]);
        assert_eq!(of(7), ErrorKind::RemoteAccess);
        assert_eq!([4, 8, 9, 10, 13, 14, 15, 4124, 4126].map(of), [ErrorKind::PeerDied; 9]);
    }
}
