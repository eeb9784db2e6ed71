//! A GPU.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use topology::Address;
use transport_core::{Error, ErrorKind, Result};

use crate::driver::{check, start};

/// A GPU with its primary context, which it keeps alive. Clones share it.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    address: Option<Address>,
}

// SAFETY: contexts may be used from any thread (CUDA driver API, "Context Management").
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Inner {}

/// From whom writes of cards into GPU memory are seen in order, without a flush
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// By nobody: who reads has to flush first.
    None,
    /// By the GPU that owns the memory.
    Owner,
    /// By every GPU.
    AllDevices,
}

impl Device {
    /// All GPUs that this process may use (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// `Unsupported` without a driver, or with too old a one; `NotFound` without a GPU.
    pub fn all() -> Result<Vec<Self>> {
        start()?;
        let mut count = 0;
        // SAFETY: the driver is started, and writes one number.
        check("find GPUs", "to count them", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        if count == 0 {
            return Err(Error::new(ErrorKind::NotFound, "find GPUs", "the driver shows no GPU"));
        }
        (0..count as u32).map(Self::open).collect()
    }

    /// The GPU that CUDA counts so.
    pub fn open(ordinal: u32) -> Result<Self> {
        start()?;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let (mut raw, mut context) = (0, std::ptr::null_mut());
        let what = format!("GPU {ordinal}");
        // SAFETY: the driver is started, and writes one value each.
        unsafe {
            check("open GPU", &what, sys::cuDeviceGet(&raw mut raw, number))?;
            check("open GPU", &what, sys::cuDevicePrimaryCtxRetain(&raw mut context, raw))?;
        }
        let (name, address) = (name(raw), address(raw));
        Ok(Self(Arc::new(Inner { ordinal, raw, context, name, address })))
    }

    /// CUDA's number for it.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The model, `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its PCI function, which tells its place in the machine.
    pub fn address(&self) -> Option<Address> {
        self.0.address
    }

    /// Whether its memory can be exported as a DMA-BUF.
    pub fn has_dma_buf(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 1
    }

    /// Whether cards can reach its memory at all.
    pub fn has_rdma(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) == 1
    }

    /// Who sees writes of cards in order.
    pub fn writes_ordering(&self) -> WritesOrdering {
        match self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
            ..100 => WritesOrdering::None,
            100..200 => WritesOrdering::Owner,
            200.. => WritesOrdering::AllDevices,
        }
    }

    /// 0 where the driver does not know it.
    fn attribute(&self, attribute: Attribute) -> c_int {
        let mut value = 0;
        // SAFETY: the driver is started, and writes one number.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.0.raw) };
        check("open GPU", "an attribute", code).map_or(0, |()| value)
    }

    /// Runs `work` in its context, and leaves the thread with the one it had.
    pub(crate) fn within<T>(&self, operation: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        // SAFETY: the context is retained while the device lives.
        check(operation, "its context", unsafe { sys::cuCtxPushCurrent_v2(self.0.context) })?;
        let done = work();
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed above.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        done
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained when it was opened. An error of a lost GPU has no one left to hear it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

fn name(device: sys::CUdevice) -> String {
    text(|buffer, len| {
        // SAFETY: the buffer is as long as said.
        unsafe { sys::cuDeviceGetName(buffer, len, device) }
    })
}

fn address(device: sys::CUdevice) -> Option<Address> {
    let name = text(|buffer, len| {
        // SAFETY: the buffer is as long as said.
        unsafe { sys::cuDeviceGetPCIBusId(buffer, len, device) }
    });
    name.parse().ok()
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> sys::CUresult) -> String {
    let mut buffer = [0_u8; 256];
    let code = read(buffer.as_mut_ptr().cast(), buffer.len() as c_int);
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    check("open GPU", "its name", code).map_or(String::new(), |()| text.to_string_lossy().into_owned())
}
