//! In what order a GPU sees what cards write into its memory, and the flush where that says nothing.

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesOptions_enum as Options,
    CUflushGPUDirectRDMAWritesScope_enum as Scope, CUflushGPUDirectRDMAWritesTarget_enum as Target,
};
use multirail_spi::{Fence, Result};

use crate::Device;
use crate::driver::check;

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
    /// Who sees writes of cards in order.
    pub fn writes_ordering(&self) -> WritesOrdering {
        match self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
            ..100 => WritesOrdering::None,
            100..200 => WritesOrdering::Owner,
            200.. => WritesOrdering::AllDevices,
        }
    }

    /// Whether [`flush_writes`](Self::flush_writes) works.
    pub fn can_flush_writes(&self) -> bool {
        let by_call = Options::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & by_call != 0
    }

    /// Returns once what cards have written into its memory is there for its kernels
    /// (`cuFlushGPUDirectRDMAWrites`).
    ///
    /// # Errors
    /// `Unsupported` where it cannot.
    pub fn flush_writes(&self) -> Result<()> {
        let target = Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        self.within("flush writes of cards", || {
            // SAFETY: a call without memory of ours, in the GPU's context.
            let code = unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) };
            check("flush writes of cards", "GPU memory", code)
        })
    }
}

impl Fence for Device {
    fn flush(&self) -> Result<()> {
        self.flush_writes()
    }
}
