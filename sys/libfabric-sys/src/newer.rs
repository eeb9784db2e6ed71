//! What came after 1.17, whose headers the rest is of. A library looks at it if it was asked for that version's
//! interface (`fi_getinfo`).

use core::ffi::{c_int, c_void};

use crate::{fi_addr_t, fi_cq_err_entry, fi_mr_attr};

/// `fi_cq_err_entry` of 1.20 (`rdma/fi_eq.h`): 1.17's, and a field that 1.20 appended. A library that was asked for
/// 1.20's interface writes all of it.
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct fi_cq_err_entry_1_20 {
    /// 1.17's fields.
    pub known: fi_cq_err_entry,
    /// Who sent it, where nobody of the address vector's did.
    pub src_addr: fi_addr_t,
}

/// `fi_mr_attr` of 1.20 (`rdma/fi_domain.h`): 1.17's, and a field that 1.19 appended.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct fi_mr_attr_1_20 {
    /// 1.17's fields. In the place of `mr_iov` it has the address of a [`fi_mr_dmabuf`] with [`FI_MR_DMABUF`].
    pub known: fi_mr_attr,
    /// Null, or what the interface has to be told.
    pub hmem_data: *mut c_void,
}

/// A DMA-BUF to register, of 1.20 and later (`rdma/fi_domain.h`).
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct fi_mr_dmabuf {
    /// Its descriptor.
    pub fd: c_int,
    /// Bytes of it before the memory.
    pub offset: u64,
    /// Bytes of the memory.
    pub len: usize,
    /// The address of the DMA-BUF's first byte: the memory begins `offset` bytes after.
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
