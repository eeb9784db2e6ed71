//! The load of one measurement.

use serde::{Deserialize, Serialize};

use super::memory::BenchMemory;

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// One page per write
    Write,
    /// All pages in one operation
    WritePages,
    /// One page per write, with immediate data
    WriteImm,
    /// One page per read
    Read,
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
        match self.size.checked_mul(u64::from(self.pages)) {
            Some(total) if total <= Self::MOST_BYTES => Ok(()),
            _ => Err(format!(
                "{} pages of {} bytes exceed 4 GiB; use fewer or smaller pages",
                self.pages, self.size
            )),
        }
    }

    /// The bytes of all pages.
    pub fn total(&self) -> usize {
        self.size as usize * self.pages as usize
    }

    /// The memory of the client's region.
    pub fn local(&self) -> BenchMemory {
        if self.kind == OpKind::Read { self.dst } else { self.src }
    }

    /// The memory of the server's region.
    pub fn remote(&self) -> BenchMemory {
        if self.kind == OpKind::Read { self.src } else { self.dst }
    }

    /// Returns true if a side is on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.src.is_gpu() || self.dst.is_gpu()
    }

    /// The number of operations that move every page once.
    pub fn operations(&self) -> usize {
        match self.kind {
            OpKind::WritePages => 1,
            _ => self.pages as usize,
        }
    }
}

impl OpKind {
    /// The name in the option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WritePages => "write-pages",
            Self::WriteImm => "write-imm",
            Self::Read => "read",
            Self::Send => "send",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        let (src, dst) = (BenchMemory::Gpu(0), BenchMemory::Host);
        let load =
            BenchLoad { kind: OpKind::Write, size: 4096, pages: 8, inflight: 1, seed: 0, imm: 0, src, dst };
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
}
