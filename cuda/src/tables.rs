//! Page tables in the host's memory, where the kernel reads them, and the words by which it answers.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr};
use multirail_spi::{Error, ErrorKind, Result};

use crate::Device;
use crate::driver::check;
use crate::kernel::Launch;

/// Entries of a table: 16 MiB of the smallest pages worth a warp, 4 KiB, which a GPU's copy takes 40 µs for
/// over NVLink, several times what a launch costs.
pub(crate) const ENTRIES: usize = 4096;
/// Tables: two for each of four streams, and the one that is being filled.
pub(crate) const TABLES: usize = 9;

/// One table as the kernel reads it. The processor writes it, and does not read it.
#[repr(C)]
pub(crate) struct Table {
    pub from: [u64; ENTRIES],
    pub to: [u64; ENTRIES],
    pub len: [u32; ENTRIES],
}

#[cfg(test)]
impl Table {
    pub fn empty() -> Box<Self> {
        Box::new(Self { from: [0; ENTRIES], to: [0; ENTRIES], len: [0; ENTRIES] })
    }
}

/// The word that the kernel answers by, on a line of its own.
#[repr(C, align(64))]
struct Answer(AtomicU32);

/// All tables of a mover, in page-locked memory of the host's that is written past the caches: the GPU would
/// have to fetch what it reads out of them, and the processor to take it back. And two words for each, one on
/// the GPU.
pub(crate) struct Tables {
    start: NonNull<Table>,
    answers: NonNull<Answer>,
    /// The words on the GPU.
    ended: CUdeviceptr,
    device: Device,
}

// SAFETY: the memory is the value's own; who may write to which table is the mover's matter.
unsafe impl Send for Tables {}

impl Tables {
    pub fn new(device: &Device) -> Result<Self> {
        let (mut start, mut answers, mut ended) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        device.within("allocate page tables", || {
            let shared = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            let host = |start: *mut *mut c_void, bytes, flags| {
                // SAFETY: the context is current; it writes one address of new memory.
                let code = unsafe { sys::cuMemHostAlloc(start, bytes, flags) };
                check("allocate page tables", "page-locked memory", code)
            };
            let written = shared | sys::CU_MEMHOSTALLOC_WRITECOMBINED;
            host(&raw mut start, TABLES * size_of::<Table>(), written)?;
            host(&raw mut answers, TABLES * size_of::<Answer>(), shared)?;
            // SAFETY: as above; what is new is zeroed.
            unsafe {
                std::ptr::write_bytes(start.cast::<u8>(), 0, TABLES * size_of::<Table>());
                std::ptr::write_bytes(answers.cast::<u8>(), 0, TABLES * size_of::<Answer>());
                let code = sys::cuMemAlloc_v2(&raw mut ended, 4 * TABLES);
                check("allocate page tables", "words on the GPU", code)
            }
        })?;
        // SAFETY: allocated above.
        unsafe { device.zero(ended, 4 * TABLES as u64) }?;
        let nothing = || Error::new(ErrorKind::Exhausted, "allocate page tables", "no memory");
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or_else(nothing)?,
            answers: NonNull::new(answers.cast()).ok_or_else(nothing)?,
            ended,
            device: device.clone(),
        })
    }

    /// Table `table`, to be filled.
    ///
    /// # Safety
    /// No kernel that was launched with it reads it any more.
    #[inline]
    pub unsafe fn fill(&mut self, table: usize) -> &mut Table {
        // SAFETY: in bounds, initialised by `new`, and nobody else's by the caller and the borrow.
        unsafe { &mut *self.table(table) }
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
        std::ptr::from_ref(self.word_of(table)) as u64
    }

    /// What is in it. What the GPU did before it wrote that is visible.
    #[inline]
    pub fn answer(&self, table: usize) -> u32 {
        self.word_of(table).load(Ordering::Acquire)
    }

    #[inline]
    fn word_of(&self, table: usize) -> &AtomicU32 {
        assert!(table < TABLES);
        // SAFETY: in bounds of what lives as long as `self`, and only used as an atomic.
        unsafe { &self.answers.add(table).as_ref().0 }
    }

    fn table(&self, table: usize) -> *mut Table {
        assert!(table < TABLES);
        // SAFETY: in bounds of the allocation.
        unsafe { self.start.as_ptr().add(table) }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        let hosts = [self.start.as_ptr() as usize, self.answers.as_ptr() as usize];
        let ended = self.ended;
        self.device.give_back("free page tables", move || {
            // SAFETY: allocated by `new`; the mover has waited for all that used them.
            let codes = unsafe {
                let host = |start: usize| sys::cuMemFreeHost(start as *mut c_void);
                [host(hosts[0]), host(hosts[1]), sys::cuMemFree_v2(ended)]
            };
            codes.into_iter().try_for_each(|code| check("free page tables", "one", code))
        });
    }
}
