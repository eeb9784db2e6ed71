//! What a request, a page and a slot cost the processors and the copies of a simulated host.

use multirail::way::{CopyCosts, SlotCosts};

use super::provider::CountedProvider;

/// Our instructions per work request over libfabric, counted with the provider's (see [`CountedProvider`]).
const OURS: f64 = 144.0;
/// Our instructions per entry of a list that is planned and merged by the call: 312 with posting and 56 without
/// planning (`--bin instructions` of `benches`).
const LIST_ENTRY: f64 = 256.0;
/// Our instructions per slot and per page of a slot at each side, without the copies of their bytes and without the
/// slot's work request: ours, libfabric's and the C library's. Callgrind counted coalesced writes over efa-direct, 256
/// pages of 1 KiB and 64 of 4 KiB to a slot: 127 and 199 instructions a page at the source with the work request, 36 to
/// 51 and 62 to 123 at the target (28 November 2026, `libfabric instructions --providers efa-direct --size SIZE
/// --coalesced` in
/// `ci/efa-sim/run --root trixie`). Polls that find nothing are among them, more on a busy machine.
const SOURCE: CountedSide = CountedSide { slot: 5270.0, page: 103.0 };
const TARGET: CountedSide = CountedSide { slot: 3660.0, page: 25.0 };
/// The part of the source's instructions per page that [`GPU_PAGE_NS`] has too: the engine's (49 by `--bin
/// instructions`, page of a batch), and the loop over the copies.
const IN_GPU_PAGE: f64 = 49.0 + 14.0;

/// Nanoseconds of one kernel launch of a GPU's page kernel, and per page of its table, with our engine. Measured within
/// an H200 by `multirail bench --in-process --src gpu:0 --dst gpu:0 --inflight 8 --pages N`: operations of one page
/// take 2.8 to 3.1 µs, and N pages of 1 or 4 KiB take 12 to 18 ns each beyond that.
const GPU_LAUNCH_NS: f64 = 2900.0;
const GPU_PAGE_NS: f64 = 15.0;
/// The time from the post of a GPU's copy of 8 bytes to its end (docs/gpu.md).
const GPU_START_NS: f64 = 8400.0;
/// The page kernel between two H200s moves 339, 349 and 359 GB/s at 4, 16 and 64 KiB (docs/gpu.md): about this much per
/// byte, and this much per page.
const GPU_BYTE_NS: f64 = 0.002_774;
const GPU_KERNEL_PAGE_NS: f64 = 0.72;
/// A warp of the page kernel copies 4 KiB at a time. A smaller page takes as long: it was not measured alone.
const GPU_WARP: f64 = 4096.0;

/// Host pages that are in no cache: 9.7, 13.7 and 15.3 GB/s at 4, 16 and 64 KiB on a Zen 4 (`stream_four` in
/// `transport-core/spi/src/copy`): this much per byte, and this much per page. p5's Zen 3 is slower.
const HOST_BYTE_NS: f64 = 0.0628;
const HOST_COPY_PAGE_NS: f64 = 165.0;

/// Counted instructions of a side.
#[derive(Debug, Clone, Copy)]
struct CountedSide {
    slot: f64,
    page: f64,
}

/// A side of coalesced pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotSide {
    Source,
    Target,
}

/// The memory that pages are in, on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// GPU memory: a kernel of the GPU fills and empties slots
    Gpu,
    /// Host memory: the engine's thread fills and empties slots
    Host,
}

impl MemoryKind {
    /// The bytes of the pages that `backend-staging` puts into a slot.
    pub fn slot_bytes(self) -> u64 {
        match self {
            Self::Gpu => 512 << 10,
            Self::Host => 256 << 10,
        }
    }
}

/// The costs of a host's processors.
#[derive(Debug, Clone, Copy)]
pub struct ProcessorCosts {
    /// Our nanoseconds per work request.
    pub ours_ns: f64,
    pub provider: Option<CountedProvider>,
    pub instructions_per_ns: f64,
}

impl ProcessorCosts {
    /// Our nanoseconds per work request over libfabric, by counted instructions.
    pub fn counted_ours(instructions_per_ns: f64) -> f64 {
        OURS / instructions_per_ns
    }

    /// The nanoseconds of a work request of `bytes` bytes: ours and the provider's.
    pub fn request_ns(&self, bytes: u64) -> f64 {
        self.ours_ns + self.provider.map_or(0.0, |provider| self.ns(provider.instructions(bytes)))
    }

    /// The nanoseconds of an entry of a list that may share a work request with others.
    pub fn entry_ns(&self) -> f64 {
        self.ns(LIST_ENTRY)
    }

    /// What slots of pages of `page` bytes cost a side, without its work request.
    pub fn slot(&self, side: SlotSide, memory: MemoryKind, page: u64) -> SlotCosts {
        let (counted, in_gpu_page) = match side {
            SlotSide::Source => (SOURCE, IN_GPU_PAGE),
            SlotSide::Target => (TARGET, 0.0),
        };
        let slot_ns = self.ns(counted.slot);
        match memory {
            MemoryKind::Gpu => {
                let floor = GPU_BYTE_NS * (GPU_WARP - page as f64).max(0.0);
                let copy = CopyCosts {
                    start_ns: GPU_START_NS,
                    page_ns: GPU_KERNEL_PAGE_NS + floor,
                    byte_ns: GPU_BYTE_NS,
                    on_processor: false,
                };
                let page_ns = GPU_PAGE_NS + self.ns(counted.page - in_gpu_page);
                SlotCosts { slot_ns: slot_ns + GPU_LAUNCH_NS, page_ns, copy }
            }
            MemoryKind::Host => {
                let copy = CopyCosts {
                    start_ns: 0.0,
                    page_ns: HOST_COPY_PAGE_NS,
                    byte_ns: HOST_BYTE_NS,
                    on_processor: true,
                };
                SlotCosts { slot_ns, page_ns: self.ns(counted.page), copy }
            }
        }
    }

    fn ns(&self, instructions: f64) -> f64 {
        instructions / self.instructions_per_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_as_fast_as_measured() {
        let costs = ProcessorCosts { ours_ns: 0.0, provider: None, instructions_per_ns: 4.5 };
        for (memory, page, gbytes_per_s) in [
            (MemoryKind::Gpu, 4096, 339.0),
            (MemoryKind::Gpu, 16_384, 349.0),
            (MemoryKind::Gpu, 65_536, 359.0),
            (MemoryKind::Gpu, 1024, 339.0 / 4.0),
            (MemoryKind::Host, 4096, 9.7),
            (MemoryKind::Host, 16_384, 13.7),
            (MemoryKind::Host, 65_536, 15.3),
        ] {
            let copy = costs.slot(SlotSide::Source, memory, page).copy;
            let rate = page as f64 / (copy.page_ns + page as f64 * copy.byte_ns);
            assert!((rate / gbytes_per_s - 1.0).abs() < 0.02, "{memory:?} {page}: {rate}");
        }
    }
}
