//! Runs requests in the calling thread, a batch under as few leases as can be.

use multirail_spi::{ErrorKind, Piece, Status, WorkKind, WorkRequest, copy};

use crate::attached::Attached;
use crate::ended::Ended;
#[cfg(target_os = "linux")]
use crate::foreign::Vector;
use crate::gpu::{self, FAR, Gpus};
#[cfg(target_os = "linux")]
use crate::guard::GuardPage;
use crate::held::Held;
use crate::lane::{self, MESSAGE};
use crate::peer::Outbound;
use crate::region::Regions;
use crate::remote::{Imports, Place};
use crate::shortcut::Shortcut;
use crate::staging::Outlets;
use crate::status::status;

/// One batch under way.
pub(crate) struct Runner<'a> {
    pub(crate) imports: &'a Imports,
    pub(crate) peers: &'a [Option<Attached>],
    pub(crate) ended: &'a mut Ended,
    #[cfg(target_os = "linux")]
    pub(crate) vector: &'a mut Vector,
    pub(crate) held: Option<Held>,
    pub(crate) short: Shortcut,
    pub(crate) outlets: &'a mut Outlets,
    pub(crate) regions: &'a Regions,
    pub(crate) gpus: &'a mut Gpus,
}

impl Runner<'_> {
    /// Runs the requests of a run in order and files their ends, up to the first
    /// whose lane is full. Returns how many it ran.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`].
    pub(crate) unsafe fn run_all(&mut self, template: &WorkRequest, pieces: &[Piece]) -> usize {
        let mut ran = 0;
        while ran < pieces.len() {
            // SAFETY: by the caller; `short` is what `held` has entered.
            let followed = unsafe { self.short.follow(template, &pieces[ran..]) };
            self.ended.done(template.id + ran as u64, followed as u32);
            ran += followed;
            if self.held.as_ref().is_some_and(|held| held.is_of(template) && held.is_far(template)) {
                // SAFETY: by the caller; the import that the template names is held.
                ran += unsafe { self.gpus.follow(template, template.id + ran as u64, &pieces[ran..]) };
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

    /// Runs one request and files its end. `false` if the peer's lane is full: nothing was done.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`].
    pub(crate) unsafe fn run(&mut self, request: &WorkRequest) -> bool {
        if request.kind == WorkKind::Send || request.len == 0 {
            // SAFETY: by the caller.
            return unsafe { self.run_without_import(request) };
        }
        let offset = match self.hold(request) {
            Ok(offset) => offset,
            Err(kind) => return self.file(request.id, Err(status(kind))),
        };
        let Some(held) = &self.held else { return false };
        let import = held.import();
        if held.is_far(request) {
            // SAFETY: by the caller; `hold` has checked the request.
            return unsafe { self.run_device_memory(request) };
        }
        self.short.spend(request.len);
        if request.imm.is_some() && request.kind == WorkKind::Write && !lane::has_room(import.target.layout())
        {
            return false;
        }
        let base = match import.place {
            Place::Here(base) => base,
            #[cfg(target_os = "linux")]
            Place::There { base, guard } => {
                let there = (guard, base.wrapping_add(offset as u64));
                // SAFETY: by the caller.
                return unsafe { self.run_foreign(request, there) };
            }
            Place::Staged => {
                self.outlets.push(request, import);
                return true;
            }
            Place::Gpu { .. } => return false,
        };
        // SAFETY: `hold` checked the range and took the lease, so the target's
        // bytes are there; the local ones are by the caller.
        unsafe { transfer(request, base.as_ptr().add(offset)) };
        if let (Some(imm), WorkKind::Write) = (request.imm, request.kind)
            && !send_imm(&import.target, imm)
        {
            return false;
        }
        self.ended.done(request.id, 1);
        true
    }

    /// Hands a request over to a GPU.
    ///
    /// # Safety
    /// As [`run`](Self::run), and the request was checked against the held import.
    #[inline(never)]
    unsafe fn run_device_memory(&mut self, request: &WorkRequest) -> bool {
        let Some(import) = self.held.as_ref().map(Held::import) else { return false };
        // SAFETY: by the caller.
        match unsafe { self.gpus.push(self.regions, import, request) } {
            Ok(taken) => taken,
            Err(kind) => self.file(request.id, Err(status(kind))),
        }
    }

    /// Completes what was begun and gives the lease back.
    pub(crate) fn settle(&mut self) {
        #[cfg(target_os = "linux")]
        self.flush();
        self.short = Shortcut::default();
        self.held = None;
    }

    /// Makes the request's import the held one, and checks the request against it.
    #[inline]
    fn hold(&mut self, request: &WorkRequest) -> Result<usize, ErrorKind> {
        let fits = |held: &Held| held.is_of(request) && !self.short.is_spent();
        if !self.held.as_ref().is_some_and(fits) {
            self.renew(request)?;
        }
        match &self.held {
            Some(held) => held.import().check(request.kind, request.remote, request.len),
            None => Err(ErrorKind::RemoteAccess),
        }
    }

    #[inline(never)]
    fn renew(&mut self, request: &WorkRequest) -> Result<(), ErrorKind> {
        self.settle();
        self.outbound(request)?;
        let held = Held::enter(self.imports.find(request.rkey), request)?;
        self.short = Shortcut::new(held.import());
        self.held = Some(held);
        Ok(())
    }

    unsafe fn run_without_import(&mut self, request: &WorkRequest) -> bool {
        // A completion must not overtake those of gathered requests.
        self.settle();
        let outbound = match self.outbound(request) {
            Ok(outbound) => outbound,
            Err(kind) => return self.file(request.id, Err(status(kind))),
        };
        if request.kind == WorkKind::Write && request.imm.is_none() {
            self.peers[request.peer.0 as usize].iter().for_each(Attached::warm_up);
        }
        let is_far = request.kind == WorkKind::Send && request.lkey & FAR != 0;
        let ended = match is_far {
            true => gpu::message::send(self.regions, outbound, request),
            // SAFETY: by the caller.
            false => unsafe { announce(outbound, request) },
        };
        match ended {
            Some(outcome) => self.file(request.id, outcome.map_err(status)),
            None => false,
        }
    }

    fn outbound(&self, request: &WorkRequest) -> Result<&Outbound, ErrorKind> {
        let peer = self.peers.get(request.peer.0 as usize).and_then(Option::as_ref);
        let peer = peer.filter(|peer| !peer.leaving).ok_or(ErrorKind::PeerDied)?;
        let outbound = peer.outbound.as_deref().ok_or(ErrorKind::Unreachable)?;
        if outbound.is_alive() { Ok(outbound) } else { Err(ErrorKind::PeerDied) }
    }

    fn file(&mut self, id: u64, outcome: Result<(), Status>) -> bool {
        #[cfg(target_os = "linux")]
        self.flush();
        self.ended.request(id, outcome);
        true
    }
}

#[cfg(target_os = "linux")]
impl Runner<'_> {
    /// Gathers `request` with its neighbours; one with an imm ends the gathering.
    unsafe fn run_foreign(&mut self, request: &WorkRequest, there: (GuardPage, u64)) -> bool {
        if self.vector.is_full() || !self.vector.takes(request.kind) {
            self.flush();
        }
        if request.imm.is_none() || request.kind != WorkKind::Write {
            self.vector.push(request, there);
            return true;
        }
        self.flush();
        let Some(held) = &self.held else { return false };
        let target = held.import().target.clone();
        // SAFETY: by the caller.
        let outcome = unsafe { crate::foreign::run_one(&target, request, there) };
        if let (Ok(()), Some(imm)) = (outcome, request.imm)
            && !send_imm(&target, imm)
        {
            return false;
        }
        self.file(request.id, outcome)
    }

    fn flush(&mut self) {
        if let (Some(held), false) = (&self.held, self.vector.is_empty()) {
            // SAFETY: the vector holds accepted requests only, whose local spans
            // are valid by the contract of `post`; the lease is still held.
            unsafe {
                self.vector.flush(&held.import().target, |id, outcome| self.ended.request(id, outcome))
            };
        }
    }
}

impl Drop for Runner<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Moves the bytes of a write or read between the local span and `remote`.
///
/// # Safety
/// `request.len` bytes are valid at both ends.
#[inline(always)]
pub(crate) unsafe fn transfer(request: &WorkRequest, remote: *mut u8) {
    let strategy = request.strategy;
    let (to, from) = match request.kind {
        WorkKind::Read => (request.local, remote.cast_const()),
        _ => (remote, request.local.cast_const()),
    };
    // SAFETY: by the caller.
    unsafe { copy::copy(strategy, to, from, request.len as usize) };
    copy::finish(strategy);
}

/// Sends an imm to a peer and wakes it if it sleeps; `false` if its lane is full.
#[inline]
pub(crate) fn send_imm(outbound: &Outbound, imm: u32) -> bool {
    lane::send_imm(outbound.layout(), imm, || outbound.ring())
}

/// Runs a message or an empty write; `None` if the lane is full.
///
/// # Safety
/// The local span of a message is readable.
pub(crate) unsafe fn announce(outbound: &Outbound, request: &WorkRequest) -> Option<Result<(), ErrorKind>> {
    let sent = match (request.kind, request.imm) {
        (WorkKind::Send, _) if request.len > MESSAGE as u64 => return Some(Err(ErrorKind::TooLarge)),
        // SAFETY: the length was checked; the span is the caller's to vouch for.
        (WorkKind::Send, imm) => unsafe {
            let ring = || outbound.ring();
            lane::send_message(outbound.layout(), request.local, request.len as usize, imm, ring)
        },
        (WorkKind::Write, Some(imm)) => send_imm(outbound, imm),
        _ => true,
    };
    sent.then_some(Ok(()))
}
