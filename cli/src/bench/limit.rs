//! The limit: a plain copy of the same bytes on this machine, in the same run.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use multirail::cuda::{CudaMemory, Device, PinnedBuffer, PlainCopy, PlainCopyEnd};
use multirail::{Access, Fabric, Region};

use super::layout::PageLayout;
use super::load::BenchLoad;
use super::memory::BenchMemory;
use super::sampler::Sampler;
use crate::failure::CommandResult;

/// A copy within this process, between the same kinds of memory as in the transfer.
pub enum CopyLimit {
    /// memcpy of the same pages in the same order, in one thread.
    Pages(PageCopy),
    /// One contiguous CUDA copy, if a side is on a GPU. A host side is page-locked then.
    Plain(PlainCopy),
}

impl CopyLimit {
    /// The limit of `load`, whose local regions are `local`.
    pub fn new(fabric: &Fabric, local: &[Region], load: &BenchLoad) -> CommandResult<Self> {
        if !load.is_on_gpu() {
            return PageCopy::new(fabric, local, load).map(Self::Pages);
        }
        let (from, to) = (end(load.src, load.dst, load.total())?, end(load.dst, load.src, load.total())?);
        Ok(Self::Plain(PlainCopy::new(from, to)?))
    }

    /// Copies every page `passes` times.
    pub fn run(&self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        for _ in 0..passes {
            let begun = sampler.due().then(Instant::now);
            match self {
                Self::Pages(pages) => pages.copy(),
                Self::Plain(plain) => plain.run()?,
            }
            if let Some(begun) = begun {
                sampler.record(begun.elapsed());
            }
        }
        Ok(())
    }
}

/// Allocates memory of kind `memory`. Host memory is page-locked for the GPU of `other`.
fn end(memory: BenchMemory, other: BenchMemory, len: usize) -> CommandResult<PlainCopyEnd> {
    Ok(match (memory, other) {
        (BenchMemory::Gpu(number), _) => Arc::new(CudaMemory::new(&Device::open(number)?, len)?).into(),
        (_, BenchMemory::Gpu(number)) => Arc::new(PinnedBuffer::new(&Device::open(number)?, len)?).into(),
        _ => Arc::new(PinnedBuffer::new(&Device::open(0)?, len)?).into(),
    })
}

/// Local host regions, and the addresses of their pages.
pub struct PageCopy {
    /// The regions of both sides, which keep their memory.
    _regions: [Vec<Region>; 2],
    size: usize,
    pages: Vec<(*const u8, *mut u8)>,
}

impl PageCopy {
    fn new(fabric: &Fabric, from: &[Region], load: &BenchLoad) -> CommandResult<Self> {
        let size = load.size as usize;
        let layout = PageLayout::new(load);
        let to = layout.alloc(load.remote(), fabric, Access::LOCAL)?;
        // The copies below depend on these checks.
        assert!(!load.is_on_gpu());
        let addresses = |(region, source, target): (usize, usize, usize)| {
            let (from, to) = (&from[region], &to[region]);
            assert!(source + size <= from.len() && target + size <= to.len());
            (from.as_ptr().wrapping_add(source).cast_const(), to.as_ptr().wrapping_add(target))
        };
        let pages = layout.offsets().map(addresses).collect();
        Ok(Self { _regions: [from.to_vec(), to], size, pages })
    }

    fn copy(&self) {
        for &(source, target) in &self.pages {
            // SAFETY: `new` checked both ranges against the regions, which are the host's
            // and held here, so mapped; the regions of `target` are others than those of
            // `source`. All are LOCAL: no peer writes into them, and this thread, which
            // posts what reads and writes `source`, has waited for all of it.
            unsafe { std::ptr::copy_nonoverlapping(source, target, self.size) };
        }
        std::hint::black_box(&self.pages);
    }
}
