//! What a shared file must be on macOS: a POSIX shared memory object. The facts are from XNU's bsd/kern/posix_shm.c.

use std::os::fd::BorrowedFd;

use multirail_spi::Result;

use super::FilePart;

/// The largest page, in bytes (Apple's processors).
const LARGEST_PAGE: u64 = 16 << 10;

/// Does nothing: the kernel gets a page at its first access, whatever a process asks for.
pub(crate) fn commit(_: &'static str, _: BorrowedFd<'_>, _: usize) -> Result<()> {
    Ok(())
}

/// Returns true for a POSIX shared memory object, whose mode has no file type (`pshm_stat`). All other things that can
/// be mapped have one.
pub(super) fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == 0)
}

/// Returns true if `file`, a POSIX shared memory object, holds `len` bytes, which the kernel rounds up to a page. A
/// size other than 0 was set once, and cannot be set again (`pshm_truncate`).
pub(super) fn has_fixed_size(file: BorrowedFd<'_>, len: usize) -> bool {
    let least = len as u64;
    let fits = |size: u64| (least..least.saturating_add(LARGEST_PAGE)).contains(&size);
    len > 0 && rustix::fs::fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(fits))
}

/// Returns true: the kernel swaps, compresses, or ends processes, but raises no signal for a page that it has not got.
pub(super) fn has_memory(_: BorrowedFd<'_>, _: &FilePart) -> bool {
    true
}

/// Does nothing, as [`commit`].
pub(crate) fn commit_mapped(_: &'static str, _: *const u8, _: usize, _: bool) -> Result<()> {
    Ok(())
}

/// Returns true: no memory has to be committed.
pub(crate) fn can_commit_mapped() -> bool {
    true
}
