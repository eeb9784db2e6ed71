//! The load of one measurement.

use serde::{Deserialize, Serialize};

use super::memory::BenchMemory;

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// One page per write
    Write,
    /// All pages of a region in one write
    WritePages,
    /// All pages of many regions in one write
    WriteList,
    /// One page per write, with immediate data
    WriteImm,
    /// One page per read
    Read,
    /// All pages of a region in one read
    ReadPages,
    /// All pages of many regions in one read
    ReadList,
    /// One page per message
    Send,
}

/// The load of one measurement. The server receives it from the client and must check it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenchLoad {
    /// The operation.
    pub kind: OpKind,
    /// The size of a page.
    pub size: u64,
    /// The number of pages.
    pub pages: u32,
    /// The number of regions on each side.
    pub regions: u32,
    /// The number of runs of [`BenchLoad::RUN`] pages that are neighbours on both sides. All other pages are scattered.
    pub runs: u32,
    /// The number of outstanding operations.
    pub inflight: u32,
    /// The seed of the content and the page order.
    pub seed: u64,
    /// The imm of this measurement's writes.
    pub imm: u32,
    /// The source memory, on the client's side except for reads.
    pub src: BenchMemory,
    /// The destination memory.
    pub dst: BenchMemory,
}

impl BenchLoad {
    /// The most bytes that a client may make a server allocate.
    const MOST_BYTES: u64 = 4 << 30;
    const MOST_PAGES: u32 = 1 << 20;
    const MOST_INFLIGHT: u32 = 1024;
    const MOST_REGIONS: u32 = 4096;

    /// The number of pages in a run.
    pub const RUN: u32 = 8;

    /// Fails if a value is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        if self.size == 0 || self.pages == 0 || self.inflight == 0 {
            return Err("size, pages and inflight must be at least 1".to_owned());
        }
        if self.pages > Self::MOST_PAGES || self.inflight > Self::MOST_INFLIGHT {
            return Err(format!(
                "at most {} pages and {} operations in flight are allowed",
                Self::MOST_PAGES,
                Self::MOST_INFLIGHT
            ));
        }
        if self.kind == OpKind::Send && self.dst != BenchMemory::Host {
            return Err("messages arrive in receives, which are in host memory; remove --dst".to_owned());
        }
        self.check_layout()?;
        match self.size.checked_mul(u64::from(self.pages)) {
            Some(total) if total <= Self::MOST_BYTES => Ok(()),
            _ => Err(format!(
                "{} pages of {} bytes exceed 4 GiB; use fewer or smaller pages",
                self.pages, self.size
            )),
        }
    }

    /// Fails if the regions and runs are out of bounds.
    fn check_layout(&self) -> Result<(), String> {
        let Self { kind, pages, regions, runs, .. } = self;
        if *regions != 1 && !kind.is_list() {
            return Err(format!("{} uses one region on each side; remove --regions", kind.name()));
        }
        if *runs > 0 && !kind.moves_all() {
            return Err(format!("{} moves one page, which is no run; remove --contiguous", kind.name()));
        }
        if *regions == 0 || *regions > Self::MOST_REGIONS {
            return Err(format!("the number of regions must be between 1 and {}", Self::MOST_REGIONS));
        }
        if u64::from(*runs) * u64::from(Self::RUN) > u64::from(*pages) {
            return Err(format!("{runs} runs of {} pages exceed {pages} pages", Self::RUN));
        }
        let units = Self::units(*pages, *runs);
        if units < *regions {
            return Err(format!(
                "{pages} pages, of which {runs} runs stay together, do not fill {regions} regions; use at most {units} --regions, or more --pages"
            ));
        }
        Ok(())
    }

    /// The number of units: runs, and pages that are in none.
    pub fn units(pages: u32, runs: u32) -> u32 {
        pages - runs * (Self::RUN - 1)
    }

    /// The share of the pages that are in runs.
    pub fn contiguous(&self) -> f64 {
        f64::from(self.runs * Self::RUN) / f64::from(self.pages)
    }

    /// The bytes of all pages.
    pub fn total(&self) -> usize {
        self.size as usize * self.pages as usize
    }

    /// The memory of the client's regions.
    pub fn local(&self) -> BenchMemory {
        if self.kind.is_read() { self.dst } else { self.src }
    }

    /// The memory of the server's regions.
    pub fn remote(&self) -> BenchMemory {
        if self.kind.is_read() { self.src } else { self.dst }
    }

    /// Returns true if a side is on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.src.is_gpu() || self.dst.is_gpu()
    }

    /// The number of operations that move every page once.
    pub fn operations(&self) -> usize {
        if self.kind.moves_all() { 1 } else { self.pages as usize }
    }

    /// A small load of this operation.
    #[cfg(test)]
    pub fn sample(kind: OpKind) -> Self {
        let (src, dst) = (BenchMemory::Host, BenchMemory::Host);
        Self { kind, size: 4096, pages: 8, regions: 1, runs: 0, inflight: 1, seed: 5, imm: 0, src, dst }
    }
}

impl OpKind {
    /// The name in the option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WritePages => "write-pages",
            Self::WriteList => "write-list",
            Self::WriteImm => "write-imm",
            Self::Read => "read",
            Self::ReadPages => "read-pages",
            Self::ReadList => "read-list",
            Self::Send => "send",
        }
    }

    /// Returns true if the bytes move from the server to the client.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::ReadPages | Self::ReadList)
    }

    /// Returns true for transfers between entries of many regions.
    pub fn is_list(self) -> bool {
        matches!(self, Self::WriteList | Self::ReadList)
    }

    /// Returns true if one operation moves all pages.
    pub fn moves_all(self) -> bool {
        self.is_list() || matches!(self, Self::WritePages | Self::ReadPages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        let (src, dst) = (BenchMemory::Gpu(0), BenchMemory::Host);
        let load = BenchLoad { src, dst, ..BenchLoad::sample(OpKind::Write) };
        assert!(load.check().is_ok());
        assert!(BenchLoad { size: 0, ..load.clone() }.check().is_err());
        assert!(BenchLoad { pages: 0, ..load.clone() }.check().is_err());
        assert!(BenchLoad { pages: u32::MAX, size: u64::MAX, ..load.clone() }.check().is_err());
        assert!(BenchLoad { size: u64::MAX, ..load.clone() }.check().is_err());
        assert!(BenchLoad { inflight: 1 << 20, ..load.clone() }.check().is_err());
        let odd = BenchLoad { kind: OpKind::Send, dst: BenchMemory::Gpu(0), ..load.clone() };
        assert!(odd.check().unwrap_err().contains("remove --dst"));
        assert_eq!((load.local(), load.remote()), (src, dst));
        let read = BenchLoad { kind: OpKind::Read, ..load.clone() };
        assert_eq!((read.local(), read.remote()), (dst, src));
        assert_eq!(BenchLoad { kind: OpKind::WritePages, ..load }.operations(), 1);
    }

    #[test]
    fn regions_and_runs_have_bounds() {
        let list = BenchLoad { pages: 100, regions: 10, ..BenchLoad::sample(OpKind::ReadList) };
        for (regions, runs) in [(1, 0), (100, 0), (16, 12), (10, 12)] {
            assert_eq!(BenchLoad { regions, runs, ..list.clone() }.check(), Ok(()));
        }
        for (regions, runs) in [(0, 0), (101, 0), (17, 12), (1, 13), (1, u32::MAX), (u32::MAX, 0)] {
            assert!(BenchLoad { regions, runs, ..list.clone() }.check().is_err(), "{regions} {runs}");
        }
        let pages = BenchLoad { kind: OpKind::ReadPages, regions: 1, runs: 12, ..list.clone() };
        assert_eq!(pages.check(), Ok(()));
        assert!(BenchLoad { regions: 2, ..pages.clone() }.check().unwrap_err().contains("remove --regions"));
        let one = BenchLoad { kind: OpKind::Read, ..pages }.check();
        assert!(one.unwrap_err().contains("remove --contiguous"));
    }
}
