//! Memory that nobody touches: modelled cards move nothing, so it costs nothing.
#![allow(unsafe_code)]

use std::sync::Arc;

use multirail::{Access, Fabric, HostBuffer, Region};

use crate::failure::Done;

/// A region of `len` bytes without memory behind it.
pub fn untouched(fabric: &Fabric, len: usize, access: Access) -> Done<Region> {
    let buffer = Arc::new(HostBuffer::sparse(len)?);
    // SAFETY: the buffer is new, and only the region will know it.
    Ok(unsafe { fabric.register(buffer, access)? })
}
