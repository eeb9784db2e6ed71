//! Registering GPU memory with libfabric (FI_HMEM of fi_getinfo(3), `iface` and FI_MR_DMABUF of fi_mr(3)).
//!
//! Only cards support it. The backend registers GPU memory by its DMA-BUF, if the GPU and libfabric support that.
//! Otherwise it registers the GPU's address, for which a module of the kernel has to resolve GPU addresses.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use libfabric_sys as sys;
use multirail_spi::{DmaBuf, Error, ErrorKind, Memory, MemoryKind, Result};

/// The first version whose provider moves GPU memory without calls to CUDA, which may deadlock with the user's streams
/// (`FI_OPT_CUDA_API_PERMITTED`). Earlier versions also emulate writes by copies.
const GPU_MEMORY_SINCE: u32 = sys::version(1, 18);
/// The first version that takes DMA-BUFs.
const DMA_BUFS_SINCE: u32 = sys::version(1, 20);

/// Whether libfabric of this version is asked for devices that register GPU memory.
pub(crate) fn supports_gpu_memory(version: u32) -> bool {
    version >= GPU_MEMORY_SINCE
}

/// The memory of a registration, as libfabric wants it described.
pub(crate) struct MemoryLocation {
    iovec: sys::iovec,
    /// The GPU's ordinal in CUDA; `None` for host memory.
    gpu: Option<u32>,
    dma_buf: Option<(sys::fi_mr_dmabuf, DmaBuf)>,
}

impl MemoryLocation {
    /// The location of `memory`, for libfabric of this `version`. `takes_gpu_memory` says whether the device registers
    /// GPU memory.
    ///
    /// # Errors
    /// `Unsupported` if the device cannot register this memory, and the errors of `Memory::dma_buf`.
    pub(crate) fn new(memory: &dyn Memory, version: u32, takes_gpu_memory: bool) -> Result<Self> {
        let refused = |why: &str| Err(Error::new(ErrorKind::Unsupported, "register", why));
        let (start, len) = (memory.as_ptr(), memory.len());
        let iovec = sys::iovec { iov_base: start.cast(), iov_len: len };
        let gpu = match memory.kind() {
            MemoryKind::Host => return Ok(Self { iovec, gpu: None, dma_buf: None }),
            MemoryKind::Cuda { device } => device,
            _ => return refused("efa registers host memory and memory of NVIDIA GPUs only"),
        };
        if !takes_gpu_memory {
            return refused(
                "this libfabric does not support GPU memory (FI_HMEM), or the cards cannot reach it (then a warning says \
                 so). Use libfabric 1.18 or later of AWS's EFA installer, with CUDA installed, and with efa_nv_peermem or \
                 DMA-BUFs in the kernel; or register host memory",
            );
        }
        let dma_buf = if version >= DMA_BUFS_SINCE { memory.dma_buf()? } else { None };
        let dma_buf = dma_buf.map(|buffer| {
            let base_addr = start.wrapping_sub(buffer.offset as usize).cast();
            let fd = buffer.file.as_raw_fd();
            (sys::fi_mr_dmabuf { fd, offset: buffer.offset, len, base_addr }, buffer)
        });
        Ok(Self { iovec, gpu: Some(gpu), dma_buf })
    }

    /// Fills in the attributes of a registration, which then point into `self`. Returns the flags to register with.
    pub(crate) fn fill(&self, attr: &mut sys::fi_mr_attr_1_20) -> u64 {
        let known = &mut attr.known;
        (known.mr_iov, known.iov_count) = (&raw const self.iovec, 1);
        if let Some(gpu) = self.gpu {
            known.iface = sys::FI_HMEM_CUDA;
            known.device.cuda = gpu as c_int;
        }
        match &self.dma_buf {
            None => 0,
            Some((dmabuf, _)) => {
                known.mr_iov = std::ptr::from_ref(dmabuf).cast();
                sys::FI_MR_DMABUF
            }
        }
    }

    /// What the registration is for, for error messages.
    pub(crate) fn description(&self) -> String {
        let bytes = self.iovec.iov_len;
        match (self.gpu, &self.dma_buf) {
            (None, _) => format!("to register {bytes} bytes"),
            (Some(gpu), Some(_)) => format!("to register {bytes} bytes of GPU {gpu} by their DMA-BUF"),
            (Some(gpu), None) => format!("to register {bytes} bytes of GPU {gpu} by their address"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory with a kind and a DMA-BUF of the test's choice.
    struct FakeMemory(MemoryKind, Option<u64>);

    // SAFETY: nobody follows the address.
    unsafe impl Memory for FakeMemory {
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

    fn filled(location: &MemoryLocation) -> (sys::fi_mr_attr_1_20, u64) {
        // SAFETY: plain numbers and null pointers.
        let mut attr = unsafe { std::mem::zeroed() };
        let flags = location.fill(&mut attr);
        (attr, flags)
    }

    #[test]
    fn host_memory_is_registered_by_its_address() {
        let location =
            MemoryLocation::new(&FakeMemory(MemoryKind::Host, None), sys::version(2, 1), false).unwrap();
        let (attr, flags) = filled(&location);
        assert_eq!((flags, attr.known.iface, attr.known.iov_count), (0, sys::FI_HMEM_SYSTEM, 1));
        // SAFETY: the location lives.
        let iovec = unsafe { *attr.known.mr_iov };
        assert_eq!((iovec.iov_base as usize, iovec.iov_len), (0x7000_1400, 0x800));
    }

    #[test]
    fn gpu_memory_is_registered_by_its_dma_buf_if_it_has_one() {
        let memory = FakeMemory(MemoryKind::Cuda { device: 3 }, Some(0x400));
        let location = MemoryLocation::new(&memory, sys::version(1, 20), true).unwrap();
        let (attr, flags) = filled(&location);
        assert_eq!((flags, attr.known.iface), (sys::FI_MR_DMABUF, sys::FI_HMEM_CUDA));
        // SAFETY: as the flag says; the location lives.
        let (buffer, gpu) =
            unsafe { (*attr.known.mr_iov.cast::<sys::fi_mr_dmabuf>(), attr.known.device.cuda) };
        assert_eq!((buffer.offset, buffer.len, gpu), (0x400, 0x800, 3));
        assert_eq!(buffer.base_addr as usize, 0x7000_1000, "the first byte of the DMA-BUF");
        for (version, offset) in [(sys::version(1, 18), Some(0)), (sys::version(2, 1), None)] {
            let location = MemoryLocation::new(&FakeMemory(memory.0, offset), version, true).unwrap();
            assert_eq!(filled(&location).1, 0, "by its address");
        }
    }

    #[test]
    fn unsupported_memory_is_refused() {
        let of = |kind, takes_gpu_memory| {
            MemoryLocation::new(&FakeMemory(kind, None), sys::version(2, 1), takes_gpu_memory).err().unwrap()
        };
        let refused = of(MemoryKind::Cuda { device: 0 }, false);
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.context().contains("FI_HMEM"), "{refused}");
        assert_eq!(of(MemoryKind::P2pmem, true).kind(), ErrorKind::Unsupported);
    }
}
