//! Shared files by Linux's own calls.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};

/// A memfd of `len` bytes, sealed against resizing.
pub(super) fn create_file(len: usize) -> std::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("multirail", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
