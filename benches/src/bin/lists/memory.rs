//! The regions of one process.

use std::sync::Arc;

use benches::BenchResult;
use benches::list_load::{ENTRY, STRIDE};
use transport_core::{Access, Fabric, HostBuffer, Region};

use crate::ListsConfig;

/// An odd number, so that no two entries are alike.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The regions of one process. Each holds the same number of entries, with a gap behind each.
pub struct ListMemory {
    pub regions: Vec<Region>,
    pub per_region: u32,
}

impl ListMemory {
    /// Allocates and registers zeroed memory.
    pub fn register(fabric: &Fabric, config: &ListsConfig) -> BenchResult<Self> {
        let per_region = config.entries / config.regions;
        let bytes = per_region as usize * STRIDE;
        let register =
            |_| if config.private { private(fabric, bytes) } else { Ok(fabric.alloc(bytes, Access::all())?) };
        let this =
            Self { regions: (0..config.regions).map(register).collect::<BenchResult<_>>()?, per_region };
        this.clear()?;
        Ok(this)
    }

    /// Sets all bytes to zero.
    pub fn clear(&self) -> BenchResult<()> {
        let zeros = vec![0; self.bytes()];
        self.regions.iter().try_for_each(|region| region.copy_in(0, &zeros))?;
        Ok(())
    }

    /// Gives each entry bytes of its own. The gaps become zero.
    pub fn fill(&self) -> BenchResult<()> {
        let mut content = vec![0; self.bytes()];
        for (region, first) in self.regions.iter().zip((0..).step_by(self.per_region as usize)) {
            fill(&mut content, first..first + self.per_region);
            region.copy_in(0, &content)?;
        }
        Ok(())
    }

    /// Compares all bytes: entry `i` has those of entry `sources[i]` of the other process, and the gaps are zero.
    pub fn check(&self, sources: &[u32]) -> BenchResult<()> {
        let (mut want, mut got) = (vec![0; self.bytes()], vec![0; self.bytes()]);
        let sources = sources.chunks_exact(self.per_region as usize);
        for (number, (region, sources)) in self.regions.iter().zip(sources).enumerate() {
            fill(&mut want, sources.iter().copied());
            region.copy_out(0, &mut got)?;
            if want != got {
                return Err(format!("region {number} has other bytes than those that were sent").into());
            }
        }
        Ok(())
    }

    /// Bytes of a region.
    fn bytes(&self) -> usize {
        self.per_region as usize * STRIDE
    }
}

/// Writes the content of entries, one after the other. Leaves the gaps as they are.
fn fill(bytes: &mut [u8], entries: impl Iterator<Item = u32>) {
    for (bytes, entry) in bytes.chunks_exact_mut(STRIDE).zip(entries) {
        let first = u64::from(entry).wrapping_mul(MULTIPLIER);
        for (word, number) in bytes[..ENTRY].chunks_exact_mut(8).zip(1..) {
            word.copy_from_slice(&first.wrapping_add(number).to_le_bytes());
        }
    }
}

/// Registers memory that other processes cannot map, in huge pages where the kernel has them.
fn private(fabric: &Fabric, bytes: usize) -> BenchResult<Region> {
    let memory = HostBuffer::private(bytes)?;
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice, madvise};
        use transport_core::Memory;
        // Some kernels have no huge pages.
        // SAFETY: the range is that of the buffer, and this advice does not change its bytes.
        let _ = unsafe { madvise(memory.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
    // SAFETY: the buffer is new, and only the region knows it.
    Ok(unsafe { fabric.register(Arc::new(memory), Access::all()) }?)
}
