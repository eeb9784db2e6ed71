//! Mapped memory, aligned so that huge pages fit.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::mm::{MapFlags, ProtFlags};

#[cfg(target_os = "linux")]
use crate::{Error, ErrorKind, Result};

/// The bytes of a huge page, on x86-64 and on aarch64 with small pages of 4 KiB.
const HUGE: usize = 2 << 20;

/// A range of this process's addresses, mapped until it is dropped.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address; access through it is governed by the contract of the mapping's owner.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`, shared with everyone who maps it.
    pub fn of_file(file: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        if len < HUGE || cfg!(not(target_os = "linux")) {
            // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
            let start = unsafe { rustix::mm::mmap(null_mut(), len, protection, MapFlags::SHARED, file, 0)? };
            return Self::new(start.cast(), len);
        }
        // The kernel maps a huge page only if the address and the offset in the file are equal modulo 2 MiB. The offset
        // is 0 here, so the address must be a multiple of 2 MiB.
        let mut place = Self::reserve(len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?)?;
        place.trim(len);
        let (at, flags) = (place.start.as_ptr().cast(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: replaces the pages of `place`, which nobody else knows of.
        unsafe { rustix::mm::mmap(at, len, protection, flags, file, 0)? };
        Ok(place)
    }

    /// Maps `len` bytes of `file` from `offset` on, which is a multiple of the page size. In small pages.
    #[cfg(target_os = "linux")]
    pub fn of_file_range(file: BorrowedFd<'_>, offset: u64, len: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, protection, MapFlags::SHARED, file, offset)? };
        Self::new(start.cast(), len)
    }

    /// Maps `len` bytes of a PCI device's memory (p2pmem). `file` is the device's file `allocate`: the kernel allocates
    /// new bytes at each call.
    #[cfg(target_os = "linux")]
    pub fn of_device(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, protection, MapFlags::SHARED, file, 0)? };
        Self::new(start.cast(), len)
    }

    /// Maps `len` zeroed bytes that only this process has.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), len, protection, MapFlags::PRIVATE)? };
        Self::new(start.cast(), len)
    }

    /// Reserves addresses without memory.
    fn reserve(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), len, ProtFlags::empty(), flags)? };
        Self::new(start.cast(), len)
    }

    fn new(start: *mut u8, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Shrinks a reservation of `len + HUGE` bytes to `len` bytes that begin at a multiple of [`HUGE`].
    fn trim(&mut self, len: usize) {
        let page = page_size();
        let skip = self.start.as_ptr().align_offset(HUGE);
        let end = skip + len.next_multiple_of(page);
        let (start, whole) = (self.start.as_ptr(), self.len.next_multiple_of(page));
        // SAFETY: both ends lie within the reservation, which nobody else knows of.
        let trimmed = unsafe {
            let head = if skip > 0 { rustix::mm::munmap(start.cast(), skip) } else { Ok(()) };
            let tail =
                if end < whole { rustix::mm::munmap(start.add(end).cast(), whole - end) } else { Ok(()) };
            // SAFETY: `skip` is less than `HUGE`, so the result is within the reservation.
            self.start = self.start.add(skip);
            head.and(tail)
        };
        debug_assert!(trimmed.is_ok());
        self.len = len;
    }

    /// Replaces the small pages of each whole 2 MiB of the mapping by a huge page, whatever the system's defaults are.
    /// The bytes stay the same.
    #[cfg(target_os = "linux")]
    pub fn make_huge(&self) -> io::Result<()> {
        let whole = self.len - self.len % HUGE;
        for offset in (0..whole).step_by(HUGE) {
            // The kernel collapses only a range that has a page already. This call gets the first page: if memory is
            // short, the call fails, whereas an access to the page would raise a signal. SAFETY: within the mapping;
            // the advice changes no byte.
            unsafe {
                let at = self.start.as_ptr().add(offset).cast();
                rustix::mm::madvise(at, 1, rustix::mm::Advice::LinuxPopulateWrite)?;
            }
        }
        // SAFETY: within the mapping; the advice changes no byte.
        if whole > 0 && unsafe { libc::madvise(self.start.as_ptr().cast(), whole, libc::MADV_COLLAPSE) } != 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Does nothing: only Linux has such a call.
    #[cfg(not(target_os = "linux"))]
    pub fn make_huge(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes the kernel map every page now instead of at its first access. The bytes stay the same. Does nothing on
    /// Linux before 5.14.
    pub fn populate(&self) {
        #[cfg(target_os = "linux")]
        for advice in [rustix::mm::Advice::LinuxPopulateWrite, rustix::mm::Advice::LinuxPopulateRead] {
            // `LinuxPopulateRead` is for a mapping that may only be read.
            // SAFETY: the whole mapping; the advice changes no byte.
            if unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice) }.is_ok() {
                return;
            }
        }
    }

    /// Replaces the pages by zeroed pages that only this process has. A new page takes no memory until its first
    /// access.
    pub(crate) fn discard(&mut self) -> io::Result<()> {
        let (at, protection) = (self.start.as_ptr().cast(), ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces the pages of this mapping alone, whose owner asks for it.
        unsafe { rustix::mm::mmap_anonymous(at, self.len, protection, flags) }?;
        Ok(())
    }

    /// As [`Mapping::discard`], for a range of whole pages. The owner of the range asks for it.
    #[cfg(target_os = "linux")]
    pub(crate) fn discard_range(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        let at = self.start.as_ptr().wrapping_add(offset).cast();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces pages of this mapping alone, whose owner asks for it.
        unsafe { rustix::mm::mmap_anonymous(at, len, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        Ok(())
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

/// Commits memory for the first `len` bytes of `file`, a memfd or a file of tmpfs.
///
/// The kernel raises `SIGBUS` if it finds no memory at the first access to a page: with `vm.overcommit_memory=2` it
/// counts the pages of such a file at their first access. Here it reports the same shortage as an error.
///
/// # Errors
/// `Exhausted` if there is not enough memory; the file may have got a part of it. `Io` if the file is not open for
/// writing.
#[cfg(target_os = "linux")]
pub fn commit_file(operation: &'static str, file: BorrowedFd<'_>, len: usize) -> Result<()> {
    let none = rustix::fs::FallocateFlags::empty();
    match commit_in_steps(len as u64, |start, step| rustix::fs::fallocate(file, none, start, step)) {
        Ok(()) => Ok(()),
        Err(why @ (rustix::io::Errno::NOSPC | rustix::io::Errno::NOMEM)) => {
            let context = format!(
                "there is no memory for {len} bytes of a shared file: free some, or raise \
                 vm.overcommit_ratio where vm.overcommit_memory is 2"
            );
            Err(Error::new(ErrorKind::Exhausted, operation, context).with_source(why))
        }
        Err(why) => Err(Error::os(operation, "committing memory for a shared file", why)),
    }
}

/// Calls `allocate` for the parts of `len` bytes, one after the other.
///
/// Many kernels interrupt `fallocate` at any signal and undo it. Under a profiler that sends 100 signals per second, a
/// single call for several GiB would never succeed. So after an interrupted call, the next part is half as large.
#[cfg(target_os = "linux")]
fn commit_in_steps(
    len: u64,
    mut allocate: impl FnMut(u64, u64) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    const MOST: u64 = 16 << 20;
    const LEAST: u64 = 64 << 10;
    let (mut start, mut step) = (0, MOST);
    while start < len {
        let this = step.min(len - start);
        match allocate(start, this) {
            Ok(()) => (start, step) = (start + this, (2 * step).min(MOST)),
            Err(rustix::io::Errno::INTR) => step = (step / 2).max(LEAST),
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Puts memory under the pages of `len` mapped bytes from `start` on, and maps them: so that a later access raises no
/// signal, whoever owns the file. Of a mapping that is not `writable`, zeroed pages. The error is `INVAL` on Linux
/// before 5.14; any other one but `INTR` and `AGAIN`, which never come, says that there is no memory.
#[cfg(target_os = "linux")]
pub fn populate_range(start: *const u8, len: usize, writable: bool) -> rustix::io::Result<()> {
    use rustix::io::Errno;
    use rustix::mm::Advice;
    let page = page_size();
    let from = start as usize / page * page;
    let len = (start as usize + len).next_multiple_of(page) - from;
    let advice = if writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    loop {
        // SAFETY: the advice changes no byte, and fails for pages that are not mapped.
        match unsafe { rustix::mm::madvise(start.with_addr(from).cast_mut().cast(), len, advice) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
}

/// The bytes of a small page. This calls libc, because rustix reads memory that valgrind does not map.
pub fn page_size() -> usize {
    // SAFETY: the call only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the value is the range's only owner; everything that uses the address holds the value.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostBuffer, Memory};

    #[test]
    fn every_length_is_mapped_and_unmapped() {
        for len in [1, 4097, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 5000] {
            let buffer = HostBuffer::new(len).unwrap();
            let Some(file) = buffer.shared_file() else { return };
            let twin = Mapping::of_file(file, len, true).unwrap();
            if len >= HUGE {
                assert_eq!(buffer.as_ptr() as usize % HUGE, 0);
                assert_eq!(twin.start().as_ptr() as usize % HUGE, 0);
            }
            for offset in [0, len / 2, len - 1] {
                // SAFETY: in bounds of two mappings of one file; nobody else has them.
                unsafe {
                    assert_eq!(twin.start().as_ptr().add(offset).read(), 0);
                    buffer.as_ptr().add(offset).write(9);
                    assert_eq!(twin.start().as_ptr().add(offset).read(), 9);
                    buffer.as_ptr().add(offset).write(0);
                }
            }
        }
    }

    /// A signal arrives each time the kernel has allocated `period` bytes, and undoes the call that it interrupts.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_is_committed_in_spite_of_signals() {
        const LEN: u64 = (1 << 30) + 5000;
        for period in [128 << 10, 1 << 20, 40 << 20] {
            let (mut allocated, mut until_signal, mut calls) = (0, period, 0);
            let kernel = |start, len| {
                calls += 1;
                assert!(calls < 100_000, "{allocated} bytes have memory");
                assert_eq!(start, allocated, "the parts are neither skipped nor repeated");
                if len >= until_signal {
                    until_signal = period;
                    return Err(rustix::io::Errno::INTR);
                }
                until_signal -= len;
                allocated += len;
                Ok(())
            };
            commit_in_steps(LEN, kernel).unwrap();
            assert_eq!(allocated, LEN);
        }
        let full = |start, _| if start < 100 << 20 { Ok(()) } else { Err(rustix::io::Errno::NOSPC) };
        assert_eq!(commit_in_steps(LEN, full), Err(rustix::io::Errno::NOSPC));
    }

    #[test]
    fn a_length_beyond_all_addresses_is_refused() {
        let buffer = HostBuffer::new(1).unwrap();
        let Some(file) = buffer.shared_file() else { return };
        assert!(Mapping::of_file(file, isize::MAX as usize, true).is_err());
        assert!(Mapping::of_file(file, usize::MAX, true).is_err());
    }
}
