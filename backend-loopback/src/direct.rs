//! Small requests that run at once, in the calling thread.

use std::any::Any;
use std::sync::Arc;

use multirail_spi::{Direct, Error, ErrorKind, RemoteMemory, Result, WorkKind, WorkRequest};

use crate::gpu;
use crate::imports::{Import, ImportHandle, RegionLocation, ScopedLease, copy_mapped};
use crate::outbound::Outbound;
use crate::segment::message_ring;
use crate::status::{describe, status};

/// Bytes of the largest write or read in the calling thread. Handing a request to the worker costs 1.5 µs when the
/// worker spins, for cache lines that move between cores, and 16 µs when it sleeps. A copy of 1 MiB takes 23 µs with
/// warm caches and about 100 µs with cold ones, which is not too long for the poll of a future. By the worker, a
/// write of 1 MiB ran at 0.88 to 0.94 of the speed of memcpy (Zen 4, `benches/benches/write.rs`), and callers waited
/// for one worker where they now copy in parallel.
pub(crate) const MAX_DIRECT: u64 = 1 << 20;

/// Runs small requests to one peer, in the calling thread. Any thread may use it.
pub(crate) struct LoopbackDirect {
    outbound: Arc<Outbound>,
}

impl LoopbackDirect {
    pub(crate) fn new(outbound: Arc<Outbound>) -> Self {
        Self { outbound }
    }

    /// Moves the bytes of a write or read, if every check allows it. Returns `None` if the request must be posted.
    #[inline(always)]
    unsafe fn transfer(
        &self,
        request: &WorkRequest,
        remote: Option<&dyn RemoteMemory>,
    ) -> Option<Result<(), ErrorKind>> {
        let (lease, offset) = match self.enter(request, remote) {
            Ok(entered) => entered,
            Err(kind) => return Some(Err(kind)),
        };
        let RegionLocation::Mapped(base) = lease.import().location else {
            // SAFETY: as below.
            return unsafe { self.transfer_unmapped(request, lease.import(), offset) };
        };
        // SAFETY: range checked, lease held, local span by the caller.
        unsafe { copy_mapped(request, base.as_ptr().add(offset)) };
        Some(Ok(()))
    }

    /// Moves the bytes of a write or read to or from a region that is not mapped here.
    #[inline(never)]
    unsafe fn transfer_unmapped(
        &self,
        request: &WorkRequest,
        import: &Import,
        offset: usize,
    ) -> Option<Result<(), ErrorKind>> {
        match import.location {
            #[cfg(target_os = "linux")]
            RegionLocation::Foreign { base, guard } => {
                let address = (guard, base.wrapping_add(offset as u64));
                // SAFETY: by the caller.
                let moved =
                    unsafe { crate::imports::foreign_copy::copy_one(&self.outbound, request, address) };
                Some(moved.map_err(|status| status.kind))
            }
            // SAFETY: by the caller.
            RegionLocation::Gpu { base, .. } => unsafe {
                gpu::copy_now(request, import, base + offset as u64)
            },
            RegionLocation::Staged | RegionLocation::Mapped(_) => None,
        }
    }

    /// Checks a request, and enters the lease of its import. Returns the request's offset in the region.
    #[inline(always)]
    fn enter<'a>(
        &self,
        request: &WorkRequest,
        remote: Option<&'a dyn RemoteMemory>,
    ) -> Result<(ScopedLease<'a>, usize), ErrorKind> {
        let remote = remote.ok_or(ErrorKind::RemoteAccess)?;
        let remote = (remote as &dyn Any).downcast_ref::<ImportHandle>().ok_or(ErrorKind::RemoteAccess)?;
        let import = remote.import();
        if !Arc::ptr_eq(&import.target, &self.outbound) {
            return Err(ErrorKind::RemoteAccess);
        }
        let offset = import.check(request.kind, request.remote, request.len)?;
        Ok((ScopedLease::enter(import)?, offset))
    }

    /// Runs a message, an empty write, or a request with immediate data.
    #[inline(never)]
    unsafe fn run_with_event(
        &self,
        request: &WorkRequest,
        remote: Option<&dyn RemoteMemory>,
    ) -> Option<Result<(), ErrorKind>> {
        if !self.outbound.is_alive() {
            return Some(Err(ErrorKind::PeerDied));
        }
        if request.kind == WorkKind::Send || request.len == 0 {
            // SAFETY: by the caller.
            return unsafe { self.outbound.send(request) };
        }
        let imm = request.imm.filter(|_| request.kind == WorkKind::Write);
        if request.len > MAX_DIRECT || imm.is_some() && !message_ring::has_room(self.outbound.layout()) {
            return None;
        }
        // SAFETY: by the caller.
        if let Err(kind) = unsafe { self.transfer(request, remote) }? {
            return Some(Err(kind));
        }
        imm.is_none_or(|imm| self.outbound.send_imm(imm)).then_some(Ok(()))
    }
}

impl Direct for LoopbackDirect {
    unsafe fn run(&self, request: &WorkRequest, remote: Option<&dyn RemoteMemory>) -> Option<Result<()>> {
        let outcome = if request.kind == WorkKind::Send || request.len == 0 || request.imm.is_some() {
            // SAFETY: by the caller.
            unsafe { self.run_with_event(request, remote) }?
        } else if request.len > MAX_DIRECT {
            return None;
        } else {
            // SAFETY: by the caller.
            unsafe { self.transfer(request, remote) }?
        };
        Some(outcome.map_err(|kind| refusal(request.kind, kind)))
    }

    unsafe fn run_device_memory(
        &self,
        request: &WorkRequest,
        remote: &dyn RemoteMemory,
    ) -> Option<Result<()>> {
        let imm = request.imm.filter(|_| request.kind == WorkKind::Write);
        if request.len > gpu::MAX_COPY_IN_CALLER
            || imm.is_some() && !message_ring::has_room(self.outbound.layout())
        {
            return None;
        }
        let copied = match self.enter(request, Some(remote)) {
            Err(kind) => Err(kind),
            Ok((lease, offset)) => {
                let base = match lease.import().location {
                    RegionLocation::Gpu { base, .. } => base,
                    RegionLocation::Mapped(base) => base.as_ptr() as u64,
                    _ => return None,
                };
                // SAFETY: range checked, lease held, local span by the caller.
                unsafe { gpu::copy_now(request, lease.import(), base + offset as u64) }?
            }
        };
        if let (Ok(()), Some(imm)) = (copied, imm)
            && !self.outbound.send_imm(imm)
        {
            return None;
        }
        Some(copied.map_err(|kind| refusal(request.kind, kind)))
    }

    fn decline_reason(
        &self,
        remote: &dyn RemoteMemory,
        in_device_memory: bool,
        len: u64,
    ) -> Option<&'static str> {
        let location = (remote as &dyn Any).downcast_ref::<ImportHandle>()?.import().location;
        let needs_gpu = in_device_memory || matches!(location, RegionLocation::Gpu { .. });
        match location {
            RegionLocation::Staged => Some("the owner's worker moves its bytes"),
            _ if needs_gpu && len > gpu::MAX_COPY_IN_CALLER => {
                Some("a GPU copies more bytes than the calling thread may wait for")
            }
            _ => None,
        }
    }
}

/// The error of a request that was refused.
#[cold]
fn refusal(work: WorkKind, kind: ErrorKind) -> Error {
    let operation = match work {
        WorkKind::Write => "write",
        WorkKind::Read => "read",
        WorkKind::Send => "send",
    };
    Error::new(kind, operation, describe(status(kind)))
}
