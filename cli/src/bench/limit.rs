//! The limit: a plain copy of the same bytes on this machine, in the same run.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use multirail::cuda::{CudaMemory, Device, PinnedBuffer, PlainCopy, PlainCopyEnd};
use multirail::{Access, Fabric, Region};

use super::content;
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
    /// The limit of `load`, whose local region is `local`.
    pub fn new(fabric: &Fabric, local: &Region, load: &BenchLoad) -> CommandResult<Self> {
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

/// Two local host regions, and the offsets of their pages.
pub struct PageCopy {
    from: Region,
    to: Region,
    size: usize,
    offsets: Vec<(usize, usize)>,
}

impl PageCopy {
    fn new(fabric: &Fabric, from: &Region, load: &BenchLoad) -> CommandResult<Self> {
        let size = load.size as usize;
        let to = load.remote().alloc(fabric, load.total(), Access::LOCAL)?;
        let offset = |page: u32| page as usize * size;
        let pages = content::sources(load).into_iter().zip(content::targets(load));
        let offsets: Vec<_> = pages.map(|(source, target)| (offset(source), offset(target))).collect();
        // The copies below depend on these checks.
        assert!(!load.is_on_gpu());
        assert!(offsets.iter().all(|(s, t)| s + size <= from.len() && t + size <= to.len()));
        Ok(Self { from: from.clone(), to, size, offsets })
    }

    fn copy(&self) {
        let (from, to) = (self.from.as_ptr(), self.to.as_ptr());
        for &(source, target) in &self.offsets {
            // SAFETY: `new` checked both ranges against the regions, which are the host's
            // and held here, so mapped; `to` is another region than `from`. Both are
            // LOCAL: no peer writes into them, and this thread, which posts what
            // reads and writes `from`, has waited for all of it.
            unsafe { std::ptr::copy_nonoverlapping(from.add(source), to.add(target), self.size) };
        }
        std::hint::black_box(to);
    }
}
