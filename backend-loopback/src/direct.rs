//! One small request at once, in the calling thread.

use std::any::Any;
use std::sync::Arc;

use multirail_spi::{Direct, Error, ErrorKind, RemoteMemory, Result, WorkKind, WorkRequest};

use crate::gpu;
use crate::lane;
use crate::peer::Outbound;
use crate::remote::{Import, Place, Remote};
use crate::runner::{announce, send_imm, transfer};
use crate::status;

/// Largest write or read in the calling thread. Handing one to the worker costs 1.5 µs
/// when it spins, of lines that cross between cores, and 16 µs when it sleeps; 1 MiB takes
/// 23 µs hot and about 100 µs cold, which a future may take to be polled. By the worker it
/// ran at 0.88 to 0.94 of memcpy (Zen 4, `benches/benches/write.rs`), and callers queued
/// for one worker where they now copy side by side.
pub(crate) const DIRECT: u64 = 1 << 20;

/// The way to one peer. Any thread may use it.
pub(crate) struct LoopbackDirect {
    outbound: Arc<Outbound>,
}

impl LoopbackDirect {
    pub(crate) fn new(outbound: Arc<Outbound>) -> Self {
        Self { outbound }
    }

    /// Moves the bytes of a write or read, if every check allows it; `None` if it is to be staged.
    #[inline(always)]
    unsafe fn transfer(
        &self,
        request: &WorkRequest,
        remote: Option<&dyn RemoteMemory>,
    ) -> Option<Result<(), ErrorKind>> {
        let (entered, offset) = match self.enter(request, remote) {
            Ok(entered) => entered,
            Err(kind) => return Some(Err(kind)),
        };
        let Place::Here(base) = entered.0.place else {
            // SAFETY: as below.
            return unsafe { self.transfer_elsewhere(request, entered.0, offset) };
        };
        // SAFETY: range checked, lease held, local span by the caller.
        unsafe { transfer(request, base.as_ptr().add(offset)) };
        Some(Ok(()))
    }

    /// The same to where the processor does not get by itself.
    #[inline(never)]
    unsafe fn transfer_elsewhere(
        &self,
        request: &WorkRequest,
        import: &Import,
        offset: usize,
    ) -> Option<Result<(), ErrorKind>> {
        match import.place {
            #[cfg(target_os = "linux")]
            Place::There { base, guard } => {
                let there = (guard, base.wrapping_add(offset as u64));
                // SAFETY: by the caller.
                let moved = unsafe { crate::foreign::run_one(&self.outbound, request, there) };
                Some(moved.map_err(|status| status.kind))
            }
            // SAFETY: by the caller.
            Place::Gpu { base, .. } => unsafe { gpu::copy_now(request, import, base + offset as u64) },
            Place::Staged | Place::Here(_) => None,
        }
    }

    #[inline(always)]
    fn enter<'a>(
        &self,
        request: &WorkRequest,
        remote: Option<&'a dyn RemoteMemory>,
    ) -> Result<(Entered<'a>, usize), ErrorKind> {
        let remote = remote.ok_or(ErrorKind::RemoteAccess)?;
        let remote = (remote as &dyn Any).downcast_ref::<Remote>().ok_or(ErrorKind::RemoteAccess)?;
        let import = &*remote.import;
        if !Arc::ptr_eq(&import.target, &self.outbound) {
            return Err(ErrorKind::RemoteAccess);
        }
        let offset = import.check(request.kind, request.remote, request.len)?;
        import.enter()?;
        Ok((Entered(import), offset))
    }

    /// Runs what is more than moving bytes: messages and immediate data.
    #[inline(never)]
    unsafe fn announce(
        &self,
        request: &WorkRequest,
        remote: Option<&dyn RemoteMemory>,
    ) -> Option<Result<(), ErrorKind>> {
        if !self.outbound.is_alive() {
            return Some(Err(ErrorKind::PeerDied));
        }
        if request.kind == WorkKind::Send || request.len == 0 {
            // SAFETY: by the caller.
            return unsafe { announce(&self.outbound, request) };
        }
        let imm = request.imm.filter(|_| request.kind == WorkKind::Write);
        if request.len > DIRECT || imm.is_some() && !lane::has_room(self.outbound.layout()) {
            return None;
        }
        // SAFETY: by the caller.
        if let Err(kind) = unsafe { self.transfer(request, remote) }? {
            return Some(Err(kind));
        }
        imm.is_none_or(|imm| send_imm(&self.outbound, imm)).then_some(Ok(()))
    }
}

/// A lease that is given back even if the copy unwinds.
struct Entered<'a>(&'a Import);

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Direct for LoopbackDirect {
    unsafe fn run(&self, request: &WorkRequest, remote: Option<&dyn RemoteMemory>) -> Option<Result<()>> {
        let outcome = if request.kind == WorkKind::Send || request.len == 0 || request.imm.is_some() {
            // SAFETY: by the caller.
            unsafe { self.announce(request, remote) }?
        } else if request.len > DIRECT {
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
        if request.len > gpu::AT_ONCE || imm.is_some() && !lane::has_room(self.outbound.layout()) {
            return None;
        }
        let copied = match self.enter(request, Some(remote)) {
            Err(kind) => Err(kind),
            Ok((entered, offset)) => {
                let there = match entered.0.place {
                    Place::Gpu { base, .. } => base,
                    Place::Here(base) => base.as_ptr() as u64,
                    _ => return None,
                };
                // SAFETY: range checked, lease held, local span by the caller.
                unsafe { gpu::copy_now(request, entered.0, there + offset as u64) }?
            }
        };
        if let (Ok(()), Some(imm)) = (copied, imm)
            && !send_imm(&self.outbound, imm)
        {
            return None;
        }
        Some(copied.map_err(|kind| refusal(request.kind, kind)))
    }

    fn declines(&self, remote: &dyn RemoteMemory, far: bool, len: u64) -> Option<&'static str> {
        let place = (remote as &dyn Any).downcast_ref::<Remote>()?.import.place;
        let by_gpu = far || matches!(place, Place::Gpu { .. });
        match place {
            Place::Staged => Some("the owner's worker moves its bytes"),
            _ if by_gpu && len > gpu::AT_ONCE => Some("a GPU copies more than it would at once"),
            _ => None,
        }
    }
}

#[cold]
fn refusal(work: WorkKind, kind: ErrorKind) -> Error {
    let operation = match work {
        WorkKind::Write => "write",
        WorkKind::Read => "read",
        WorkKind::Send => "send",
    };
    Error::new(kind, operation, status::describe(status::status(kind)))
}
