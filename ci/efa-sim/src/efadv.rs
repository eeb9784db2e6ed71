//! The declarations of libefa's header (rdma-core 56, `efadv.h`). Older programs know fewer of them.

use std::ffi::c_int;

use rdma_sys::{ibv_cq_ex, ibv_gid};

pub(crate) const DRIVER_TYPE_SRD: u32 = 0;
pub(crate) const QP_UNSOLICITED_WRITE_RECV: u16 = 1;
pub(crate) const CAPS_RDMA_READ: u32 = 1;
pub(crate) const CAPS_RNR_RETRY: u32 = 1 << 1;
pub(crate) const CAPS_CQ_WITH_SGID: u32 = 1 << 2;
pub(crate) const CAPS_RDMA_WRITE: u32 = 1 << 3;
pub(crate) const CAPS_UNSOLICITED_WRITE_RECV: u32 = 1 << 4;

#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) comp_mask: u64,
    pub(crate) driver_qp_type: u32,
    pub(crate) flags: u16,
    pub(crate) sl: u8,
    pub(crate) reserved: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceAttr {
    pub(crate) comp_mask: u64,
    pub(crate) max_sq_wr: u32,
    pub(crate) max_rq_wr: u32,
    pub(crate) max_sq_sge: u16,
    pub(crate) max_rq_sge: u16,
    pub(crate) inline_buf_size: u16,
    pub(crate) reserved: [u8; 2],
    pub(crate) device_caps: u32,
    pub(crate) max_rdma_size: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AhAttr {
    pub(crate) comp_mask: u64,
    pub(crate) ahn: u16,
    pub(crate) reserved: [u8; 6],
}

/// The calls of libefa on a completion queue.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) comp_mask: u64,
    pub(crate) wc_read_sgid: unsafe extern "C" fn(*mut Cq, *mut ibv_gid) -> c_int,
    pub(crate) wc_is_unsolicited: unsafe extern "C" fn(*mut Cq) -> bool,
}

/// A completion queue, from which libefa gets the calls.
pub(crate) type CqEx = ibv_cq_ex;
