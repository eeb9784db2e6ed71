//! Files of peers, mapped only after their size and seals are known.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use transport_core::{Error, ErrorKind, Result};

/// A peer's file, mapped whole.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address; who follows it, and when, is for `Segment` and `Import` to say.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `file`, which must hold exactly `len` bytes and be sealed against resizing.
    pub(crate) fn new(
        operation: &'static str,
        file: BorrowedFd<'_>,
        len: usize,
        writable: bool,
    ) -> Result<Self> {
        if !is_sealed(file, len) {
            let context =
                "the peer's file has another size than it said, or is not sealed: do not trust this peer";
            return Err(Error::new(ErrorKind::Protocol, operation, context));
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choosing overlaps nothing.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) };
        let start = start.map_err(|e| {
            Error::os(operation, "mapping the peer's file; raise vm.max_map_count or free memory", e)
        })?;
        let start = NonNull::new(start.cast()).ok_or_else(|| {
            Error::new(ErrorKind::Io, operation, "the kernel mapped a file at address zero")
        })?;
        Ok(Self { start, len })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this range; whoever holds the address holds the mapping too.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Whether `file` holds exactly `len` bytes for good: touching a mapping of it
/// can never raise `SIGBUS`.
pub(crate) fn is_sealed(file: impl AsFd, len: usize) -> bool {
    let sealed = rustix::fs::fcntl_get_seals(&file)
        .is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW));
    sealed
        && len > 0
        && rustix::fs::fstat(&file).is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(len as u64))
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;
    use transport_core::{HostBuffer, Memory};

    use super::*;

    #[test]
    fn only_sealed_files_of_the_right_size_are_mapped() {
        let buffer = HostBuffer::new(5000).unwrap();
        let file = buffer.shared_file().unwrap();
        assert!(Mapping::new("test", file, 4999, true).is_err());
        assert!(Mapping::new("test", file, 8192, true).is_err());
        let mapping = Mapping::new("test", file, 5000, true).unwrap();
        // SAFETY: in bounds of two mappings of one file; nobody else has them.
        unsafe {
            mapping.start().as_ptr().add(4999).write(7);
            assert_eq!(buffer.as_ptr().add(4999).read(), 7);
        }
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 5000).unwrap();
        assert_eq!(Mapping::new("test", open.as_fd(), 5000, true).err().unwrap().kind(), ErrorKind::Protocol);
    }
}
