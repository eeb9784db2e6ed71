//! Where the bytes of one side lie.
#![allow(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use multirail::cuda::{CudaMemory, Device, PinnedBuffer};
use multirail::{Access, Fabric, HostBuffer, Memory, Region};
use serde::{Deserialize, Serialize};

use crate::failure::CommandResult;

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BenchMemory {
    /// The host's, as `Fabric::alloc` gives it: peers can map it.
    Host,
    /// The host's, as any program has it: no peer can map it, nothing keeps its pages in place.
    HostPageable,
    /// The host's, page-locked for GPUs; peers can map it.
    HostPinned,
    /// That GPU's, by CUDA's number.
    Gpu(u32),
}

impl BenchMemory {
    /// Whether it is a GPU's.
    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu(_))
    }

    /// Zeroed memory there, registered with `fabric`.
    pub fn alloc(self, fabric: &Fabric, len: usize, access: Access) -> CommandResult<Region> {
        let memory: Arc<dyn Memory> = match self {
            Self::Host => return Ok(fabric.alloc(len, access)?),
            Self::HostPageable => Arc::new(HostBuffer::private(len)?),
            // Locked for every GPU, whichever it is asked of.
            Self::HostPinned => Arc::new(PinnedBuffer::new(&Device::open(0)?, len)?),
            Self::Gpu(number) => Arc::new(CudaMemory::new(&Device::open(number)?, len)?),
        };
        // SAFETY: the memory is new, and only the region will know it.
        Ok(unsafe { fabric.register(memory, access) }?)
    }
}

impl FromStr for BenchMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no memory: give host, host-pageable, host-pinned or gpu:N");
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

/// The variable by which loopback is told.
const GPU_BLOCKS: &str = "MULTIRAIL_GPU_BLOCKS";

/// Sets it, before any fabric is open.
pub fn set_gpu_blocks(blocks: u32) {
    // SAFETY: no other thread reads the environment but through the standard library, which locks it: the
    // libraries that would are loaded when backends are asked for their devices, after this.
    unsafe { std::env::set_var(GPU_BLOCKS, blocks.to_string()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in ["host", "host-pageable", "host-pinned", "gpu:0", "gpu:17"] {
            assert_eq!(text.parse::<BenchMemory>().unwrap().to_string(), text);
        }
        for wrong in ["", "gpu", "gpu:", "gpu:-1", "gpu:x", "HOST", "cuda:0", "gpu:4294967296"] {
            assert!(wrong.parse::<BenchMemory>().unwrap_err().contains("give host"), "{wrong}");
        }
    }
}
