//! Memory of GPUs, as libfabric is told of it (FI_HMEM of fi_getinfo(3), `iface` and FI_MR_DMABUF of fi_mr(3)).
//!
//! Only cards are asked for it. They are given a DMA-BUF where the GPU and libfabric have them, else the GPU's
//! address, for which a module of the kernel has to tell cards of it.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use libfabric_sys as sys;
use multirail_spi::{DmaBuf, Error, ErrorKind, Memory, MemoryKind, Result};

/// The first library whose provider moves GPU memory without its own calls of CUDA: those may deadlock with the
/// user's streams (`FI_OPT_CUDA_API_PERMITTED`), and before it emulates writes, by copies.
const SINCE: u32 = sys::version(1, 18);
/// The first one that takes DMA-BUFs.
const DMA_BUFS_SINCE: u32 = sys::version(1, 20);

/// Whether a library of that version is worth asking.
pub(crate) fn may_be(version: u32) -> bool {
    version >= SINCE
}

/// Where the memory of a registration is.
pub(crate) struct Place {
    iovec: sys::iovec,
    /// The GPU, as CUDA counts.
    gpu: Option<u32>,
    buffer: Option<(sys::fi_mr_dmabuf, DmaBuf)>,
}

impl Place {
    /// Of `memory`, for a library of that `version`, whose device offers GPU memory or not.
    ///
    /// # Errors
    /// `Unsupported` for memory that it does not take; those of `Memory::dma_buf`.
    pub(crate) fn of(memory: &dyn Memory, version: u32, has_gpus: bool) -> Result<Self> {
        let refused = |why: &str| Err(Error::new(ErrorKind::Unsupported, "register", why));
        let (start, len) = (memory.as_ptr(), memory.len());
        let iovec = sys::iovec { iov_base: start.cast(), iov_len: len };
        let gpu = match memory.kind() {
            MemoryKind::Host => return Ok(Self { iovec, gpu: None, buffer: None }),
            MemoryKind::Cuda { device } => device,
            _ => return refused("efa takes memory of the host and of NVIDIA's GPUs"),
        };
        if !has_gpus {
            return refused(
                "this libfabric offers no GPU memory here (FI_HMEM), or cards that do not reach it (a warning says \
                 so): take that of AWS's EFA installer, 1.18 or later, where it finds CUDA, with efa_nv_peermem or \
                 DMA-BUFs in the kernel; or register host memory",
            );
        }
        let buffer = if version >= DMA_BUFS_SINCE { memory.dma_buf()? } else { None };
        let buffer = buffer.map(|buffer| {
            let base_addr = start.wrapping_sub(buffer.offset as usize).cast();
            let fd = buffer.file.as_raw_fd();
            (sys::fi_mr_dmabuf { fd, offset: buffer.offset, len, base_addr }, buffer)
        });
        Ok(Self { iovec, gpu: Some(gpu), buffer })
    }

    /// Fills it in; what it points at lives as long as `self`. The flags that go with it.
    pub(crate) fn tell(&self, attr: &mut sys::fi_mr_attr_1_20) -> u64 {
        let known = &mut attr.known;
        (known.mr_iov, known.iov_count) = (&raw const self.iovec, 1);
        if let Some(gpu) = self.gpu {
            known.iface = sys::FI_HMEM_CUDA;
            known.device.cuda = gpu as c_int;
        }
        match &self.buffer {
            None => 0,
            Some((dmabuf, _)) => {
                known.mr_iov = std::ptr::from_ref(dmabuf).cast();
                sys::FI_MR_DMABUF
            }
        }
    }

    /// In words, for errors.
    pub(crate) fn words(&self) -> String {
        let bytes = self.iovec.iov_len;
        match (self.gpu, &self.buffer) {
            (None, _) => format!("to register {bytes} bytes"),
            (Some(gpu), Some(_)) => format!("to register {bytes} bytes of GPU {gpu} by their DMA-BUF"),
            (Some(gpu), None) => format!("to register {bytes} bytes of GPU {gpu} by their address"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that says of itself what the test wants.
    struct Said(MemoryKind, Option<u64>);

    // SAFETY: nobody follows the address.
    unsafe impl Memory for Said {
        fn as_ptr(&self) -> *mut u8 {
            std::ptr::without_provenance_mut(0x7000_1400)
        }

        fn len(&self) -> usize {
            0x800
        }

        fn kind(&self) -> MemoryKind {
            self.0
        }

        fn dma_buf(&self) -> Result<Option<DmaBuf>> {
            let file = || std::fs::File::open("/dev/null").unwrap().into();
            Ok(self.1.map(|offset| DmaBuf { file: file(), offset }))
        }
    }

    fn told(place: &Place) -> (sys::fi_mr_attr_1_20, u64) {
        // SAFETY: plain numbers and null pointers.
        let mut attr = unsafe { std::mem::zeroed() };
        let flags = place.tell(&mut attr);
        (attr, flags)
    }

    #[test]
    fn the_hosts_is_an_address() {
        let place = Place::of(&Said(MemoryKind::Host, None), sys::version(2, 1), false).unwrap();
        let (attr, flags) = told(&place);
        assert_eq!((flags, attr.known.iface, attr.known.iov_count), (0, sys::FI_HMEM_SYSTEM, 1));
        // SAFETY: the place lives.
        let iovec = unsafe { *attr.known.mr_iov };
        assert_eq!((iovec.iov_base as usize, iovec.iov_len), (0x7000_1400, 0x800));
    }

    #[test]
    fn a_gpus_is_a_dma_buf_where_there_is_one() {
        let memory = Said(MemoryKind::Cuda { device: 3 }, Some(0x400));
        let place = Place::of(&memory, sys::version(1, 20), true).unwrap();
        let (attr, flags) = told(&place);
        assert_eq!((flags, attr.known.iface), (sys::FI_MR_DMABUF, sys::FI_HMEM_CUDA));
        // SAFETY: as the flag says; the place lives.
        let (buffer, gpu) =
            unsafe { (*attr.known.mr_iov.cast::<sys::fi_mr_dmabuf>(), attr.known.device.cuda) };
        assert_eq!((buffer.offset, buffer.len, gpu), (0x400, 0x800, 3));
        assert_eq!(buffer.base_addr as usize, 0x7000_1000, "the first byte of the DMA-BUF");
        for (version, offset) in [(sys::version(1, 18), Some(0)), (sys::version(2, 1), None)] {
            let place = Place::of(&Said(memory.0, offset), version, true).unwrap();
            assert_eq!(told(&place).1, 0, "by its address");
        }
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        let of = |kind, has_gpus| Place::of(&Said(kind, None), sys::version(2, 1), has_gpus).err().unwrap();
        let refused = of(MemoryKind::Cuda { device: 0 }, false);
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.context().contains("FI_HMEM"), "{refused}");
        assert_eq!(of(MemoryKind::P2pmem, true).kind(), ErrorKind::Unsupported);
    }
}
