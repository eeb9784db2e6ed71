//! Memory of another process, through the kernel: one call for many pieces.
//!
//! The kernel lets a process in by the rules of ptrace. Ours are stricter in one
//! point: both must have one effective user id. On top of that the kernel wants the
//! caller's real user and group id to be the target's real, effective and saved ones,
//! the target to be dumpable, in the caller's user namespace or below, and without
//! capabilities that the caller lacks; Yama and seccomp may refuse the rest. Whether all
//! that holds is found out by [`probe`] at every import, and [`crate::refusal`] says
//! what does not.
//!
//! A peer's number may mean another program by the time of a call: [`crate::guard`] has each call
//! find that out by itself.

use libc::iovec;
use multirail_spi::{Access, ErrorKind, Status, WorkKind, WorkRequest};
use rustix::process::Pid;

use crate::guard::GuardPage;
use crate::peer::{Outbound, Reach};
use crate::status::{from_errno, status};

/// Pieces per system call beside the guard's: the kernel's limit (UIO_MAXIOV) is 1024.
const PIECES: usize = 1023;

/// Neighbouring requests to one foreign region, gathered.
#[derive(Default)]
pub(crate) struct Vector {
    kind: Option<WorkKind>,
    guard: Option<GuardPage>,
    /// The first one is the guard's place, here and in `remote`.
    local: Vec<iovec>,
    remote: Vec<iovec>,
    ids: Vec<u64>,
    outcomes: Vec<Result<(), Status>>,
}

impl Vector {
    /// Whether nothing is gathered.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Whether nothing more can be.
    pub(crate) fn is_full(&self) -> bool {
        self.ids.len() == PIECES
    }

    /// Whether requests of this kind can join the gathered ones.
    pub(crate) fn takes(&self, kind: WorkKind) -> bool {
        self.is_empty() || self.kind == Some(kind)
    }

    /// Gathers one more, for an address behind that guard; nothing moves yet.
    pub(crate) fn push(&mut self, request: &WorkRequest, (guard, address): (GuardPage, u64)) {
        let [local, remote] = pieces(request, address);
        self.kind = Some(request.kind);
        self.guard = Some(guard);
        self.ids.push(request.id);
        if self.local.is_empty() {
            self.local.push(NOTHING);
            self.remote.push(NOTHING);
        }
        self.local.push(local);
        self.remote.push(remote);
    }

    /// Moves all, and tells each one's end in order.
    ///
    /// # Safety
    /// The local spans of all gathered requests are valid.
    pub(crate) unsafe fn flush(&mut self, target: &Outbound, mut each: impl FnMut(u64, Result<(), Status>)) {
        let (Some(kind), Some(guard)) = (self.kind.take(), self.guard.take()) else { return };
        // SAFETY: by the caller.
        unsafe { move_all(target, guard, kind, &mut self.local, &mut self.remote, &mut self.outcomes) };
        self.ids.drain(..).zip(self.outcomes.drain(..)).for_each(|(id, outcome)| each(id, outcome));
        self.local.clear();
        self.remote.clear();
    }
}

/// Moves one request's bytes.
///
/// # Safety
/// Its local span is valid.
pub(crate) unsafe fn run_one(
    target: &Outbound,
    request: &WorkRequest,
    (guard, address): (GuardPage, u64),
) -> Result<(), Status> {
    let [mut local, mut remote] = pieces(request, address).map(|piece| [NOTHING, piece]);
    let mut outcomes = Vec::with_capacity(1);
    // SAFETY: by the caller.
    unsafe { move_all(target, guard, request.kind, &mut local, &mut remote, &mut outcomes) };
    outcomes.pop().unwrap_or(Err(status(ErrorKind::Io)))
}

/// The calls that moving bytes takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Read,
    Write,
}

impl Call {
    /// As the kernel names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "process_vm_readv",
            Self::Write => "process_vm_writev",
        }
    }

    /// Tries it on `pid` without touching a byte of its memory. The errno of a refusal.
    ///
    /// The address is none that user memory has: a call that is allowed ends with
    /// `EFAULT`, which comes after every check of who may do what.
    pub(crate) fn try_on(self, pid: Pid) -> Result<(), i32> {
        let mut byte = 0_u8;
        let here = iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let there = iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX - 4095), iov_len: 1 };
        let call = match self {
            Self::Read => libc::process_vm_readv,
            Self::Write => libc::process_vm_writev,
        };
        // SAFETY: the local byte is ours; the kernel checks the remote address.
        let moved = unsafe { call(pid.as_raw_nonzero().get(), &raw const here, 1, &raw const there, 1, 0) };
        match std::io::Error::last_os_error().raw_os_error() {
            Some(code) if moved < 0 && from_errno(code).kind == ErrorKind::Permission => Err(code),
            _ => Ok(()),
        }
    }
}

/// Whether the kernel lets us use `pid`'s memory as `access` says; else the call it
/// refuses, and how.
pub(crate) fn probe(pid: Pid, access: Access) -> Result<(), (Call, i32)> {
    for (right, call) in [(Access::REMOTE_WRITE, Call::Write), (Access::REMOTE_READ, Call::Read)] {
        if access.contains(right) {
            call.try_on(pid).map_err(|errno| (call, errno))?;
        }
    }
    Ok(())
}

/// A place for a piece that is put in later.
const NOTHING: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn pieces(request: &WorkRequest, address: u64) -> [iovec; 2] {
    let len = request.len as usize;
    [
        iovec { iov_base: request.local.cast(), iov_len: len },
        iovec { iov_base: address as *mut _, iov_len: len },
    ]
}

/// Moves the pieces behind the first of `local` and `remote`, which is the guard's place.
unsafe fn move_all(
    target: &Outbound,
    guard: GuardPage,
    kind: WorkKind,
    local: &mut [iovec],
    remote: &mut [iovec],
    outcomes: &mut Vec<Result<(), Status>>,
) {
    let Reach::Process(line) = &target.reach else {
        return outcomes.resize(local.len() - 1, Err(status(ErrorKind::RemoteAccess)));
    };
    let pid = line.process.pid().as_raw_nonzero().get();
    // SAFETY: by the caller.
    unsafe { move_pieces(pid, guard, kind, local, remote, outcomes) };
    if outcomes.iter().all(Result::is_ok) {
        return;
    }
    // A dead peer's number may mean a process that is not for us to reach.
    let gone = Err(status(ErrorKind::PeerDied));
    if !line.process.is_alive() {
        outcomes.iter_mut().filter(|outcome| outcome.is_err()).for_each(|outcome| *outcome = gone);
    }
    if outcomes.contains(&gone) {
        target.hang_up();
    }
}

unsafe fn move_pieces(
    pid: libc::pid_t,
    guard: GuardPage,
    kind: WorkKind,
    local: &mut [iovec],
    remote: &mut [iovec],
    outcomes: &mut Vec<Result<(), Status>>,
) {
    let is_read = kind == WorkKind::Read;
    let call = if is_read { libc::process_vm_readv } else { libc::process_vm_writev };
    let total = local.len() - 1;
    while outcomes.len() < total {
        let at = outcomes.len();
        let mut word = if is_read { 0 } else { guard.word() };
        // In the place of the piece that is done.
        [local[at], remote[at]] = guard.pieces(&mut word);
        let (here, there) = (&mut local[at..], &mut remote[at..]);
        let count = here.len() as libc::c_ulong;
        // SAFETY: the local spans are valid by the caller, and `word` is ours; the kernel checks the others.
        let moved = unsafe { call(pid, here.as_ptr(), count, there.as_ptr(), count, 0) };
        match usize::try_from(moved) {
            // Another address space, with something else at the guard's place.
            Ok(moved) if moved < GuardPage::LEN || word != guard.word() => {
                outcomes.resize(total, Err(status(ErrorKind::PeerDied)));
            }
            // The piece behind the guard is at fault: nothing before it was left over.
            Ok(GuardPage::LEN) => outcomes.push(Err(from_errno(libc::EFAULT))),
            Ok(moved) => advance(&mut here[1..], &mut there[1..], moved - GuardPage::LEN, outcomes),
            Err(_) => match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                // Another address space, with nothing at the guard's place.
                libc::EFAULT => outcomes.resize(total, Err(status(ErrorKind::PeerDied))),
                code => outcomes.resize(total, Err(from_errno(code))),
            },
        }
    }
}

/// Files whole pieces among the first `moved` bytes as done, and cuts a part from the next.
fn advance(
    here: &mut [iovec],
    there: &mut [iovec],
    mut moved: usize,
    outcomes: &mut Vec<Result<(), Status>>,
) {
    for (here, there) in here.iter_mut().zip(there) {
        if moved < here.iov_len {
            for piece in [here, there] {
                piece.iov_base = piece.iov_base.wrapping_byte_add(moved);
                piece.iov_len -= moved;
            }
            return;
        }
        moved -= here.iov_len;
        outcomes.push(Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_page_fails_its_own_piece_only() {
        let pid = std::process::id() as libc::pid_t;
        let (mut from, mut to) = (vec![7_u8; 12], vec![0_u8; 12]);
        let piece = |base: *mut u8, len| iovec { iov_base: base.cast(), iov_len: len };
        let at = |bytes: &mut Vec<u8>, n: usize| piece(bytes.as_mut_ptr().wrapping_add(n), 4);
        let (guard, mut outcomes) = (GuardPage::ours().unwrap(), Vec::new());
        let mut local = [NOTHING, at(&mut from, 0), at(&mut from, 4), at(&mut from, 8)];
        let bad = piece(std::ptr::without_provenance_mut(8), 4);
        let mut remote = [NOTHING, at(&mut to, 0), bad, at(&mut to, 8)];
        // SAFETY: the local pieces lie in `from`, the good remote ones in `to`.
        unsafe { move_pieces(pid, guard, WorkKind::Write, &mut local, &mut remote, &mut outcomes) };
        let bad = Err(from_errno(libc::EFAULT));
        assert_eq!(outcomes, [Ok(()), bad, Ok(())]);
        assert_eq!(to, [7, 7, 7, 7, 0, 0, 0, 0, 7, 7, 7, 7]);
    }

    #[test]
    fn nothing_moves_where_the_guard_is_another() {
        let pid = std::process::id() as libc::pid_t;
        let page = [0_u64];
        for (kind, elsewhere) in [
            (WorkKind::Write, GuardPage::at(8, 1)),
            (WorkKind::Read, GuardPage::at(8, 1)),
            // Something is there, with another word in it.
            (WorkKind::Read, GuardPage::at(page.as_ptr() as u64, 1)),
        ] {
            let (mut here, mut there) = ([7_u8; 8], [1_u8; 8]);
            let piece = |bytes: &mut [u8]| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 4 };
            let mut local = [NOTHING, piece(&mut here), piece(&mut here[4..])];
            let mut remote = [NOTHING, piece(&mut there), piece(&mut there[4..])];
            let mut outcomes = Vec::new();
            // SAFETY: the local pieces lie in `here`.
            unsafe { move_pieces(pid, elsewhere, kind, &mut local, &mut remote, &mut outcomes) };
            assert_eq!(outcomes, [Err(status(ErrorKind::PeerDied)); 2]);
            assert_eq!(there, [1; 8]);
        }
    }

    #[test]
    fn a_partial_transfer_goes_on_where_it_stopped() {
        let piece = |n: usize, len| iovec { iov_base: std::ptr::without_provenance_mut(n), iov_len: len };
        let (mut here, mut there) = ([piece(100, 10), piece(200, 10)], [piece(300, 10), piece(400, 10)]);
        let mut outcomes = Vec::new();
        advance(&mut here, &mut there, 13, &mut outcomes);
        assert_eq!(outcomes.len(), 1);
        assert_eq!((here[1].iov_base as usize, here[1].iov_len), (203, 7));
        assert_eq!((there[1].iov_base as usize, there[1].iov_len), (403, 7));
    }
}
