//! Additions of versions after 1.17, from whose headers all other types are generated. A library uses an addition only
//! if the program asked for the interface of that version (`fi_getinfo`).

use core::ffi::{c_int, c_void};

use crate::{fi_addr_t, fi_cq_err_entry, fi_mr_attr};

/// `fi_cq_err_entry` of 1.20 (`rdma/fi_eq.h`): that of 1.17, and a field that 1.20 appended. A library writes all of it
/// if the program asked for the interface of 1.20.
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct fi_cq_err_entry_1_20 {
    /// The fields of 1.17.
    pub known: fi_cq_err_entry,
    /// The sender, if it is not in the address vector.
    pub src_addr: fi_addr_t,
}

/// `fi_mr_attr` of 1.20 (`rdma/fi_domain.h`): that of 1.17, and a field that 1.19 appended.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct fi_mr_attr_1_20 {
    /// The fields of 1.17. With [`FI_MR_DMABUF`], `mr_iov` is the address of a [`fi_mr_dmabuf`].
    pub known: fi_mr_attr,
    /// Null, or data for the memory's interface.
    pub hmem_data: *mut c_void,
}

/// A DMA-BUF to register, of 1.20 and later (`rdma/fi_domain.h`).
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct fi_mr_dmabuf {
    /// The descriptor of the DMA-BUF.
    pub fd: c_int,
    /// The bytes of the DMA-BUF before the memory.
    pub offset: u64,
    /// The bytes of the memory.
    pub len: usize,
    /// The address of the first byte of the DMA-BUF. The memory begins `offset` bytes after it.
    pub base_addr: *mut c_void,
}

/// A registration by a [`fi_mr_dmabuf`], of 1.20 and later (`rdma/fi_domain.h`).
pub const FI_MR_DMABUF: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    /// The offsets that 1.20's header gives on 64-bit machines.
    #[test]
    fn fields_lie_where_c_has_them() {
        use std::mem::{offset_of, size_of};
        assert_eq!(offset_of!(fi_cq_err_entry_1_20, src_addr), 80);
        assert_eq!(size_of::<fi_cq_err_entry_1_20>(), 88);
        assert_eq!(offset_of!(fi_mr_attr_1_20, hmem_data), 80);
        assert_eq!(size_of::<fi_mr_attr_1_20>(), 88);
        assert_eq!(offset_of!(fi_mr_dmabuf, offset), 8);
        assert_eq!(offset_of!(fi_mr_dmabuf, base_addr), 24);
    }
}
