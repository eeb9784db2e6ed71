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

/// The part of a peer's file to map.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FilePart {
    /// The first byte.
    pub(crate) offset: u64,
    pub(crate) len: usize,
    /// Bytes of the file.
    pub(crate) file_len: u64,
    /// Bytes of the part that must have memory: the caller commits the others before it accesses them.
    #[cfg_attr(
        not(target_os = "linux"),
        expect(dead_code, reason = "the kernel finds a page for each access")
    )]
    pub(crate) committed: usize,
}

impl FilePart {
    /// The whole file of `len` bytes, which has all its memory.
    pub(crate) fn whole(len: usize) -> Self {
        Self { offset: 0, len, file_len: len as u64, committed: len }
    }

    fn is_whole(&self) -> bool {
        self.offset == 0 && self.file_len == self.len as u64
    }

    /// Returns true if the file can have this part.
    fn is_possible(&self) -> bool {
        let end = self.offset.checked_add(self.len as u64);
        let can_be_mapped = self.is_whole() || cfg!(target_os = "linux");
        let is_aligned = self.offset.is_multiple_of(multirail_spi::page_size() as u64);
        can_be_mapped && is_aligned && self.len > 0 && end.is_some_and(|end| end <= self.file_len)
    }
}

/// Maps a part of a peer's `file`, which nobody can resize.
pub(crate) fn map(
    operation: &'static str,
    file: BorrowedFd<'_>,
    part: FilePart,
    writable: bool,
) -> Result<Mapping> {
    let refused = |why: &str| {
        let context = format!("the peer's file {why}: the peer breaks the protocol, disconnect it");
        Error::new(ErrorKind::Protocol, operation, context)
    };
    if !is_in_memory(file) {
        return Err(refused(
            "lies on a disk or in the kernel's pool of huge pages (hugetlbfs), not in tmpfs",
        ));
    }
    if !part.is_possible() || !usize::try_from(part.file_len).is_ok_and(|len| has_fixed_size(file, len)) {
        return Err(refused(
            "has another size than the peer said, is not sealed, or lacks the part that the peer named",
        ));
    }
    // If the part has holes, the memory for them would be this process's.
    if !has_memory(file, &part) {
        return Err(refused("has holes, and the system may have no memory for them"));
    }
    let failed =
        |e| Error::os(operation, "mapping the peer's file; raise vm.max_map_count or free memory", e);
    #[cfg(target_os = "linux")]
    if !part.is_whole() {
        let mapping = Mapping::of_file_range(file, part.offset, part.len, writable).map_err(failed)?;
        // The peer may have given the memory back since it was checked.
        commit_mapped(operation, mapping.start().as_ptr(), part.len, writable)?;
        return Ok(mapping);
    }
    Mapping::of_file(file, part.len, writable).map_err(failed)
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
        assert!(map("test", file, FilePart::whole(4999), true).is_err());
        assert!(map("test", file, FilePart::whole(8192), true).is_err());
        let mapping = map("test", file, FilePart::whole(5000), true).unwrap();
        // SAFETY: in bounds of two mappings of one file; nothing else uses them.
        unsafe {
            mapping.start().as_ptr().add(4999).write(7);
            assert_eq!(buffer.as_ptr().add(4999).read(), 7);
        }
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 5000).unwrap();
        assert_eq!(
            map("test", open.as_fd(), FilePart::whole(5000), true).err().unwrap().kind(),
            ErrorKind::Protocol
        );
    }

    #[test]
    fn a_file_with_holes_is_mapped_once_it_has_memory() {
        let buffer = HostBuffer::sparse(1 << 20).unwrap();
        let file = buffer.shared_file().unwrap();
        let error = map("test", file, FilePart::whole(1 << 20), true).err().unwrap();
        assert!(error.kind() == ErrorKind::Protocol && error.context().contains("holes"), "{error}");
        commit("test", file, 1 << 20).unwrap();
        map("test", file, FilePart::whole(1 << 20), true).unwrap();
    }

    #[test]
    fn a_part_of_a_file_is_mapped_only_if_it_has_memory() {
        const PART: FilePart = FilePart { offset: 1 << 20, len: 8192, file_len: 4 << 20, committed: 8192 };
        let buffer = HostBuffer::sparse(4 << 20).unwrap();
        let file = buffer.shared_file().unwrap();
        let refused = |part| {
            let error = map("test", file, part, true).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
            error.context().contains("holes")
        };
        let blocks = || rustix::fs::fstat(file).unwrap().st_blocks;
        // A peer could make this process pay for a part as large as it likes.
        assert!(refused(PART) && refused(FilePart { offset: 0, len: 3 << 20, ..PART }));
        assert_eq!(blocks(), 0, "the file has got memory");
        let fill = |at: usize, len| {
            // SAFETY: in bounds of a buffer that is the test's alone.
            unsafe { buffer.as_ptr().add(at).write_bytes(7, len) };
        };
        fill(0, 1 << 20);
        fill(1 << 20, 4096);
        assert!(refused(PART), "the second page is a hole");
        fill((1 << 20) + 4096, 1);
        let mapping = map("test", file, PART, true).unwrap();
        // SAFETY: in bounds of the mapping, which is the test's alone.
        assert_eq!(unsafe { mapping.start().as_ptr().add(4096).read() }, 7);
        for impossible in [
            FilePart { offset: 100, ..PART },
            FilePart { offset: u64::MAX - 4095, ..PART },
            FilePart { offset: 4 << 20, ..PART },
            FilePart { len: 0, ..PART },
            FilePart { file_len: 5 << 20, ..PART },
        ] {
            assert!(!refused(impossible), "{impossible:?}");
        }
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
        match map("test", file.as_fd(), FilePart::whole(HUGE), true) {
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
