//! Page tables in host memory, which the kernel reads, and the words that it writes when a batch has completed.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{Error, ErrorKind, Result};

use crate::Device;
use crate::driver::check;
use crate::kernels::PageLaunch;

/// Entries of a table. With pages of 4 KiB, the smallest that keep a warp busy, they are 32 MiB. Within an H200, the kernel
/// copies batches of 16, 32 and 64 MiB of such pages at 0.81, 0.87 and 0.92 of the speed of one copy
/// (`examples/batch_copier.rs`, 132 blocks, each batch 32 times).
pub(crate) const ENTRIES: usize = 8192;
/// The number of tables: two for each of four streams, and one that is being filled.
pub(crate) const TABLES: usize = 9;

/// One table as the kernel reads it. The processor only writes it.
#[repr(C)]
pub(crate) struct PieceTable {
    pub from: [u64; ENTRIES],
    pub to: [u64; ENTRIES],
    pub len: [u32; ENTRIES],
}

#[cfg(test)]
impl PieceTable {
    pub fn empty() -> Box<Self> {
        Box::new(Self { from: [0; ENTRIES], to: [0; ENTRIES], len: [0; ENTRIES] })
    }
}

/// The word that the kernel writes when a batch has completed, on a cache line of its own.
#[repr(C, align(64))]
struct CompletionWord(AtomicU32);

/// All tables of a batch copier, and two words for each: one in host memory and one on the GPU.
///
/// The tables are in page-locked host memory that is write-combined. If they were cached, the GPU would have to read
/// them out of the processor's caches, and the processor would have to take the lines back.
pub(crate) struct Tables {
    start: NonNull<PieceTable>,
    completions: NonNull<CompletionWord>,
    /// The words on the GPU, in which the kernel counts the blocks that have ended.
    ended: CUdeviceptr,
    device: Device,
}

// SAFETY: the value owns the memory. Its owner, the batch copier, decides which table may be written.
unsafe impl Send for Tables {}

impl Tables {
    pub fn new(device: &Device) -> Result<Self> {
        let (mut start, mut completions, mut ended) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        device.within("allocate page tables", || {
            let shared = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            let host = |start: *mut *mut c_void, bytes, flags| {
                // SAFETY: the context is current; the call writes the address of new memory.
                let code = unsafe { sys::cuMemHostAlloc(start, bytes, flags) };
                check("allocate page tables", "page-locked memory", code)
            };
            let written = shared | sys::CU_MEMHOSTALLOC_WRITECOMBINED;
            host(&raw mut start, TABLES * size_of::<PieceTable>(), written)?;
            host(&raw mut completions, TABLES * size_of::<CompletionWord>(), shared)?;
            // SAFETY: as above; the new memory is zeroed.
            unsafe {
                std::ptr::write_bytes(start.cast::<u8>(), 0, TABLES * size_of::<PieceTable>());
                std::ptr::write_bytes(completions.cast::<u8>(), 0, TABLES * size_of::<CompletionWord>());
                let code = sys::cuMemAlloc_v2(&raw mut ended, 4 * TABLES);
                check("allocate page tables", "words on the GPU", code)
            }
        })?;
        // SAFETY: allocated above.
        unsafe { device.zero(ended, 4 * TABLES as u64) }?;
        let nothing = || Error::new(ErrorKind::Exhausted, "allocate page tables", "no memory");
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or_else(nothing)?,
            completions: NonNull::new(completions.cast()).ok_or_else(nothing)?,
            ended,
            device: device.clone(),
        })
    }

    /// Lends table `table`, to be filled.
    ///
    /// # Safety
    /// No kernel reads the table.
    #[inline]
    pub unsafe fn fill(&mut self, table: usize) -> &mut PieceTable {
        // SAFETY: in bounds, initialised by `new`, and not shared: by the caller, and because `self` is borrowed.
        unsafe { &mut *self.table(table) }
    }

    /// The kernel's argument for table `table`, whose first `entries` entries are filled. `each` is the bytes of every
    /// page, or 0 if they differ.
    pub fn launch(&self, table: usize, entries: u32, units: u32, each: u32, value: u32) -> PageLaunch {
        let of = |offset: usize| self.table(table) as u64 + offset as u64;
        PageLaunch {
            from: of(std::mem::offset_of!(PieceTable, from)),
            to: of(std::mem::offset_of!(PieceTable, to)),
            len: of(std::mem::offset_of!(PieceTable, len)),
            ended: self.ended + 4 * table as u64,
            done: self.word(table),
            value,
            entries,
            units,
            each,
        }
    }

    /// The address of the word of table `table`.
    pub fn word(&self, table: usize) -> CUdeviceptr {
        std::ptr::from_ref(self.word_of(table)) as u64
    }

    /// The value of the word of table `table`. All that the GPU did before it wrote the value is visible.
    #[inline]
    pub fn value(&self, table: usize) -> u32 {
        self.word_of(table).load(Ordering::Acquire)
    }

    #[inline]
    fn word_of(&self, table: usize) -> &AtomicU32 {
        assert!(table < TABLES);
        // SAFETY: in bounds of memory that lives as long as `self`, and only used as an atomic.
        unsafe { &self.completions.add(table).as_ref().0 }
    }

    fn table(&self, table: usize) -> *mut PieceTable {
        assert!(table < TABLES);
        // SAFETY: in bounds of the allocation.
        unsafe { self.start.as_ptr().add(table) }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        let hosts = [self.start.as_ptr() as usize, self.completions.as_ptr() as usize];
        let ended = self.ended;
        self.device.free_later("free page tables", move || {
            // SAFETY: allocated by `new`; the batch copier has waited for all work that uses them.
            let codes = unsafe {
                let host = |start: usize| sys::cuMemFreeHost(start as *mut c_void);
                [host(hosts[0]), host(hosts[1]), sys::cuMemFree_v2(ended)]
            };
            codes.into_iter().try_for_each(|code| check("free page tables", "to free one", code))
        });
    }
}
