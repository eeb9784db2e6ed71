//! Messages from and into memory of GPUs: by way of the host's, in the worker.

use multirail_spi::{ErrorKind, ReceiveRequest, Result, WorkRequest};

use crate::lane::MESSAGE;
use crate::peer::Outbound;
use crate::region::Regions;
use crate::runner::announce;

/// Sends a message whose bytes are a GPU's; `None` if the lane is full.
#[cold]
pub(crate) fn send(
    regions: &Regions,
    outbound: &Outbound,
    request: &WorkRequest,
) -> Option<Result<(), ErrorKind>> {
    if request.len > MESSAGE as u64 {
        return Some(Err(ErrorKind::TooLarge));
    }
    let mut bytes = vec![0; request.len as usize];
    let Some(local) = regions.local(request.lkey) else { return Some(Err(ErrorKind::InvalidRequest)) };
    let at = (request.local as u64).wrapping_sub(local.start) as usize;
    match local.memory.load(at, &mut bytes) {
        Some(Ok(())) => {}
        Some(Err(why)) => return Some(Err(why.kind())),
        None => return Some(Err(ErrorKind::InvalidRequest)),
    }
    let request = WorkRequest { local: bytes.as_mut_ptr(), ..*request };
    // SAFETY: the bytes are ours, and as many.
    unsafe { announce(outbound, &request) }
}

/// Puts a message where a receive wants it, on a GPU.
#[cold]
pub(crate) fn store(regions: &Regions, receive: &ReceiveRequest, bytes: &[u8]) -> Result<(), ErrorKind> {
    let local = regions.local(receive.lkey).ok_or(ErrorKind::InvalidRequest)?;
    let at = (receive.local as u64).wrapping_sub(local.start) as usize;
    let stored = local.memory.store(at, bytes).ok_or(ErrorKind::InvalidRequest)?;
    stored.map_err(|why| why.kind())
}
