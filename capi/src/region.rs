//! Regions: registering memory, and what peers get of it.

use std::ffi::c_void;

use multirail::Access;
use multirail::cuda::{CudaMemory, Device};

use crate::abi::*;
use crate::arguments::{Bytes, Input, Out, OutBytes};
use crate::failure::Failure;
use crate::handles::{FABRICS, REGIONS};
use crate::op::submitted;
use crate::owner;

/// What peers may do, by the header's bits.
fn access(bits: u32) -> Result<Access, Failure> {
    let access =
        [(MR_ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE), (MR_ACCESS_REMOTE_READ, Access::REMOTE_READ)];
    if bits & !MR_ACCESS_ALL != 0 {
        return Err(Failure::invalid(format!("access is {bits:#x}; it is 0, or MR_ACCESS_... together")));
    }
    Ok(access.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, access)| access).collect())
}

/// The header's bits of an access.
pub fn access_bits(access: Access) -> u32 {
    let write = if access.contains(Access::REMOTE_WRITE) { MR_ACCESS_REMOTE_WRITE } else { 0 };
    write | if access.contains(Access::REMOTE_READ) { MR_ACCESS_REMOTE_READ } else { 0 }
}

entry_points! {
    fn mr_region_register(fabric: mr_fabric, memory: Input<mr_memory>, region: Out<mr_region>) {
        let given = memory.read_versioned("memory")?;
        // From here on the program's release function is called whatever happens.
        let memory = owner::memory(&given)?;
        region.check("region")?;
        let everywhere = given.flags & MR_REGISTER_EVERYWHERE != 0;
        let fabric = FABRICS.find(fabric)?;
        region.set(REGIONS.insert(owner::register(&fabric.fabric, memory, access(given.access)?, everywhere)?)?);
        Ok(MR_OK)
    }

    fn mr_region_alloc(
        fabric: mr_fabric,
        length: usize,
        access: u32,
        kind: u32,
        device: i32,
        region: Out<mr_region>,
    ) {
        region.check("region")?;
        let (fabric, access) = (FABRICS.find(fabric)?, self::access(access)?);
        let allocated = match kind {
            MR_MEMORY_HOST => fabric.fabric.alloc(length, access)?,
            MR_MEMORY_CUDA => {
                let number = match device {
                    MR_DEVICE_ANY => 0,
                    number => u32::try_from(number).map_err(|_| Failure::invalid(format!("device is {number}")))?,
                };
                let memory = CudaMemory::new(&Device::open(number)?, length)?;
                owner::register(&fabric.fabric, std::sync::Arc::new(memory), access, false)?
            }
            other => {
                let why = format!("kind is {other}; MR_MEMORY_HOST is 0, and MR_MEMORY_CUDA is 1");
                return Err(Failure::invalid(why));
            }
        };
        region.set(REGIONS.insert(allocated)?);
        Ok(MR_OK)
    }

    fn mr_region_data(region: mr_region, address: Out<*mut c_void>, length: Out<usize>) {
        let region = REGIONS.find(region)?;
        address.set(region.as_ptr().cast());
        length.set(region.len());
        Ok(MR_OK)
    }

    fn mr_region_copy_in(region: mr_region, offset: usize, bytes: Bytes, length: usize) {
        REGIONS.find(region)?.copy_in(offset, bytes.read(length, "bytes")?)?;
        Ok(MR_OK)
    }

    fn mr_region_copy_out(region: mr_region, offset: usize, bytes: OutBytes, length: usize) {
        let mut bytes = bytes;
        REGIONS.find(region)?.copy_out(offset, bytes.room(length, "bytes")?)?;
        Ok(MR_OK)
    }

    fn mr_region_descriptor(region: mr_region, buf: OutBytes, len: usize, needed: Out<usize>) {
        buf.write(len, needed, &REGIONS.find(region)?.descriptor().to_bytes())
    }

    fn mr_region_revoke(region: mr_region, op: Out<mr_op>) {
        submitted(op, REGIONS.find(region)?.revoke()?)
    }

    fn mr_region_release(region: mr_region) {
        drop(REGIONS.take(region)?);
        Ok(MR_OK)
    }
}
