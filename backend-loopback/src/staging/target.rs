//! The target's end of staging: moves bytes between the slots of a peer's staging buffer and regions.

use multirail_spi::{
    Access, ErrorKind, WorkKind,
    copy::{self, CopyStrategy},
};

use crate::regions::Regions;
use crate::segment::staging_buffer::StagingBuffer;

/// Serves the posted slots from slot `at` on. Returns how many slots were served, and whether the initiator sleeps
/// and must be woken.
pub(crate) fn serve(buffer: &StagingBuffer, at: u64, regions: &Regions) -> (u64, bool) {
    buffer.serve(at, |at| run(buffer, at, regions))
}

/// Moves the bytes of one slot, if the region allows it.
fn run(buffer: &StagingBuffer, at: u64, regions: &Regions) -> Result<(), ErrorKind> {
    let request = buffer.request(at)?;
    let reads = request.kind == WorkKind::Read;
    let need = if reads { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
    let range = regions.enter(request.key, need, request.remote, request.len as u64)?;
    let (to, from) = if reads {
        (buffer.bytes(at), range.start().cast_const())
    } else {
        (range.start(), buffer.bytes(at).cast_const())
    };
    // SAFETY: `enter` checked the range and keeps the region's bytes until `range`
    // is dropped; `len` bytes fit the slot, which stays mapped with `buffer`.
    unsafe { copy::copy(CopyStrategy::Plain, to, from, request.len) };
    Ok(())
}

#[cfg(test)]
mod tests;
