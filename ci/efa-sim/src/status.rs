//! The statuses with which a card ends a request. rdma-core maps them to statuses of verbs.

use rdma_sys as ib;

/// Statuses of a completion (`efa_io_defs.h`: `EFA_IO_COMP_STATUS_*`), by their codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CompletionStatus {
    Ok = 0,
    Flushed = 1,
    QpInternal = 2,
    UnsupportedOp = 3,
    InvalidAh = 4,
    InvalidLkey = 5,
    BadLength = 6,
    RemoteBadAddress = 7,
    RemoteAbort = 8,
    RemoteBadQpn = 9,
    RemoteRnr = 10,
    RemoteBadLength = 11,
    RemoteGarbled = 12,
    Unresponsive = 13,
}

impl CompletionStatus {
    const ALL: [Self; 14] = [
        Self::Ok,
        Self::Flushed,
        Self::QpInternal,
        Self::UnsupportedOp,
        Self::InvalidAh,
        Self::InvalidLkey,
        Self::BadLength,
        Self::RemoteBadAddress,
        Self::RemoteAbort,
        Self::RemoteBadQpn,
        Self::RemoteRnr,
        Self::RemoteBadLength,
        Self::RemoteGarbled,
        Self::Unresponsive,
    ];

    /// The status of a code.
    pub(crate) fn of_code(code: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// The status in verbs (rdma-core, `providers/efa/verbs.c`).
    pub(crate) fn verbs(self) -> ib::ibv_wc_status {
        match self {
            Self::Ok => ib::IBV_WC_SUCCESS,
            Self::Flushed => ib::IBV_WC_WR_FLUSH_ERR,
            Self::QpInternal | Self::UnsupportedOp | Self::InvalidAh => ib::IBV_WC_LOC_QP_OP_ERR,
            Self::InvalidLkey => ib::IBV_WC_LOC_PROT_ERR,
            Self::BadLength => ib::IBV_WC_LOC_LEN_ERR,
            Self::RemoteBadAddress => ib::IBV_WC_REM_ACCESS_ERR,
            Self::RemoteAbort => ib::IBV_WC_REM_ABORT_ERR,
            Self::RemoteBadQpn => ib::IBV_WC_REM_INV_RD_REQ_ERR,
            Self::RemoteRnr => ib::IBV_WC_RNR_RETRY_EXC_ERR,
            Self::RemoteBadLength => ib::IBV_WC_REM_INV_REQ_ERR,
            Self::RemoteGarbled => ib::IBV_WC_BAD_RESP_ERR,
            Self::Unresponsive => ib::IBV_WC_RESP_TIMEOUT_ERR,
        }
    }
}
