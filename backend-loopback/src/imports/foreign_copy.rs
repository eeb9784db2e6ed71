//! Copies to and from memory of another process, through the kernel: one call for many pieces.
//!
//! [`probe`](crate::other_process::vm_call::probe) has found out at the import that the kernel allows the calls. A
//! peer's pid may belong to another program by the time of a call, so each call checks that with a
//! [`GuardPage`].

use libc::iovec;
use multirail_spi::{ErrorKind, Status, WorkKind, WorkRequest};

use crate::other_process::GuardPage;
use crate::other_process::vm_call::errno_status;
use crate::outbound::{Outbound, PeerLocation};
use crate::status::status;

/// Pieces per system call besides the guard page's: the kernel's limit (UIO_MAXIOV) is 1024.
const MAX_PIECES: usize = 1023;

/// Consecutive requests to one foreign region, for one call.
#[derive(Default)]
pub(crate) struct ForeignBatch {
    kind: Option<WorkKind>,
    guard: Option<GuardPage>,
    /// The first piece, here and in `remote`, is reserved for the guard page.
    local: Vec<iovec>,
    remote: Vec<iovec>,
    ids: Vec<u64>,
    outcomes: Vec<Result<(), Status>>,
}

impl ForeignBatch {
    /// Returns true if the batch has no request.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns true if no request can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.ids.len() == MAX_PIECES
    }

    /// Returns true if requests of this kind can be added: one call either reads or writes.
    pub(crate) fn takes(&self, kind: WorkKind) -> bool {
        self.is_empty() || self.kind == Some(kind)
    }

    /// Adds a request for an address of the process that has the guard page. Moves no byte yet.
    pub(crate) fn push(&mut self, request: &WorkRequest, (guard, address): (GuardPage, u64)) {
        let [local, remote] = pieces(request, address);
        self.kind = Some(request.kind);
        self.guard = Some(guard);
        self.ids.push(request.id);
        if self.local.is_empty() {
            self.local.push(EMPTY);
            self.remote.push(EMPTY);
        }
        self.local.push(local);
        self.remote.push(remote);
    }

    /// Moves the bytes of all requests, and calls `each` with the outcome of each one, in order.
    ///
    /// # Safety
    /// The local spans of all requests in the batch are valid.
    pub(crate) unsafe fn flush(&mut self, target: &Outbound, mut each: impl FnMut(u64, Result<(), Status>)) {
        let (Some(kind), Some(guard)) = (self.kind.take(), self.guard.take()) else { return };
        // SAFETY: by the caller.
        unsafe { copy_pieces(target, guard, kind, &mut self.local, &mut self.remote, &mut self.outcomes) };
        self.ids.drain(..).zip(self.outcomes.drain(..)).for_each(|(id, outcome)| each(id, outcome));
        self.local.clear();
        self.remote.clear();
    }
}

/// Moves the bytes of one request.
///
/// # Safety
/// The local span of the request is valid.
pub(crate) unsafe fn copy_one(
    target: &Outbound,
    request: &WorkRequest,
    (guard, address): (GuardPage, u64),
) -> Result<(), Status> {
    let [mut local, mut remote] = pieces(request, address).map(|piece| [EMPTY, piece]);
    let mut outcomes = Vec::with_capacity(1);
    // SAFETY: by the caller.
    unsafe { copy_pieces(target, guard, request.kind, &mut local, &mut remote, &mut outcomes) };
    outcomes.pop().unwrap_or(Err(status(ErrorKind::Io)))
}

/// A piece that is filled in later.
const EMPTY: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn pieces(request: &WorkRequest, address: u64) -> [iovec; 2] {
    let len = request.len as usize;
    [
        iovec { iov_base: request.local.cast(), iov_len: len },
        iovec { iov_base: address as *mut _, iov_len: len },
    ]
}

/// Moves the pieces of `local` and `remote`, of which the first is reserved for the guard page. Closes the connection
/// if the peer is dead.
unsafe fn copy_pieces(
    target: &Outbound,
    guard: GuardPage,
    kind: WorkKind,
    local: &mut [iovec],
    remote: &mut [iovec],
    outcomes: &mut Vec<Result<(), Status>>,
) {
    let PeerLocation::OtherProcess(connection) = &target.location else {
        return outcomes.resize(local.len() - 1, Err(status(ErrorKind::RemoteAccess)));
    };
    let pid = connection.process.pid().as_raw_nonzero().get();
    // SAFETY: by the caller.
    unsafe { run_calls(pid, guard, kind, local, remote, outcomes) };
    if outcomes.iter().all(Result::is_ok) {
        return;
    }
    // The pid of a dead peer may belong to a process that this one may not access, so the errno means nothing.
    let gone = Err(status(ErrorKind::PeerDied));
    if !connection.process.is_alive() {
        outcomes.iter_mut().filter(|outcome| outcome.is_err()).for_each(|outcome| *outcome = gone);
    }
    if outcomes.contains(&gone) {
        target.close();
    }
}

/// Calls the kernel until every piece has an outcome.
unsafe fn run_calls(
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
        // The guard page replaces the last piece that is done.
        [local[at], remote[at]] = guard.pieces(&mut word);
        let (local, remote) = (&mut local[at..], &mut remote[at..]);
        let count = local.len() as libc::c_ulong;
        // SAFETY: the local spans are valid by the caller, and `word` is a local variable; the kernel checks the
        // others.
        let moved = unsafe { call(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) };
        match usize::try_from(moved) {
            // Another address space, with another word at the guard page's address.
            Ok(moved) if moved < GuardPage::LEN || word != guard.word() => {
                outcomes.resize(total, Err(status(ErrorKind::PeerDied)));
            }
            // The call moved the guard page alone: the piece after it is at fault.
            Ok(GuardPage::LEN) => outcomes.push(Err(errno_status(libc::EFAULT))),
            Ok(moved) => advance(&mut local[1..], &mut remote[1..], moved - GuardPage::LEN, outcomes),
            Err(_) => match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                // Another address space, with nothing mapped at the guard page's address.
                libc::EFAULT => outcomes.resize(total, Err(status(ErrorKind::PeerDied))),
                code => outcomes.resize(total, Err(errno_status(code))),
            },
        }
    }
}

/// Records the pieces that lie within the first `moved` bytes as done, and cuts the moved part off the next piece.
fn advance(
    local: &mut [iovec],
    remote: &mut [iovec],
    mut moved: usize,
    outcomes: &mut Vec<Result<(), Status>>,
) {
    for (local, remote) in local.iter_mut().zip(remote) {
        if moved < local.iov_len {
            for piece in [local, remote] {
                piece.iov_base = piece.iov_base.wrapping_byte_add(moved);
                piece.iov_len -= moved;
            }
            return;
        }
        moved -= local.iov_len;
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
        let (guard, mut outcomes) = (GuardPage::own().unwrap(), Vec::new());
        let mut local = [EMPTY, at(&mut from, 0), at(&mut from, 4), at(&mut from, 8)];
        let bad = piece(std::ptr::without_provenance_mut(8), 4);
        let mut remote = [EMPTY, at(&mut to, 0), bad, at(&mut to, 8)];
        // SAFETY: the local pieces lie in `from`, the good remote ones in `to`.
        unsafe { run_calls(pid, guard, WorkKind::Write, &mut local, &mut remote, &mut outcomes) };
        let bad = Err(errno_status(libc::EFAULT));
        assert_eq!(outcomes, [Ok(()), bad, Ok(())]);
        assert_eq!(to, [7, 7, 7, 7, 0, 0, 0, 0, 7, 7, 7, 7]);
    }

    #[test]
    fn no_byte_moves_where_the_guard_page_is_missing_or_another() {
        let pid = std::process::id() as libc::pid_t;
        let page = [0_u64];
        for (kind, elsewhere) in [
            (WorkKind::Write, GuardPage::at(8, 1)),
            (WorkKind::Read, GuardPage::at(8, 1)),
            // A page is mapped there, with another word in it.
            (WorkKind::Read, GuardPage::at(page.as_ptr() as u64, 1)),
        ] {
            let (mut here, mut there) = ([7_u8; 8], [1_u8; 8]);
            let piece = |bytes: &mut [u8]| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 4 };
            let mut local = [EMPTY, piece(&mut here), piece(&mut here[4..])];
            let mut remote = [EMPTY, piece(&mut there), piece(&mut there[4..])];
            let mut outcomes = Vec::new();
            // SAFETY: the local pieces lie in `here`.
            unsafe { run_calls(pid, elsewhere, kind, &mut local, &mut remote, &mut outcomes) };
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
