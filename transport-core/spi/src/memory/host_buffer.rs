//! Host memory that processes of the same host can map.

use crate::{Error, ErrorKind, HostSharing, Memory, Result};

/// Page-aligned, zeroed host memory.
///
/// On Linux, a buffer is a memfd of exactly its size, sealed against resizing, so that a peer process may map it
/// without fear of `SIGBUS`. On macOS it is a POSIX shared memory object, which the kernel lets nobody resize
/// ([`HostSharing`]).
///
/// [`HostBuffer::new`] puts each whole 2 MiB of a buffer into a huge page, whatever the system's settings are, if the
/// kernel can do it (from Linux 6.1 on).
pub struct HostBuffer {
    pages: platform::Pages,
    len: usize,
}

impl HostBuffer {
    /// Allocates `len` zeroed bytes. `len` must not be 0. The kernel has committed all of them when this returns, so
    /// that no later access finds memory short.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory. `InvalidRequest` if `len` is 0, or as
    /// [`HostSharing::of_this_process`].
    pub fn new(len: usize) -> Result<Self> {
        // Linux would end the process that commits more. miri has no sysinfo(2).
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            let machine = rustix::system::sysinfo();
            if len <= isize::MAX as usize
                && len as u64 > (machine.totalram as u64).saturating_mul(machine.mem_unit.into())
            {
                let why = format!("{len} bytes are more memory than this machine has; ask for less");
                return Err(Error::new(ErrorKind::Exhausted, "allocate", why));
            }
        }
        let buffer = Self::sparse(len)?;
        if let Err(error) = buffer.pages.make_huge() {
            tracing::info!(len, %error, "memory stays in small pages: large copies are slower, because of more TLB misses");
        }
        // After `make_huge`: commit would fill the range with small pages.
        buffer.pages.commit(len)?;
        Ok(buffer)
    }

    /// As [`HostBuffer::new`], but the kernel commits each small page at its first access: for a large buffer of which
    /// little is used. If memory is short and `vm.overcommit_memory` is 2, that access raises `SIGBUS`.
    pub fn sparse(len: usize) -> Result<Self> {
        let sharing = HostSharing::of_this_process()?;
        Self::mapped(len, |len| platform::Pages::shared(len, sharing))
    }

    /// As [`HostBuffer::sparse`], without a file: other processes cannot map the buffer.
    pub fn private(len: usize) -> Result<Self> {
        Self::mapped(len, platform::Pages::private)
    }

    /// Returns true if the files of buffers take a quarter of the descriptors that this process may have (`ulimit -n`).
    #[cfg(all(target_os = "linux", not(miri)))]
    pub(super) fn takes_many_descriptors() -> bool {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.is_some_and(|limit| platform::open_files() as u64 >= limit / 4)
    }

    /// Takes the buffer apart into its mapped bytes and its file. For memory that both sides have mapped, whose file
    /// need not stay open.
    #[cfg(all(unix, not(miri)))]
    pub fn into_parts(self) -> (crate::Mapping, Option<std::os::fd::OwnedFd>) {
        self.pages.into_parts()
    }

    fn mapped(len: usize, map: impl FnOnce(usize) -> std::io::Result<platform::Pages>) -> Result<Self> {
        if len == 0 || len > isize::MAX as usize {
            return Err(Error::new(
                ErrorKind::InvalidRequest,
                "allocate",
                format!("{len} bytes asked for; 1 to {} are allowed", isize::MAX),
            ));
        }
        let pages = map(len).map_err(|e| {
            Error::os("allocate", format!("{len} bytes of host memory; free some or raise the limit"), e)
        })?;
        Ok(Self { pages, len })
    }
}

// SAFETY: the mapping lives as long as the value, never moves, spans `len`
// bytes, and no method of `HostBuffer` hands out a reference into it.
unsafe impl Memory for HostBuffer {
    fn as_ptr(&self) -> *mut u8 {
        self.pages.start().as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }

    #[cfg(unix)]
    fn shared_file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.pages.file()
    }

    fn discard(&mut self) -> Result<()> {
        self.pages.discard().map_err(|e| Error::os("deregister", "giving pages back", e))
    }
}

#[cfg(all(unix, not(miri)))]
mod platform {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::HostSharing;
    use crate::memory::mapping::Mapping;

    /// Mapped pages, with the file that other processes can map.
    pub struct Pages {
        mapping: Mapping,
        file: Option<(OwnedFd, CountedFile)>,
    }

    /// The files of buffers that are open.
    static FILES: AtomicUsize = AtomicUsize::new(0);

    /// One of [`FILES`].
    struct CountedFile;

    impl CountedFile {
        fn new() -> Self {
            FILES.fetch_add(1, Ordering::Relaxed);
            Self
        }
    }

    impl Drop for CountedFile {
        fn drop(&mut self) {
            FILES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The number of files of buffers that are open.
    #[cfg(target_os = "linux")]
    pub fn open_files() -> usize {
        FILES.load(Ordering::Relaxed)
    }

    impl Pages {
        pub fn shared(len: usize, sharing: HostSharing) -> std::io::Result<Self> {
            let file = sharing.create_file(len)?;
            let mapping = Mapping::of_file(file.as_fd(), len, true)?;
            Ok(Self { mapping, file: Some((file, CountedFile::new())) })
        }

        pub fn private(len: usize) -> std::io::Result<Self> {
            Ok(Self { mapping: Mapping::anonymous(len)?, file: None })
        }

        pub fn into_parts(self) -> (Mapping, Option<OwnedFd>) {
            (self.mapping, self.file.map(|(file, _)| file))
        }

        pub fn make_huge(&self) -> std::io::Result<()> {
            self.mapping.make_huge()
        }

        pub fn commit(&self, len: usize) -> crate::Result<()> {
            #[cfg(target_os = "linux")]
            if let Some(file) = self.file() {
                return crate::memory::mapping::commit_file("allocate", file, len);
            }
            let _ = len;
            Ok(())
        }

        pub fn discard(&mut self) -> std::io::Result<()> {
            self.mapping.discard()?;
            self.file = None;
            Ok(())
        }

        pub fn start(&self) -> NonNull<u8> {
            self.mapping.start()
        }

        pub fn file(&self) -> Option<BorrowedFd<'_>> {
            self.file.as_ref().map(|(file, _)| file.as_fd())
        }
    }
}

#[cfg(any(not(unix), miri))]
mod platform {
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
    use std::ptr::NonNull;

    pub struct Pages {
        start: NonNull<u8>,
        layout: Layout,
    }

    // SAFETY: `start` is an address; access through it is governed by `Memory`'s contract.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn shared(len: usize, _: crate::HostSharing) -> std::io::Result<Self> {
            Self::private(len)
        }

        pub fn make_huge(&self) -> std::io::Result<()> {
            Ok(())
        }

        pub fn commit(&self, _: usize) -> crate::Result<()> {
            Ok(())
        }

        pub fn discard(&mut self) -> std::io::Result<()> {
            // SAFETY: allocated with that length; the caller has the only handle.
            unsafe { self.start.write_bytes(0, self.layout.size()) };
            Ok(())
        }

        pub fn private(len: usize) -> std::io::Result<Self> {
            let layout = Layout::from_size_align(len, 4096).map_err(std::io::Error::other)?;
            // SAFETY: the layout is not empty: `HostBuffer::mapped` refuses zero bytes.
            let start = unsafe { alloc_zeroed(layout) };
            Ok(Self { start: NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout)), layout })
        }

        pub fn start(&self) -> NonNull<u8> {
            self.start
        }

        #[cfg(unix)]
        pub fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            None
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: allocated by `private` with this layout.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    /// miri ends a program that asks it for more than there is.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn what_cannot_be_had_is_refused() {
        let kind = |len| HostBuffer::new(len).map(drop).unwrap_err().kind();
        assert_eq!(kind(0), ErrorKind::InvalidRequest);
        assert_eq!(kind(usize::MAX), ErrorKind::InvalidRequest);
        // No machine has 16 PiB.
        assert_eq!(kind(1 << 54), ErrorKind::Exhausted);
    }

    #[test]
    fn zeroed_and_page_aligned() {
        let buffer = HostBuffer::new(5000).unwrap();
        assert_eq!(buffer.len(), 5000);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        // SAFETY: in bounds, and nobody else has the buffer.
        assert_eq!(unsafe { buffer.as_ptr().add(4999).read() }, 0);
        assert!(HostBuffer::new(0).is_err());
    }

    #[test]
    fn discarded_bytes_are_zero_and_may_be_written() {
        for len in [1, 5000, (2 << 20) + 5000] {
            let mut buffer = HostBuffer::new(len).unwrap();
            let last = buffer.as_ptr().wrapping_add(len - 1);
            // SAFETY: in bounds, and nobody else has the buffer.
            unsafe { last.write(7) };
            buffer.discard().unwrap();
            assert_eq!(last, buffer.as_ptr().wrapping_add(len - 1));
            // SAFETY: as above.
            unsafe {
                assert_eq!(last.read(), 0);
                last.write(8);
                assert_eq!(last.read(), 8);
            }
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_new_buffer_has_memory_under_every_page() {
        let blocks =
            |buffer: &HostBuffer| rustix::fs::fstat(buffer.shared_file().unwrap()).unwrap().st_blocks;
        // stat(2) counts blocks of 512 bytes.
        for len in [1, 5000, 1 << 20, (2 << 20) + 5000, 7 << 20] {
            let buffer = HostBuffer::new(len).unwrap();
            assert!(blocks(&buffer) as usize * 512 >= len, "{len} bytes have {} blocks", blocks(&buffer));
        }
        assert_eq!(blocks(&HostBuffer::sparse(1 << 20).unwrap()), 0);
    }
}
