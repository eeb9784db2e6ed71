//! Small host memory, carved from files that many buffers share: a process may have more buffers than open files.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mapping::{Mapping, page_size, populate_range};
use super::{HostSharing, Memory, SharedRange};
use crate::{Error, ErrorKind, Result};

/// Bytes of a file. Its pages take no memory until they are carved.
const ARENA: usize = 1 << 30;
/// Bytes of the largest carved buffer. A larger one has a file of its own, and huge pages.
const LARGEST: usize = 512 << 10;
/// Sizes of carved ranges: powers of two, from one page on.
const SIZES: usize = 12;

/// Page-aligned, zeroed host memory of at most 512 KiB: a range of a sealed memfd.
///
/// A peer process that maps the range gets the whole file, and could map other ranges of it. So ranges that peers may
/// map, and ranges that they may not, are in different files.
pub struct CarvedBuffer {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
    /// Whether the pages were replaced by others, which are not in the file.
    is_discarded: bool,
}

/// A file, mapped as a whole.
struct Arena {
    mapping: Mapping,
    file: OwnedFd,
    /// The process that carves it. A forked child has the same pages, and must neither carve nor free any.
    process: u32,
    is_shared: bool,
}

/// The files of this process, and their free ranges.
struct Arenas {
    /// The file whose end is not carved yet, and the offset of that end.
    current: Option<(Arc<Arena>, usize)>,
    /// The ranges that were freed, by size.
    free: [Vec<(Arc<Arena>, usize)>; SIZES],
}

/// The files that no peer gets, and those that peers may map.
static ARENAS: [Mutex<Arenas>; 2] = [const { Mutex::new(Arenas::new()) }; 2];

impl CarvedBuffer {
    /// Allocates `len` zeroed bytes, which have memory when this returns. `is_shared` says whether peers may map them.
    /// Returns `None` if buffers of this length are not carved, or if this system cannot commit ranges of a mapping:
    /// then [`HostBuffer::new`](super::HostBuffer::new) allocates them.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn new(len: usize, is_shared: bool) -> Result<Option<Self>> {
        let is_carved = (1..=LARGEST).contains(&len);
        if !is_carved || !HostSharing::of_this_process().is_ok_and(|sharing| !sharing.is_portable()) {
            return Ok(None);
        }
        let Some((arena, offset)) = arenas(is_shared).take(len, is_shared) else { return Ok(None) };
        let buffer = Self { arena, offset, len, is_discarded: false };
        match populate_range(buffer.as_ptr(), len, true) {
            Ok(()) => Ok(Some(buffer)),
            Err(rustix::io::Errno::INVAL) => Ok(None),
            Err(why) => {
                let context = format!("there is no memory for {len} bytes: free some");
                Err(Error::new(ErrorKind::Exhausted, "allocate", context).with_source(why))
            }
        }
    }
}

// SAFETY: the mapping lives as long as `arena`, and no other buffer has this range until this one is dropped.
unsafe impl Memory for CarvedBuffer {
    fn as_ptr(&self) -> *mut u8 {
        self.arena.mapping.start().as_ptr().wrapping_add(self.offset)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn shared_range(&self) -> Option<SharedRange<'_>> {
        let is_shared = self.arena.is_shared && !self.is_discarded;
        let (offset, file_len) = (self.offset as u64, ARENA as u64);
        is_shared.then(|| SharedRange { file: self.arena.file.as_fd(), offset, file_len })
    }

    fn discard(&mut self) -> Result<()> {
        let discarded = self.arena.mapping.discard_range(self.offset, size_of_range(self.len));
        discarded.map_err(|e| Error::os("deregister", "giving pages back", e))?;
        // From here on, and until this is dropped, the range is not the file's.
        self.is_discarded = true;
        self.arena.free_pages(self.offset, size_of_range(self.len));
        Ok(())
    }
}

impl Drop for CarvedBuffer {
    fn drop(&mut self) {
        if self.arena.process != std::process::id() {
            return;
        }
        let size = size_of_range(self.len);
        // The next buffer there finds zeros.
        let is_free = match self.is_discarded {
            true => self.arena.restore_pages(self.offset, size),
            false => self.arena.free_pages(self.offset, size),
        };
        if is_free {
            arenas(self.arena.is_shared).free[size_number(self.len)]
                .push((Arc::clone(&self.arena), self.offset));
        }
    }
}

impl Arena {
    fn new(is_shared: bool) -> std::io::Result<Self> {
        let file = HostSharing::Linux.create_file(ARENA)?;
        let mapping = Mapping::of_file(file.as_fd(), ARENA, true)?;
        Ok(Self { mapping, file, process: std::process::id(), is_shared })
    }

    /// Maps the file again where a range was discarded. Returns false if the kernel refuses.
    fn restore_pages(&self, offset: usize, len: usize) -> bool {
        let restored = self.mapping.restore_range(self.file.as_fd(), offset, len);
        if let Err(error) = &restored {
            tracing::warn!(%error, len, "the addresses of a buffer that was freed stay unused");
        }
        restored.is_ok()
    }

    /// Gives the memory of a range back to the kernel. Returns false if it did not.
    fn free_pages(&self, offset: usize, len: usize) -> bool {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let freed = rustix::fs::fallocate(&self.file, flags, offset as u64, len as u64);
        if let Err(error) = freed {
            tracing::warn!(%error, len, "memory of a buffer that was freed stays allocated");
        }
        freed.is_ok()
    }
}

impl Arenas {
    const fn new() -> Self {
        Self { current: None, free: [const { Vec::new() }; SIZES] }
    }

    /// A range that no buffer has. `None` if there can be no file for it.
    fn take(&mut self, len: usize, is_shared: bool) -> Option<(Arc<Arena>, usize)> {
        let process = std::process::id();
        if self.current.as_ref().is_some_and(|(arena, _)| arena.process != process) {
            // This is a forked child: the parent goes on to carve these files.
            *self = Self::new();
        }
        if let Some(range) = self.free[size_number(len)].pop() {
            return Some(range);
        }
        let size = size_of_range(len);
        if self.current.as_ref().is_none_or(|(_, end)| ARENA - end < size) {
            let arena = Arena::new(is_shared).inspect_err(|error| {
                tracing::info!(%error, "no file for many small buffers: each gets a file of its own");
            });
            self.current = Some((Arc::new(arena.ok()?), 0));
        }
        let (arena, end) = self.current.as_mut()?;
        let offset = *end;
        *end += size;
        Some((Arc::clone(arena), offset))
    }
}

/// The bytes of the range for a buffer of `len` bytes.
fn size_of_range(len: usize) -> usize {
    len.max(page_size()).next_power_of_two()
}

/// The number of that size among [`SIZES`].
fn size_number(len: usize) -> usize {
    // Pages have at least 4 KiB.
    (size_of_range(len) / 4096).trailing_zeros() as usize
}

fn arenas(is_shared: bool) -> MutexGuard<'static, Arenas> {
    // No holder panics half way through a change.
    ARENAS[usize::from(is_shared)].lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carve(len: usize) -> CarvedBuffer {
        CarvedBuffer::new(len, true).unwrap().expect("Linux 5.14 or newer")
    }

    #[test]
    fn a_range_is_zeroed_and_nobody_elses() {
        let lens = [1, 4096, 5000, 100_000, LARGEST];
        for round in 0..3 {
            let buffers: Vec<_> = lens.iter().cycle().take(50).map(|len| carve(*len)).collect();
            let mut ranges: Vec<_> =
                buffers.iter().map(|b| (b.as_ptr() as usize, b.as_ptr() as usize + b.len())).collect();
            for buffer in &buffers {
                assert!((buffer.as_ptr() as usize).is_multiple_of(page_size()));
                // SAFETY: in bounds of a buffer that is this test's alone.
                let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), buffer.len()) };
                assert!(bytes.iter().all(|byte| *byte == 0), "round {round}");
                bytes.fill(7);
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
        assert!(CarvedBuffer::new(0, true).unwrap().is_none());
        assert!(CarvedBuffer::new(LARGEST + 1, true).unwrap().is_none());
    }

    #[test]
    fn peers_get_no_file_of_what_they_may_not_map() {
        let (shared, own) = (carve(100), CarvedBuffer::new(100, false).unwrap().unwrap());
        assert!(own.shared_range().is_none() && own.shared_file().is_none());
        let range = shared.shared_range().unwrap();
        assert_eq!(range.file_len, ARENA as u64);
        let mapping = Mapping::of_file_range(range.file, range.offset, 100, true).unwrap();
        // SAFETY: in bounds of two mappings of one range, which this test alone uses.
        unsafe {
            shared.as_ptr().write(9);
            assert_eq!(mapping.start().as_ptr().read(), 9);
        }
    }

    #[test]
    fn discarded_bytes_are_zero_and_no_longer_shared() {
        let mut buffer = carve(5000);
        // SAFETY: in bounds of a buffer that is this test's alone.
        unsafe { buffer.as_ptr().add(4999).write(7) };
        buffer.discard().unwrap();
        // SAFETY: as above.
        unsafe { assert_eq!(buffer.as_ptr().add(4999).read(), 0) };
        assert!(buffer.shared_range().is_none());
        let start = buffer.as_ptr();
        drop(buffer);
        // Other tests may take the range first. Whoever has it finds zeros, in the file's pages.
        let buffers: Vec<_> = (0..1000).map(|_| carve(5000)).collect();
        for buffer in buffers.iter().filter(|buffer| buffer.as_ptr() == start) {
            let range = buffer.shared_range().unwrap();
            let mapping = Mapping::of_file_range(range.file, range.offset, 5000, true).unwrap();
            // SAFETY: in bounds of two mappings of one range, which this test alone uses.
            unsafe {
                assert_eq!(mapping.start().as_ptr().add(4999).read(), 0);
                buffer.as_ptr().write(3);
                assert_eq!(mapping.start().as_ptr().read(), 3);
            }
        }
    }
}
