//! Memory of C programs, and their function that takes it back.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use multirail::cuda::CudaMemory;
use multirail::{HostRange, Memory, MemoryKind};

use crate::abi::*;
use crate::failure::Failure;

/// Calls the program's release function once, when nobody refers to the memory any more.
struct Owner {
    release: Option<extern "C" fn(context: *mut c_void)>,
    context: *mut c_void,
}

// SAFETY: the context is only handed to the program's function, which by contract may run in any thread.
unsafe impl Send for Owner {}
// SAFETY: as above; there is nothing to do with a shared owner.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release(self.context);
        }
    }
}

/// The memory that a program has described, which keeps the program's owner. If this fails, the owner is dropped.
pub fn memory(given: &mr_memory) -> Result<Arc<dyn Memory>, Failure> {
    let owner: Arc<dyn Any + Send + Sync> =
        Arc::new(Owner { release: given.release, context: given.context });
    if given.reserved != 0 || given.flags & !MR_REGISTER_EVERYWHERE != 0 {
        let why = "memory.flags has an unknown bit, or memory.reserved is not 0; begin with MR_MEMORY_INIT";
        return Err(Failure::invalid(why));
    }
    match given.kind {
        MR_MEMORY_HOST => {
            // SAFETY: the program keeps the bytes until its release function runs, or without one as the header says.
            let range = unsafe { HostRange::of_pointer(given.address as usize, given.length, owner) };
            Ok(Arc::new(range?))
        }
        MR_MEMORY_CUDA => {
            // SAFETY: as above.
            let memory = unsafe { CudaMemory::of_pointer(given.address as u64, given.length, owner) }?;
            check_device(memory.kind(), given.device)?;
            Ok(Arc::new(memory))
        }
        other => Err(Failure::invalid(format!(
            "memory.kind is {other}; MR_MEMORY_HOST is 0, and MR_MEMORY_CUDA is 1"
        ))),
    }
}

fn check_device(kind: MemoryKind, asked: i32) -> Result<(), Failure> {
    match kind {
        MemoryKind::Cuda { device } if asked != MR_DEVICE_ANY && i64::from(device) != i64::from(asked) => {
            Err(Failure::invalid(format!("the memory is on GPU {device}, and memory.device is {asked}")))
        }
        _ => Ok(()),
    }
}

/// Registers memory.
///
/// Peers may change the bytes from here on. No code of this crate refers to them, and C programs know it by the header.
pub fn register(
    fabric: &multirail::Fabric,
    memory: Arc<dyn Memory>,
    access: multirail::Access,
    everywhere: bool,
) -> multirail::Result<multirail::Region> {
    // SAFETY: see above: nobody holds a Rust reference into the bytes.
    unsafe {
        match everywhere {
            true => fabric.register_everywhere(memory, access),
            false => fabric.register(memory, access),
        }
    }
}
