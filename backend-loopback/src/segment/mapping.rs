//! Files that processes share, and the checks of a file before it is mapped.
//!
//! An access to mapped memory raises `SIGBUS` if the file ends before it, or if the kernel finds no page for it.
//! Therefore a file is mapped only if it lies in memory, nobody can resize it, and it has memory under each of its
//! bytes.
//!
//! | | lies in memory | nobody can resize it | has memory |
//! |---|---|---|---|
//! | Linux | it is in tmpfs | it is sealed | it has all its blocks |
//! | macOS | it is a POSIX shared memory object | the kernel refuses | the kernel finds a page, or ends processes |
//! | portable path on Linux | it is in tmpfs | not checked: for tests only | it has all its blocks |
//!
//! Huge pages of Linux's pool (hugetlbfs) are refused: if one process takes the last page of the pool, an access of
//! another process finds none.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod macos;

use std::os::fd::BorrowedFd;

use multirail_spi::{Error, ErrorKind, Mapping, Result};

#[cfg(target_os = "linux")]
pub(crate) use linux::{can_commit_mapped, commit, commit_mapped};
#[cfg(target_os = "linux")]
use linux::{has_fixed_size, has_memory, is_in_memory};
#[cfg(not(target_os = "linux"))]
pub(crate) use macos::{can_commit_mapped, commit, commit_mapped};
#[cfg(not(target_os = "linux"))]
use macos::{has_fixed_size, has_memory, is_in_memory};

/// Maps a peer's `file`, which must hold exactly `len` bytes, and which nobody can resize. It must have memory for
/// `committed` bytes: the caller commits the others before it accesses them.
pub(crate) fn map(
    operation: &'static str,
    file: BorrowedFd<'_>,
    len: usize,
    committed: usize,
    writable: bool,
) -> Result<Mapping> {
    let refused = |why: &str| {
        Error::new(
            ErrorKind::Protocol,
            operation,
            format!("the peer's file {why}: the peer breaks the protocol, disconnect it"),
        )
    };
    if !is_in_memory(file) {
        return Err(refused(
            "lies on a disk or in the kernel's pool of huge pages (hugetlbfs), not in tmpfs",
        ));
    }
    if !has_fixed_size(file, len) {
        return Err(refused("has another size than the peer said, or is not sealed"));
    }
    if !has_memory(file, committed) {
        return Err(refused("has holes, and the system may have no memory for them"));
    }
    Mapping::of_file(file, len, writable).map_err(|e| {
        Error::os(operation, "mapping the peer's file; raise vm.max_map_count or free memory", e)
    })
}

/// Maps the range of `len` bytes at `offset` of a peer's file of `file_len` bytes, as [`map`] maps a whole file.
#[cfg(target_os = "linux")]
pub(crate) fn map_range(
    operation: &'static str,
    file: BorrowedFd<'_>,
    (offset, file_len): (u64, u64),
    len: usize,
    writable: bool,
) -> Result<Mapping> {
    let refused = |why: &str| {
        let context = format!("the peer's file {why}: the peer breaks the protocol, disconnect it");
        Error::new(ErrorKind::Protocol, operation, context)
    };
    let page = multirail_spi::page_size() as u64;
    let is_inside = offset.checked_add(len as u64).is_some_and(|end| end <= file_len);
    if !is_inside || !offset.is_multiple_of(page) || len == 0 {
        return Err(refused("does not have the range that the peer said"));
    }
    if !is_in_memory(file) {
        return Err(refused(
            "lies on a disk or in the kernel's pool of huge pages (hugetlbfs), not in tmpfs",
        ));
    }
    if !usize::try_from(file_len).is_ok_and(|file_len| has_fixed_size(file, file_len)) {
        return Err(refused("has another size than the peer said, or is not sealed"));
    }
    let mapping = Mapping::of_file_range(file, offset, len, writable).map_err(|e| {
        Error::os(operation, "mapping the peer's file; raise vm.max_map_count or free memory", e)
    })?;
    // The peer has done so already, if it keeps to the rules.
    commit_mapped(operation, mapping.start().as_ptr(), len, writable)?;
    Ok(mapping)
}

/// Returns true if peers may map `file`, which must hold `len` bytes, after [`commit`] has put memory under them.
pub(crate) fn is_shareable(file: BorrowedFd<'_>, len: usize) -> bool {
    is_in_memory(file) && has_fixed_size(file, len)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use multirail_spi::{HostBuffer, Memory};
    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

    use super::*;

    #[test]
    fn only_sealed_files_of_the_right_size_are_mapped() {
        let buffer = HostBuffer::new(5000).unwrap();
        let file = buffer.shared_file().unwrap();
        assert!(map("test", file, 4999, 4999, true).is_err());
        assert!(map("test", file, 8192, 8192, true).is_err());
        let mapping = map("test", file, 5000, 5000, true).unwrap();
        // SAFETY: in bounds of two mappings of one file; nothing else uses them.
        unsafe {
            mapping.start().as_ptr().add(4999).write(7);
            assert_eq!(buffer.as_ptr().add(4999).read(), 7);
        }
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 5000).unwrap();
        assert_eq!(map("test", open.as_fd(), 5000, 5000, true).err().unwrap().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn a_file_with_holes_is_mapped_once_it_has_memory() {
        let buffer = HostBuffer::sparse(1 << 20).unwrap();
        let file = buffer.shared_file().unwrap();
        let error = map("test", file, 1 << 20, 1 << 20, true).err().unwrap();
        assert!(error.kind() == ErrorKind::Protocol && error.context().contains("holes"), "{error}");
        commit("test", file, 1 << 20).unwrap();
        map("test", file, 1 << 20, 1 << 20, true).unwrap();
    }

    /// The kernel refuses any new mapping, in a process of its own.
    #[test]
    #[ignore = "the other process of the test below"]
    fn asks_whether_memory_can_be_committed_without_memory() {
        if std::env::var_os(CHILD).is_some() {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let none = Rlimit { current: Some(0), maximum: None };
            setrlimit(Resource::As, none).unwrap();
            let (can_commit, no_mapping) = (can_commit_mapped(), Mapping::anonymous(4096).is_err());
            setrlimit(Resource::As, Rlimit { current: None, maximum: None }).unwrap();
            println!("\n@{no_mapping} {can_commit}");
        }
    }

    #[test]
    fn a_shortage_of_memory_does_not_change_how_segments_get_theirs() {
        let can_commit = can_commit_mapped();
        let said = child("asks_whether_memory_can_be_committed_without_memory");
        assert!(said.contains(&format!("@true {can_commit}")), "{said}");
    }

    /// What another process says that runs the test `name`.
    fn child(name: &str) -> String {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let name = format!("segment::mapping::tests::{name}");
        child.args(["--ignored", "--exact", &name, "--nocapture"]);
        let output = child.env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}: {said}", output.status);
        said
    }

    /// Maps the file of a hostile peer, in a process of its own, since `SIGBUS` may end the process.
    #[test]
    #[ignore = "the other process of the test below"]
    fn touches_a_file_of_huge_pages() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let file = huge_file("a peer's");
        match map("test", file.as_fd(), HUGE, HUGE, true) {
            Err(error) => println!("\n@{:?}: {error}", error.kind()),
            Ok(mapping) => {
                // The peer takes the page and gives it back to the pool, which frees the reservation of this process.
                // Then the peer takes all pages of the pool.
                rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HUGE as u64).unwrap();
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, hole, 0, HUGE as u64).unwrap();
                let hoard =
                    rustix::fs::memfd_create("hoard", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
                let mut taken = 0;
                while rustix::fs::fallocate(&hoard, FallocateFlags::empty(), taken, HUGE as u64).is_ok() {
                    taken += HUGE as u64;
                }
                // SAFETY: in bounds of the mapping, which is this process's alone.
                unsafe { mapping.start().as_ptr().write_volatile(1) };
                println!("\n@written");
            }
        }
    }

    #[test]
    fn a_file_in_the_pool_of_huge_pages_is_refused() {
        if rustix::fs::memfd_create("probe", MemfdFlags::HUGETLB).is_err() {
            return println!("skipped: this kernel has no hugetlbfs");
        }
        let said = child("touches_a_file_of_huge_pages");
        assert!(said.contains("@Protocol") && said.contains("hugetlbfs"), "{said}");
    }

    /// Tells this test executable that it is the child.
    const CHILD: &str = "MULTIRAIL_LOOPBACK_HUGE";
    const HUGE: usize = 2 << 20;

    fn huge_file(name: &str) -> OwnedFd {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags).unwrap();
        rustix::fs::ftruncate(&file, HUGE as u64).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        file
    }
}
