//! Files of peers, mapped only after their size and seals are known.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::SealFlags;
use transport_core::spi::Mapping;
use transport_core::{Error, ErrorKind, Result};

/// Maps a peer's `file`, which must hold exactly `len` bytes and be sealed against resizing.
pub(crate) fn map(
    operation: &'static str,
    file: BorrowedFd<'_>,
    len: usize,
    writable: bool,
) -> Result<Mapping> {
    if !is_sealed(file, len) {
        let context =
            "the peer's file has another size than it said, or is not sealed: do not trust this peer";
        return Err(Error::new(ErrorKind::Protocol, operation, context));
    }
    Mapping::of_file(file, len, writable).map_err(|e| {
        Error::os(operation, "mapping the peer's file; raise vm.max_map_count or free memory", e)
    })
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
        assert!(map("test", file, 4999, true).is_err());
        assert!(map("test", file, 8192, true).is_err());
        let mapping = map("test", file, 5000, true).unwrap();
        // SAFETY: in bounds of two mappings of one file; nobody else has them.
        unsafe {
            mapping.start().as_ptr().add(4999).write(7);
            assert_eq!(buffer.as_ptr().add(4999).read(), 7);
        }
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 5000).unwrap();
        assert_eq!(map("test", open.as_fd(), 5000, true).err().unwrap().kind(), ErrorKind::Protocol);
    }
}
