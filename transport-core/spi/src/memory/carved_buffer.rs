//! Small host memory, carved from files that the buffers of one fabric share.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};

use super::mapping::{Mapping, page_size, populate_range};
use super::{HostSharing, Memory, SharedRange};
use crate::{Error, ErrorKind, Result};

/// Bytes of a file, at most. Its pages take no memory until they are carved.
const ARENA: usize = 1 << 30;
/// Bytes of the largest carved buffer. A larger one has a file of its own, and huge pages.
const LARGEST: usize = 512 << 10;
/// Sizes of carved ranges: powers of two, from one page of 4 KiB to [`LARGEST`].
const SIZES: usize = 8;

/// Page-aligned, zeroed host memory of at most 512 KiB: a range of a sealed memfd.
pub(super) struct CarvedBuffer {
    carver: Arc<Carver>,
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
    /// Whether the pages were replaced by others, which are not in the file.
    is_discarded: bool,
}

/// The files that buffers of one fabric are carved from: either those that peers may map, or the others.
#[derive(Default)]
pub(super) struct Carver(Mutex<Arenas>);

/// A file, mapped as a whole.
struct Arena {
    mapping: Mapping,
    file: OwnedFd,
    len: usize,
    /// The process that carves it. A forked child has the same pages, and must neither carve nor free any.
    process: u32,
    /// The buffers in it, and the ranges that cannot be carved any more. Changed under the lock of the carver.
    used: AtomicUsize,
    /// Whether a peer may have it.
    is_handed_out: AtomicBool,
    /// [`Arenas::retirements`] when it was made.
    retirements: u64,
    /// Whether the kernel refuses to take memory back.
    #[cfg(test)]
    keeps_memory: AtomicBool,
}

#[derive(Default)]
struct Arenas {
    /// The file whose end is not carved yet, and the offset of that end.
    current: Option<(Arc<Arena>, usize)>,
    /// The ranges that were freed, by size.
    free: [Vec<(Arc<Arena>, usize)>; SIZES],
    /// How often the files were retired.
    retirements: u64,
}

impl CarvedBuffer {
    /// Allocates `len` zeroed bytes, which have memory when this returns. Returns `None` if buffers of this length are
    /// not carved, or if this system cannot commit ranges of a mapping.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub(super) fn new(carver: &Arc<Carver>, len: usize) -> Result<Option<Self>> {
        let is_carved = (1..=LARGEST).contains(&len);
        if !is_carved || !HostSharing::of_this_process().is_ok_and(|sharing| !sharing.is_portable()) {
            return Ok(None);
        }
        let Some((arena, offset)) = carver.lock().take(len) else { return Ok(None) };
        let carver = Arc::clone(carver);
        let buffer = Self { carver, arena, offset, len, is_discarded: false };
        match populate_range(buffer.as_ptr(), len, true) {
            Ok(()) => Ok(Some(buffer)),
            Err(rustix::io::Errno::INVAL) => Ok(None),
            Err(why) => {
                let context = format!("there is no memory for {len} bytes: free some");
                Err(Error::new(ErrorKind::Exhausted, "allocate", context).with_source(why))
            }
        }
    }

    /// Returns false in a forked child, whose parent has the range.
    fn is_own(&self) -> bool {
        self.arena.process == std::process::id()
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
        let (offset, file_len) = (self.offset as u64, self.arena.len as u64);
        let is_handed_out = Some(&self.arena.is_handed_out);
        let file = self.arena.file.as_fd();
        (!self.is_discarded).then_some(SharedRange { file, offset, file_len, is_handed_out })
    }

    fn discard(&mut self) -> Result<()> {
        let discarded = self.arena.mapping.discard_range(self.offset, size_of_range(self.len));
        discarded.map_err(|e| Error::os("deregister", "giving pages back", e))?;
        // From here on the addresses are not the file's.
        self.is_discarded = true;
        if self.is_own() {
            self.arena.free_pages(self.offset, size_of_range(self.len));
        }
        Ok(())
    }
}

impl Drop for CarvedBuffer {
    fn drop(&mut self) {
        // The next buffer there must find zeros, in the file's pages. A discarded range is not carved again: such
        // memory lives until its fabric closes.
        if self.is_own() && !self.is_discarded && self.arena.free_pages(self.offset, size_of_range(self.len))
        {
            self.carver.lock().put_back(&self.arena, self.offset, self.len);
        }
    }
}

impl Carver {
    /// Carves nothing more from the files that a peer may have. Each is closed with its last buffer.
    pub(super) fn retire(&self) {
        let mut arenas = self.lock();
        arenas.retirements += 1;
        arenas.current.take_if(|(arena, _)| arena.is_handed_out());
        arenas.free.iter_mut().for_each(|free| free.retain(|(arena, _)| !arena.is_handed_out()));
    }

    fn lock(&self) -> MutexGuard<'_, Arenas> {
        // No holder panics half way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    /// `None` if there can be no file of a useful length.
    fn new(retirements: u64) -> Option<Self> {
        // Linux would end a process that makes a file longer than it may (`ulimit -f`).
        let limit = getrlimit(Resource::Fsize).current.map_or(ARENA, |limit| ARENA.min(limit as usize));
        let len = limit / LARGEST * LARGEST;
        if len == 0 {
            return None;
        }
        let made = HostSharing::Linux.create_file(len).and_then(|file| {
            let mapping = Mapping::of_file(file.as_fd(), len, true)?;
            Ok((mapping, file))
        });
        let made = made.inspect_err(|error| {
            tracing::info!(%error, "no file for many small buffers: each gets a file of its own");
        });
        let (mapping, file) = made.ok()?;
        Some(Self {
            mapping,
            file,
            len,
            process: std::process::id(),
            used: AtomicUsize::new(0),
            is_handed_out: AtomicBool::new(false),
            retirements,
            #[cfg(test)]
            keeps_memory: AtomicBool::new(false),
        })
    }

    fn is_handed_out(&self) -> bool {
        self.is_handed_out.load(Ordering::Acquire)
    }

    /// Gives the memory of a range back to the kernel. Returns false if it did not.
    fn free_pages(&self, offset: usize, len: usize) -> bool {
        #[cfg(test)]
        if self.keeps_memory.load(Ordering::Relaxed) {
            return false;
        }
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let freed = rustix::fs::fallocate(&self.file, flags, offset as u64, len as u64);
        if let Err(error) = freed {
            tracing::warn!(%error, len, "memory of a buffer that was freed stays allocated");
        }
        freed.is_ok()
    }
}

impl Arenas {
    /// A range that no buffer has. `None` if there can be no file for it.
    fn take(&mut self, len: usize) -> Option<(Arc<Arena>, usize)> {
        let process = std::process::id();
        if self.current.as_ref().is_some_and(|(arena, _)| arena.process != process) {
            // This is a forked child: the parent goes on to carve these files.
            *self = Self { retirements: self.retirements, ..Self::default() };
        }
        let (arena, offset) = match self.free[size_number(len)].pop() {
            Some(range) => range,
            None => self.take_new(size_of_range(len))?,
        };
        arena.used.fetch_add(1, Ordering::Relaxed);
        Some((arena, offset))
    }

    /// A range of `size` bytes that no buffer has had.
    fn take_new(&mut self, size: usize) -> Option<(Arc<Arena>, usize)> {
        if self.current.as_ref().is_none_or(|(arena, end)| arena.len - end < size) {
            self.current = Some((Arc::new(Arena::new(self.retirements)?), 0));
        }
        let (arena, end) = self.current.as_mut()?;
        let offset = *end;
        *end += size;
        Some((Arc::clone(arena), offset))
    }

    /// Takes the range of a buffer that is dropped. The range is zeroed.
    fn put_back(&mut self, arena: &Arc<Arena>, offset: usize, len: usize) {
        let was_last = arena.used.fetch_sub(1, Ordering::Relaxed) == 1;
        // Too strict if no peer had it at the last retirement: it is retired at the next one.
        if arena.is_handed_out() && arena.retirements != self.retirements {
            return;
        }
        if !was_last {
            return self.free[size_number(len)].push((Arc::clone(arena), offset));
        }
        // Nothing of the file is used: it is carved anew from its beginning, or closed.
        self.free.iter_mut().for_each(|free| free.retain(|(other, _)| !Arc::ptr_eq(other, arena)));
        if let Some((_, end)) = self.current.as_mut().filter(|(current, _)| Arc::ptr_eq(current, arena)) {
            *end = 0;
        }
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

#[cfg(test)]
mod tests {
    use rustix::process::{Rlimit, setrlimit};

    use super::*;

    /// Tells this test executable that it is the child.
    const CHILD: &str = "MULTIRAIL_SPI_CARVED";

    fn carve(carver: &Arc<Carver>, len: usize) -> CarvedBuffer {
        CarvedBuffer::new(carver, len).unwrap().expect("Linux 5.14 or newer")
    }

    /// The bytes of a buffer that is the test's alone.
    fn bytes(buffer: &CarvedBuffer) -> &[u8] {
        // SAFETY: in bounds, and nobody writes meanwhile.
        unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) }
    }

    fn fill(buffer: &mut CarvedBuffer) {
        // SAFETY: in bounds of a buffer that is the test's alone.
        unsafe { buffer.as_ptr().write_bytes(7, buffer.len()) };
    }

    /// The number of the file that has the buffer.
    fn file_of(buffer: &CarvedBuffer) -> u64 {
        rustix::fs::fstat(buffer.shared_range().unwrap().file).unwrap().st_ino
    }

    /// What another process says that runs the test `name`.
    fn child(name: &str) -> String {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let name = format!("memory::carved_buffer::tests::{name}");
        let output =
            child.args(["--ignored", "--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}: {said}", output.status);
        said
    }

    #[test]
    fn a_range_is_zeroed_and_nobody_elses() {
        let (carver, lens) = (Arc::default(), [1, 4096, 5000, 100_000, LARGEST]);
        for round in 0..3 {
            let mut buffers: Vec<_> = lens.iter().cycle().take(50).map(|len| carve(&carver, *len)).collect();
            let mut ranges: Vec<_> =
                buffers.iter().map(|b| (b.as_ptr() as usize, b.as_ptr() as usize + b.len())).collect();
            for buffer in &mut buffers {
                assert!((buffer.as_ptr() as usize).is_multiple_of(page_size()));
                assert!(bytes(buffer).iter().all(|byte| *byte == 0), "round {round}");
                fill(buffer);
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
        assert!(CarvedBuffer::new(&carver, 0).unwrap().is_none());
        assert!(CarvedBuffer::new(&carver, LARGEST + 1).unwrap().is_none());
    }

    #[test]
    fn each_carver_has_files_of_its_own_and_none_after_it_is_retired() {
        let carvers: [Arc<Carver>; 2] = Default::default();
        let [first, other] = carvers.each_ref().map(|carver| carve(carver, 100));
        assert_ne!(file_of(&first), file_of(&other));
        let second = carve(&carvers[0], 100);
        assert_eq!(file_of(&second), file_of(&first));
        // No peer has the file.
        carvers[0].retire();
        assert!((0..3).all(|_| file_of(&carve(&carvers[0], 100)) == file_of(&first)));
        first.shared_range().unwrap().hand_out();
        assert_eq!(file_of(&carve(&carvers[0], 100)), file_of(&first));
        carvers[0].retire();
        let later = [(); 3].map(|()| carve(&carvers[0], 100));
        assert!(later.iter().all(|later| file_of(later) != file_of(&first)));
        // A range that is freed later is not carved again either.
        let arena = Arc::downgrade(&first.arena);
        drop(second);
        assert!((0..3).all(|_| file_of(&carve(&carvers[0], 100)) != file_of(&first)));
        drop(first);
        assert!(arena.upgrade().is_none(), "the file is open");
        assert_eq!(file_of(&carve(&carvers[1], 100)), file_of(&other));
    }

    #[test]
    fn a_file_without_buffers_is_carved_anew_or_closed() {
        let carver: Arc<Carver> = Arc::default();
        // Without memory under them.
        let take = |_| {
            let (arena, offset) = carver.lock().take(LARGEST).unwrap();
            let carver = Arc::clone(&carver);
            CarvedBuffer { carver, arena, offset, len: LARGEST, is_discarded: false }
        };
        let mut buffers: Vec<_> = (0..ARENA / LARGEST + 1).map(take).collect();
        let last = buffers.pop().unwrap();
        let arena = Arc::downgrade(&buffers[0].arena);
        assert!(!Arc::ptr_eq(&last.arena, &buffers[0].arena));
        drop(buffers);
        assert!(arena.upgrade().is_none(), "the first file is open");
        let file = file_of(&last);
        drop(last);
        let again = [(); 2].map(|()| carve(&carver, LARGEST));
        assert_eq!(
            again.each_ref().map(|again| (file_of(again), again.offset)),
            [(file, 0), (file, LARGEST)]
        );
    }

    #[test]
    fn peers_map_the_bytes_of_the_range() {
        let carver = Arc::default();
        let [_, shared] = [(); 2].map(|()| carve(&carver, 100));
        let range = shared.shared_range().unwrap();
        let mapping = Mapping::of_file_range(range.file, range.offset, 100, true).unwrap();
        // SAFETY: in bounds of two mappings of one range, which this test alone uses.
        unsafe {
            shared.as_ptr().write(9);
            assert_eq!(mapping.start().as_ptr().read(), 9);
        }
    }

    #[test]
    fn discarded_bytes_are_zero_and_no_longer_shared() {
        let carver = Arc::default();
        let (_other, mut buffer) = (carve(&carver, 5000), carve(&carver, 5000));
        fill(&mut buffer);
        buffer.discard().unwrap();
        assert_eq!(bytes(&buffer)[4999], 0);
        assert!(buffer.shared_range().is_none());
        // The addresses are not carved again.
        let start = buffer.as_ptr();
        drop(buffer);
        assert!((0..3).all(|_| carve(&carver, 5000).as_ptr() != start));
    }

    #[test]
    fn a_range_that_keeps_its_bytes_is_not_carved_again() {
        let carver = Arc::default();
        let (other, mut buffer) = (carve(&carver, 5000), carve(&carver, 5000));
        fill(&mut buffer);
        other.arena.keeps_memory.store(true, Ordering::Relaxed);
        let start = buffer.as_ptr();
        drop(buffer);
        other.arena.keeps_memory.store(false, Ordering::Relaxed);
        let next: Vec<_> = (0..3).map(|_| carve(&carver, 5000)).collect();
        assert!(next.iter().all(|next| next.as_ptr() != start && bytes(next).iter().all(|b| *b == 0)));
    }

    #[test]
    fn a_forked_child_discards_its_own_pages_alone() {
        let carver = Arc::default();
        let mut buffer = carve(&carver, 5000);
        fill(&mut buffer);
        // SAFETY: the child makes system calls, and ends without running destructors.
        match unsafe { libc::fork() } {
            0 => {
                let is_zeroed = buffer.discard().is_ok() && bytes(&buffer).iter().all(|byte| *byte == 0);
                // SAFETY: ends the child.
                unsafe { libc::_exit(if is_zeroed { 0 } else { 1 }) };
            }
            child => {
                let mut status = -1;
                // SAFETY: waits for the child that was made above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        assert!(bytes(&buffer).iter().all(|byte| *byte == 7));
    }

    /// Limits the length of files, in a process of its own, which Linux ends if it makes a longer one.
    #[test]
    #[ignore = "the other process of the test below"]
    fn carves_with_a_limit_of_files() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let carver = Arc::default();
        for (limit, files) in [(4 * LARGEST + 5, Some(3)), (LARGEST - 1, None)] {
            setrlimit(Resource::Fsize, Rlimit { current: Some(limit as u64), maximum: None }).unwrap();
            let buffers: Vec<_> =
                (0..12).map_while(|_| CarvedBuffer::new(&carver, LARGEST).unwrap()).collect();
            let mut found: Vec<_> = buffers.iter().map(file_of).collect();
            found.dedup();
            assert_eq!((!buffers.is_empty()).then_some(found.len()), files);
            buffers.iter().for_each(|buffer| buffer.shared_range().unwrap().hand_out());
            carver.retire();
        }
        println!("\n@carved");
    }

    #[test]
    fn files_are_no_longer_than_they_may_be() {
        assert!(child("carves_with_a_limit_of_files").contains("@carved"));
    }
}
