//! Page tables in the host's memory, where the kernel reads them, and the words by which it answers.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr};
use transport_core::{Error, ErrorKind, Result};

use crate::Device;
use crate::driver::check;
use crate::kernel::Launch;

/// Entries of a table: 16 MiB of the smallest pages worth a warp, 4 KiB, which a GPU's copy takes 40 µs for
/// over NVLink, several times what a launch costs.
pub(crate) const ENTRIES: usize = 4096;
/// Tables: two for each of four streams, and the one that is being filled.
pub(crate) const TABLES: usize = 9;

/// One table as the kernel reads it, with the word that it answers by.
#[repr(C, align(4096))]
struct Table {
    from: [u64; ENTRIES],
    to: [u64; ENTRIES],
    len: [u32; ENTRIES],
    done: AtomicU32,
}

/// All tables of a mover: page-locked memory of the host's, and a word each on the GPU.
pub(crate) struct Tables {
    start: NonNull<Table>,
    /// The words on the GPU.
    ended: CUdeviceptr,
    device: Device,
}

// SAFETY: the memory is the value's own; who may write to which table is the mover's matter.
unsafe impl Send for Tables {}

impl Tables {
    pub fn new(device: &Device) -> Result<Self> {
        let (mut start, mut ended) = (std::ptr::null_mut(), 0);
        let bytes = TABLES * size_of::<Table>();
        device.within("allocate page tables", || {
            // SAFETY: the context is current; each call writes one address of new memory, which is zeroed.
            unsafe {
                let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                let code = sys::cuMemHostAlloc(&raw mut start, bytes, flags);
                check("allocate page tables", "page-locked memory", code)?;
                std::ptr::write_bytes(start.cast::<u8>(), 0, bytes);
                check(
                    "allocate page tables",
                    "words on the GPU",
                    sys::cuMemAlloc_v2(&raw mut ended, 4 * TABLES),
                )?;
                check("allocate page tables", "to zero them", sys::cuMemsetD32_v2(ended, 0, TABLES))
            }
        })?;
        let nothing = || Error::new(ErrorKind::Exhausted, "allocate page tables", "no memory");
        Ok(Self { start: NonNull::new(start.cast()).ok_or_else(nothing)?, ended, device: device.clone() })
    }

    /// Enters a page as number `at` of table `table`, both within bounds.
    #[inline]
    pub fn enter(&mut self, table: usize, at: usize, to: u64, from: u64, len: u32) {
        assert!(at < ENTRIES);
        let table = self.table(table);
        // SAFETY: in bounds; no kernel reads a table that is being filled.
        unsafe {
            (&raw mut (*table).from[at]).write(from);
            (&raw mut (*table).to[at]).write(to);
            (&raw mut (*table).len[at]).write(len);
        }
    }

    /// What the kernel is to be told of table `table`, whose first `entries` were filled, with pages of `each`
    /// bytes, or of 0 where they differ.
    pub fn launch(&self, table: usize, entries: u32, units: u32, each: u32, value: u32) -> Launch {
        let of = |offset: usize| self.table(table) as u64 + offset as u64;
        Launch {
            from: of(std::mem::offset_of!(Table, from)),
            to: of(std::mem::offset_of!(Table, to)),
            len: of(std::mem::offset_of!(Table, len)),
            ended: self.ended + 4 * table as u64,
            done: self.word(table),
            value,
            entries,
            units,
            each,
        }
    }

    /// The address of table `table`'s word.
    pub fn word(&self, table: usize) -> CUdeviceptr {
        self.table(table) as u64 + std::mem::offset_of!(Table, done) as u64
    }

    /// What is in it. What the GPU did before it wrote that is visible.
    #[inline]
    pub fn answer(&self, table: usize) -> u32 {
        // SAFETY: the table lives as long as `self`, and the word is only used as an atomic one.
        let word = unsafe { &(*self.table(table)).done };
        word.load(Ordering::Acquire)
    }

    fn table(&self, table: usize) -> *mut Table {
        assert!(table < TABLES);
        // SAFETY: in bounds of the allocation.
        unsafe { self.start.as_ptr().add(table) }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        let freed = self.device.within("free page tables", || {
            // SAFETY: allocated by `new`; the mover has waited for all that used them.
            unsafe {
                check(
                    "free page tables",
                    "page-locked memory",
                    sys::cuMemFreeHost(self.start.as_ptr().cast()),
                )?;
                check("free page tables", "words on the GPU", sys::cuMemFree_v2(self.ended))
            }
        });
        if let Err(why) = freed {
            tracing::warn!(%why, "page tables are not freed");
        }
    }
}
