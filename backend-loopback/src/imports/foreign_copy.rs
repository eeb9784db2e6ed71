//! Copies to and from memory of another process, through the kernel: one call for many pieces.
//!
//! [`probe`](crate::other_process::vm_call::probe) has found out at the import that the kernel allows the calls. A
//! peer's pid may belong to another program by the time of a call, so each call checks that with a
//! [`GuardPage`].
//!
//! The kernel looks the pages of each remote piece up, which takes longer than to copy 1 KiB. So neighbours in remote
//! memory are one remote piece, wherever their local spans are.

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
    /// The local spans: one for each request. The first piece, here and in `remote`, is reserved for the guard page.
    local: Vec<iovec>,
    /// The same bytes in remote memory.
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
        match self.remote[1..].last_mut() {
            Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == remote.iov_base => {
                last.iov_len += remote.iov_len;
            }
            _ => self.remote.push(remote),
        }
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

/// Moves the pieces of `local` and `remote`, of which the first is reserved for the guard page. Each local piece has an
/// outcome. Closes the connection if the peer is dead.
unsafe fn copy_pieces(
    target: &Outbound,
    guard: GuardPage,
    kind: WorkKind,
    local: &mut [iovec],
    remote: &mut [iovec],
    outcomes: &mut Vec<Result<(), Status>>,
) {
    let connection = match &target.location {
        PeerLocation::OtherProcess(connection) => Some(connection),
        PeerLocation::ThisProcess { .. } => None,
    };
    let Some((connection, pid)) = connection.and_then(|it| it.process.pid().map(|pid| (it, pid))) else {
        return outcomes.resize(local.len() - 1, Err(status(ErrorKind::RemoteAccess)));
    };
    let pid = pid.as_raw_nonzero().get();
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

/// Calls the kernel until every local piece has an outcome.
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
    // The remote pieces that are done.
    let mut used = 0;
    while outcomes.len() < total {
        let at = outcomes.len();
        let mut word = if is_read { 0 } else { guard.word() };
        // The guard page replaces the last piece that is done.
        [local[at], remote[used]] = guard.pieces(&mut word);
        let (local, remote) = (&mut local[at..], &mut remote[used..]);
        let [locals, remotes] = [local.len(), remote.len()].map(|count| count as libc::c_ulong);
        // SAFETY: the local spans are valid by the caller, and `word` is a local variable; the kernel checks the
        // others.
        let moved = unsafe { call(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0) };
        match usize::try_from(moved) {
            // Another address space, with another word at the guard page's address.
            Ok(moved) if moved < GuardPage::LEN || word != guard.word() => {
                outcomes.resize(total, Err(status(ErrorKind::PeerDied)));
            }
            // The call moved the guard page alone: the piece after it is at fault.
            Ok(GuardPage::LEN) => {
                outcomes.push(Err(errno_status(libc::EFAULT)));
                used += skip(&mut remote[1..], local[1].iov_len);
            }
            Ok(moved) => {
                let moved = moved - GuardPage::LEN;
                outcomes.resize(at + skip(&mut local[1..], moved), Ok(()));
                used += skip(&mut remote[1..], moved);
            }
            Err(_) => match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                // Another address space, with nothing mapped at the guard page's address.
                libc::EFAULT => outcomes.resize(total, Err(status(ErrorKind::PeerDied))),
                code => outcomes.resize(total, Err(errno_status(code))),
            },
        }
    }
}

/// Returns how many pieces lie within the first `bytes` bytes, and cuts the rest of these bytes off the next piece.
fn skip(pieces: &mut [iovec], mut bytes: usize) -> usize {
    for (number, piece) in pieces.iter_mut().enumerate() {
        if bytes < piece.iov_len {
            piece.iov_base = piece.iov_base.wrapping_byte_add(bytes);
            piece.iov_len -= bytes;
            return number;
        }
        bytes -= piece.iov_len;
    }
    pieces.len()
}

#[cfg(test)]
mod tests {
    use multirail_spi::PeerSlot;
    use multirail_spi::copy::CopyStrategy;

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
        let mut pieces = [piece(100, 10), piece(200, 10)];
        assert_eq!(skip(&mut pieces, 13), 1);
        assert_eq!((pieces[1].iov_base as usize, pieces[1].iov_len), (203, 7));
        assert_eq!(skip(&mut pieces[1..], 7), 1);
    }

    /// Neighbours in remote memory are one piece there. A page in it that may not be used fails the requests that lie
    /// in it, and no others.
    #[test]
    fn neighbours_share_a_remote_piece_and_no_fault() {
        let page = rustix::param::page_size();
        let mut from: Vec<u8> = (0..4 * page).map(|at| (at / (page / 2)) as u8 + 1).collect();
        for (kind, first_bad) in [(WorkKind::Write, 1), (WorkKind::Read, 2)] {
            // SAFETY: a mapping of its own.
            let to = unsafe {
                rustix::mm::mmap_anonymous(
                    std::ptr::null_mut(),
                    4 * page,
                    rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                    rustix::mm::MapFlags::PRIVATE,
                )
            }
            .unwrap();
            let bad = to.wrapping_byte_add(first_bad * page);
            // SAFETY: a page of the mapping, which nothing refers to.
            unsafe { rustix::mm::mprotect(bad, page, rustix::mm::MprotectFlags::empty()) }.unwrap();

            let (mut batch, guard) = (ForeignBatch::default(), GuardPage::own().unwrap());
            // Half a page each, in the reverse order here.
            for half in 0..8 {
                let request = WorkRequest {
                    id: half as u64,
                    peer: PeerSlot(0),
                    kind,
                    local: from.as_mut_ptr().wrapping_add((7 - half) * page / 2),
                    lkey: 0,
                    len: page as u64 / 2,
                    remote: 0,
                    rkey: 0,
                    imm: None,
                    strategy: CopyStrategy::Plain,
                };
                batch.push(&request, (guard, to as u64 + (half * page / 2) as u64));
            }
            assert_eq!(batch.remote.len(), 2, "the guard page's and one more");
            let (mut outcomes, pid) = (Vec::new(), std::process::id() as libc::pid_t);
            // SAFETY: the local pieces lie in `from`.
            unsafe { run_calls(pid, guard, kind, &mut batch.local, &mut batch.remote, &mut outcomes) };
            for (half, outcome) in outcomes.iter().enumerate() {
                let expected = if half / 2 == first_bad { Err(errno_status(libc::EFAULT)) } else { Ok(()) };
                assert_eq!(*outcome, expected, "{kind:?}, half {half}");
            }
            if kind == WorkKind::Write {
                for half in (0..8).filter(|half| half / 2 != first_bad) {
                    // SAFETY: these pages of the mapping can be read.
                    let there = unsafe { *to.cast::<u8>().wrapping_add(half * page / 2) };
                    assert_eq!(there, from[(7 - half) * page / 2], "half {half}");
                }
            } else {
                for half in 0..8 {
                    let here = from[(7 - half) * page / 2];
                    assert_eq!(here == 0, half / 2 != first_bad, "half {half}");
                }
            }
            // SAFETY: nothing refers to the mapping.
            unsafe { rustix::mm::munmap(to, 4 * page) }.unwrap();
        }
    }
}
