//! Runs the requests of a batch in the calling thread, and enters as few leases as possible for it.

use multirail_spi::{ErrorKind, Piece, Status, WorkKind, WorkRequest};

use super::fast_path::FastPath;
use super::peer_state::PeerState;
use crate::completions::CompletionQueue;
use crate::gpu::{self, Gpus};
#[cfg(target_os = "linux")]
use crate::imports::foreign_copy::{self, ForeignBatch};
use crate::imports::{ImportTable, LeaseGuard, RegionLocation, copy_mapped};
#[cfg(target_os = "linux")]
use crate::other_process::GuardPage;
use crate::outbound::Outbound;
use crate::regions::Regions;
use crate::segment::lease_table::DEVICE_MEMORY;
use crate::segment::message_ring;
use crate::staging::StagedRequests;
use crate::status::status;

/// A batch that is running.
pub(super) struct BatchRunner<'a> {
    pub(super) imports: &'a ImportTable,
    pub(super) peers: &'a [Option<PeerState>],
    pub(super) completions: &'a mut CompletionQueue,
    #[cfg(target_os = "linux")]
    pub(super) foreign: &'a mut ForeignBatch,
    /// The lease of the last request.
    pub(super) lease: Option<LeaseGuard>,
    /// The fast path to the import of `lease`.
    pub(super) fast_path: FastPath,
    pub(super) staged: &'a mut StagedRequests,
    pub(super) regions: &'a Regions,
    pub(super) gpus: &'a mut Gpus,
}

impl BatchRunner<'_> {
    /// Runs the requests of a run in order and completes them, up to the first one for which the peer's message ring
    /// has no room. Returns how many it ran.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`].
    pub(super) unsafe fn run_all(&mut self, template: &WorkRequest, pieces: &[Piece]) -> usize {
        let mut ran = 0;
        while ran < pieces.len() {
            // SAFETY: by the caller; `fast_path` is to the import that `lease` has entered.
            let copied = unsafe { self.fast_path.copy_pieces(template, &pieces[ran..]) };
            self.completions.done(template.id + ran as u64, copied as u32);
            ran += copied;
            if self.lease.as_ref().is_some_and(|lease| lease.is_of(template) && lease.needs_gpu(template)) {
                // SAFETY: by the caller; the import that the template names is held.
                ran += unsafe { self.gpus.push_pieces(template, template.id + ran as u64, &pieces[ran..]) };
            }
            let Some(piece) = pieces.get(ran) else { break };
            // SAFETY: by the caller.
            if !unsafe { self.run(&template.with_piece(ran, piece)) } {
                break;
            }
            ran += 1;
        }
        ran
    }

    /// Runs one request and completes it. Returns false if the peer's message ring has no room or the GPU's batch is
    /// full: then the caller must run the request again later.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`].
    pub(super) unsafe fn run(&mut self, request: &WorkRequest) -> bool {
        if request.kind == WorkKind::Send || request.len == 0 {
            // SAFETY: by the caller.
            return unsafe { self.run_without_import(request) };
        }
        let offset = match self.enter(request) {
            Ok(offset) => offset,
            Err(kind) => return self.complete(request.id, Err(status(kind))),
        };
        let Some(lease) = &self.lease else { return false };
        let import = lease.import();
        if lease.needs_gpu(request) {
            // SAFETY: by the caller; `enter` has checked the request.
            return unsafe { self.run_on_gpu(request) };
        }
        self.fast_path.spend(request.len);
        if request.imm.is_some()
            && request.kind == WorkKind::Write
            && !message_ring::has_room(import.target.layout())
        {
            return false;
        }
        let base = match import.location {
            RegionLocation::Mapped(base) => base,
            #[cfg(target_os = "linux")]
            RegionLocation::Foreign { base, guard } => {
                let address = (guard, base.wrapping_add(offset as u64));
                // SAFETY: by the caller.
                return unsafe { self.run_foreign(request, address) };
            }
            RegionLocation::Staged => {
                self.staged.push(request, import);
                return true;
            }
            RegionLocation::Gpu { .. } => return false,
        };
        // SAFETY: `enter` checked the range and took the lease, so the target's
        // bytes are there; the local ones are by the caller.
        unsafe { copy_mapped(request, base.as_ptr().add(offset)) };
        if let (Some(imm), WorkKind::Write) = (request.imm, request.kind)
            && !import.target.send_imm(imm)
        {
            return false;
        }
        self.completions.done(request.id, 1);
        true
    }

    /// Adds a request to the batch of a GPU.
    ///
    /// # Safety
    /// As [`run`](Self::run), and the request was checked against the import of `lease`.
    #[inline(never)]
    unsafe fn run_on_gpu(&mut self, request: &WorkRequest) -> bool {
        let Some(import) = self.lease.as_ref().map(LeaseGuard::import) else { return false };
        // SAFETY: by the caller.
        match unsafe { self.gpus.push(self.regions, import, request) } {
            Ok(taken) => taken,
            Err(kind) => self.complete(request.id, Err(status(kind))),
        }
    }

    /// Moves the bytes of the foreign batch, and leaves the lease.
    fn leave(&mut self) {
        #[cfg(target_os = "linux")]
        self.flush();
        self.fast_path = FastPath::default();
        self.lease = None;
    }

    /// Enters the lease of the request's import, unless it is entered, and checks the request. Returns its offset in
    /// the region.
    #[inline]
    fn enter(&mut self, request: &WorkRequest) -> Result<usize, ErrorKind> {
        let fits = |lease: &LeaseGuard| lease.is_of(request) && !self.fast_path.is_spent();
        if !self.lease.as_ref().is_some_and(fits) {
            self.renew(request)?;
        }
        match &self.lease {
            Some(lease) => lease.import().check(request.kind, request.remote, request.len),
            None => Err(ErrorKind::RemoteAccess),
        }
    }

    #[inline(never)]
    fn renew(&mut self, request: &WorkRequest) -> Result<(), ErrorKind> {
        self.leave();
        self.outbound(request)?;
        let lease = LeaseGuard::enter(self.imports.find(request.rkey), request)?;
        self.fast_path = FastPath::new(lease.import());
        self.lease = Some(lease);
        Ok(())
    }

    unsafe fn run_without_import(&mut self, request: &WorkRequest) -> bool {
        // A completion must not overtake those of the foreign batch.
        self.leave();
        let outbound = match self.outbound(request) {
            Ok(outbound) => outbound,
            Err(kind) => return self.complete(request.id, Err(status(kind))),
        };
        if request.kind == WorkKind::Write && request.imm.is_none() {
            self.peers[request.peer.0 as usize].iter().for_each(PeerState::warm_up);
        }
        let in_device_memory = request.kind == WorkKind::Send && request.lkey & DEVICE_MEMORY != 0;
        let sent = match in_device_memory {
            true => gpu::send_message(self.regions, outbound, request),
            // SAFETY: by the caller.
            false => unsafe { outbound.send(request) },
        };
        match sent {
            Some(outcome) => self.complete(request.id, outcome.map_err(status)),
            None => false,
        }
    }

    fn outbound(&self, request: &WorkRequest) -> Result<&Outbound, ErrorKind> {
        let peer = self.peers.get(request.peer.0 as usize).and_then(Option::as_ref);
        let peer = peer.filter(|peer| !peer.leaving).ok_or(ErrorKind::PeerDied)?;
        let outbound = peer.outbound.as_deref().ok_or(ErrorKind::Unreachable)?;
        if outbound.is_alive() { Ok(outbound) } else { Err(ErrorKind::PeerDied) }
    }

    fn complete(&mut self, id: u64, outcome: Result<(), Status>) -> bool {
        #[cfg(target_os = "linux")]
        self.flush();
        self.completions.request(id, outcome);
        true
    }
}

#[cfg(target_os = "linux")]
impl BatchRunner<'_> {
    /// Adds `request` to the foreign batch. A request with an imm runs at once, after the batch.
    unsafe fn run_foreign(&mut self, request: &WorkRequest, address: (GuardPage, u64)) -> bool {
        if self.foreign.is_full() || !self.foreign.takes(request.kind) {
            self.flush();
        }
        if request.imm.is_none() || request.kind != WorkKind::Write {
            self.foreign.push(request, address);
            return true;
        }
        self.flush();
        let Some(lease) = &self.lease else { return false };
        let target = lease.import().target.clone();
        // SAFETY: by the caller.
        let outcome = unsafe { foreign_copy::copy_one(&target, request, address) };
        if let (Ok(()), Some(imm)) = (outcome, request.imm)
            && !target.send_imm(imm)
        {
            return false;
        }
        self.complete(request.id, outcome)
    }

    fn flush(&mut self) {
        if let (Some(lease), false) = (&self.lease, self.foreign.is_empty()) {
            // SAFETY: the batch holds accepted requests only. Their local spans are valid by the contract of `post`;
            // the lease is still held.
            unsafe {
                self.foreign
                    .flush(&lease.import().target, |id, outcome| self.completions.request(id, outcome))
            };
        }
    }
}

impl Drop for BatchRunner<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}
