//! The limit: memcpy of the same pages in the same order, by one thread.
#![allow(unsafe_code)]

use multirail::{Access, Fabric, Region};

use super::content;
use super::load::Load;
use crate::cli::failure::Done;

/// Copies between two local regions of the same kind of memory as the transfer's.
pub struct Limit {
    from: Region,
    to: Region,
    size: usize,
    offsets: Vec<(usize, usize)>,
}

impl Limit {
    /// A limit that copies out of `from`, the transfer's own local region.
    pub fn new(fabric: &Fabric, from: &Region, load: &Load) -> Done<Self> {
        let size = load.size as usize;
        let to = fabric.alloc(load.total(), Access::LOCAL)?;
        let offset = |page: u32| page as usize * size;
        let pages = content::sources(load).into_iter().zip(content::targets(load));
        let offsets: Vec<_> = pages.map(|(source, target)| (offset(source), offset(target))).collect();
        // What makes the copies below sound, checked against what the regions are.
        assert!(offsets.iter().all(|(s, t)| s + size <= from.len() && t + size <= to.len()));
        Ok(Self { from: from.clone(), to, size, offsets })
    }

    /// Copies every page `passes` times.
    pub fn run(&self, passes: u64) {
        let (from, to) = (self.from.as_ptr(), self.to.as_ptr());
        for _ in 0..passes {
            for &(source, target) in &self.offsets {
                // SAFETY: `new` checked both ranges against the regions, which are
                // held here, so mapped; `to` is another region than `from`. Both are
                // LOCAL: no peer writes into them, and this thread, which posts what
                // reads and writes `from`, has waited for all of it.
                unsafe { std::ptr::copy_nonoverlapping(from.add(source), to.add(target), self.size) };
            }
            std::hint::black_box(to);
        }
    }
}
