//! What a shared file must be on Linux.

use std::os::fd::BorrowedFd;

use multirail_spi::{Error, ErrorKind, HostSharing, Result, commit_file, populate_range};
use rustix::fs::{SealFlags, SeekFrom, Stat};

use super::FilePart;

/// The kernel's `TMPFS_MAGIC` (linux/magic.h), which memfds, POSIX shared memory and files of tmpfs have.
const TMPFS: u64 = 0x0102_1994;

/// Puts memory under all `len` bytes of `file`, which this process owns, before a peer maps it.
///
/// # Errors
/// As [`commit_file`].
pub(crate) fn commit(operation: &'static str, file: BorrowedFd<'_>, len: usize) -> Result<()> {
    // A file that is open for reading alone cannot be committed, but may have all its memory already.
    if has_blocks(file, len) { Ok(()) } else { commit_file(operation, file, len) }
}

pub(super) fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u64 == TMPFS)
}

/// Returns true if `file` holds exactly `len` bytes and can never have another size. On the portable path, the second
/// is not checked.
pub(super) fn has_fixed_size(file: BorrowedFd<'_>, len: usize) -> bool {
    let is_sealed = || {
        rustix::fs::fcntl_get_seals(file)
            .is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW))
    };
    let is_fixed = HostSharing::of_this_process().is_ok_and(|sharing| sharing.is_portable() || is_sealed());
    let has_len = |stat: Stat| u64::try_from(stat.st_size) == Ok(len as u64);
    is_fixed && len > 0 && rustix::fs::fstat(file).is_ok_and(has_len)
}

/// Returns true if the part of the file has the memory that it must have.
pub(super) fn has_memory(file: BorrowedFd<'_>, part: &FilePart) -> bool {
    if part.is_whole() {
        return has_blocks(file, part.committed);
    }
    // The file has blocks elsewhere. The kernel counts pages that were only allocated as holes; but the owner has
    // filled them, if it keeps to the rules.
    let end = part.offset.checked_add(part.committed as u64);
    rustix::fs::seek(file, SeekFrom::Hole(part.offset)).is_ok_and(|hole| end.is_some_and(|end| hole >= end))
}

/// Returns true if the file has blocks for `len` bytes. Blocks that are swapped out count. stat(2) counts in units of
/// 512 bytes.
fn has_blocks(file: BorrowedFd<'_>, len: usize) -> bool {
    let has_blocks = |stat: Stat| {
        u64::try_from(stat.st_blocks).is_ok_and(|blocks| blocks.saturating_mul(512) >= len as u64)
    };
    rustix::fs::fstat(file).is_ok_and(has_blocks)
}

/// Puts memory under `len` bytes from `start` on, which are mapped, whoever owns their file.
///
/// # Errors
/// `Exhausted` if there is no memory: an access would raise `SIGBUS`.
pub(crate) fn commit_mapped(
    operation: &'static str,
    start: *const u8,
    len: usize,
    writable: bool,
) -> Result<()> {
    populate_range(start, len, writable).map_err(|why| {
        let context = format!(
            "there is no memory for {len} bytes of shared memory: free some, or raise vm.overcommit_ratio where \
             vm.overcommit_memory is 2"
        );
        Error::new(ErrorKind::Exhausted, operation, context).with_source(why)
    })
}

/// Whether [`commit_mapped`] works: from Linux 5.14 on. The answer is always the same, because the question takes no
/// memory: for no bytes at all, the kernel says whether it knows the advice (madvise(2)).
pub(crate) fn can_commit_mapped() -> bool {
    // SAFETY: advice on no bytes changes none.
    unsafe { rustix::mm::madvise(std::ptr::null_mut(), 0, rustix::mm::Advice::LinuxPopulateWrite) }.is_ok()
}
