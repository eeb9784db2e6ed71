//! The memory of one side of a bench.
#![allow(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use multirail::cuda::{CudaMemory, Device, PinnedBuffer};
use multirail::{Access, CoalescePolicy, Fabric, HostBuffer, Memory, Region};
use serde::{Deserialize, Serialize};

use crate::failure::CommandResult;

/// The memory of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BenchMemory {
    /// Host memory from `Fabric::alloc`, which peers can map.
    Host,
    /// Ordinary host memory: peers cannot map it, and it is not page-locked.
    HostPageable,
    /// Host memory that is page-locked for GPUs, and that peers can map.
    HostPinned,
    /// Memory of a GPU, by CUDA's number.
    Gpu(u32),
}

impl BenchMemory {
    /// Returns true for GPU memory.
    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu(_))
    }

    /// Allocates zeroed memory and registers it with `fabric`.
    pub fn alloc(self, fabric: &Fabric, len: usize, access: Access) -> CommandResult<Region> {
        let memory: Arc<dyn Memory> = match self {
            Self::Host => return Ok(fabric.alloc(len, access)?),
            Self::HostPageable => Arc::new(HostBuffer::private(len)?),
            // The memory is page-locked for every GPU, so any device can allocate it.
            Self::HostPinned => Arc::new(PinnedBuffer::new(&Device::open(0)?, len)?),
            Self::Gpu(number) => Arc::new(CudaMemory::new(&Device::open(number)?, len)?),
        };
        // SAFETY: the memory was allocated just now, and only the region knows it.
        Ok(unsafe { fabric.register(memory, access) }?)
    }
}

impl FromStr for BenchMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("unknown memory {text:?}; use host, host-pageable, host-pinned or gpu:N");
        match text {
            "host" => Ok(Self::Host),
            "host-pageable" => Ok(Self::HostPageable),
            "host-pinned" => Ok(Self::HostPinned),
            _ => {
                let number = text.strip_prefix("gpu:").ok_or_else(wrong)?;
                number.parse().map(Self::Gpu).map_err(|_| wrong())
            }
        }
    }
}

impl fmt::Display for BenchMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::HostPageable => f.write_str("host-pageable"),
            Self::HostPinned => f.write_str("host-pinned"),
            Self::Gpu(number) => write!(f, "gpu:{number}"),
        }
    }
}

/// The environment variable that loopback reads.
const GPU_BLOCKS: &str = "MULTIRAIL_GPU_BLOCKS";
/// The variable that lets a process coalesce pages.
const COALESCE: &str = "MULTIRAIL_COALESCE";

/// Sets the number of GPU blocks that copy, for this process and the server it starts. Call it before any fabric is
/// open.
pub fn set_gpu_blocks(blocks: u32) {
    // SAFETY: other threads read the environment only through the standard library, which locks it. Libraries that
    // read it directly are loaded when backends are probed, which is after this.
    unsafe { std::env::set_var(GPU_BLOCKS, blocks.to_string()) };
}

/// Lets this process and the server it starts coalesce pages: as `policy` says, if an operation states none. Call it
/// before any fabric is open.
pub fn set_coalescing(policy: CoalescePolicy) {
    // SAFETY: as in `set_gpu_blocks`.
    unsafe { std::env::set_var(COALESCE, policy.name()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for text in ["host", "host-pageable", "host-pinned", "gpu:0", "gpu:17"] {
            assert_eq!(text.parse::<BenchMemory>().unwrap().to_string(), text);
        }
        for wrong in ["", "gpu", "gpu:", "gpu:-1", "gpu:x", "HOST", "cuda:0", "gpu:4294967296"] {
            assert!(wrong.parse::<BenchMemory>().unwrap_err().contains("use host"), "{wrong}");
        }
    }
}
