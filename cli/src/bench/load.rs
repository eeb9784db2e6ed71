//! What one measurement moves.

use serde::{Deserialize, Serialize};

use super::memory::BenchMemory;

/// The operation measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
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

/// One measurement, as both sides know it. Comes over the wire: check it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The operation.
    pub kind: Kind,
    /// Bytes of a page.
    pub size: u64,
    /// Pages.
    pub pages: u32,
    /// Operations under way at once.
    pub inflight: u32,
    /// What the content and the order of the pages follow from.
    pub seed: u64,
    /// The imm of this measurement's writes.
    pub imm: u32,
    /// Where the bytes come from: the client's side, except of reads.
    pub src: BenchMemory,
    /// Where they go.
    pub dst: BenchMemory,
}

impl Load {
    /// Bytes a client may make a server allocate.
    const MOST_BYTES: u64 = 4 << 30;
    const MOST_PAGES: u32 = 1 << 20;
    const MOST_INFLIGHT: u32 = 1024;

    /// Says what is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        if self.size == 0 || self.pages == 0 || self.inflight == 0 {
            return Err("size, pages and inflight are at least 1".to_owned());
        }
        if self.pages > Self::MOST_PAGES || self.inflight > Self::MOST_INFLIGHT {
            return Err(format!("at most {} pages and {} in flight", Self::MOST_PAGES, Self::MOST_INFLIGHT));
        }
        if self.kind == Kind::Send && self.dst != BenchMemory::Host {
            return Err("messages arrive in receives, which lie in host memory: leave --dst out".to_owned());
        }
        match self.size.checked_mul(u64::from(self.pages)) {
            Some(total) if total <= Self::MOST_BYTES => Ok(()),
            _ => Err(format!(
                "{} pages of {} bytes are over 4 GiB; take fewer or smaller pages",
                self.pages, self.size
            )),
        }
    }

    /// Bytes of all pages.
    pub fn total(&self) -> usize {
        self.size as usize * self.pages as usize
    }

    /// Where the client's region lies.
    pub fn local(&self) -> BenchMemory {
        if self.kind == Kind::Read { self.dst } else { self.src }
    }

    /// Where the server's lies.
    pub fn remote(&self) -> BenchMemory {
        if self.kind == Kind::Read { self.src } else { self.dst }
    }

    /// Whether a side is a GPU's.
    pub fn is_on_gpu(&self) -> bool {
        self.src.is_gpu() || self.dst.is_gpu()
    }

    /// Operations that move every page once.
    pub fn operations(&self) -> usize {
        match self.kind {
            Kind::WritePages => 1,
            _ => self.pages as usize,
        }
    }
}

impl Kind {
    /// The name, as the option has it.
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
        let load = Load { kind: Kind::Write, size: 4096, pages: 8, inflight: 1, seed: 0, imm: 0, src, dst };
        assert!(load.check().is_ok());
        assert!(Load { size: 0, ..load.clone() }.check().is_err());
        assert!(Load { pages: 0, ..load.clone() }.check().is_err());
        assert!(Load { pages: u32::MAX, size: u64::MAX, ..load.clone() }.check().is_err());
        assert!(Load { size: u64::MAX, ..load.clone() }.check().is_err());
        assert!(Load { inflight: 1 << 20, ..load.clone() }.check().is_err());
        let odd = Load { kind: Kind::Send, dst: BenchMemory::Gpu(0), ..load.clone() };
        assert!(odd.check().unwrap_err().contains("leave --dst out"));
        assert_eq!((load.local(), load.remote()), (src, dst));
        let read = Load { kind: Kind::Read, ..load.clone() };
        assert_eq!((read.local(), read.remote()), (dst, src));
        assert_eq!(Load { kind: Kind::WritePages, ..load }.operations(), 1);
    }
}
