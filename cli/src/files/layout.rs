//! How the server's region is divided.

use serde::{Deserialize, Serialize};

use super::CHUNK;

/// How a region is divided into windows, and a window into bytes and a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of a page.
    pub page: u32,
    /// Bytes of files in a window, a multiple of the page.
    pub data: u32,
    /// Bytes behind them for a table, a multiple of the page.
    pub table: u32,
    /// Windows of the region.
    pub windows: u32,
}

impl Layout {
    /// What a server offers: 8 MiB under way per sender, which is also what an
    /// interruption may cost. The server reads windows out of the cache.
    pub const OFFERED: Self = Self { page: 64 << 10, data: 2 << 20, table: 256 << 10, windows: 4 };

    /// Most bytes a sender lets a server make it allocate.
    const MOST_BYTES: u64 = 128 << 20;

    /// Smallest table: the longest entry fits several times.
    const LEAST_TABLE: u32 = 32 << 10;

    /// Whether a layout from the wire is sound and bounded.
    pub fn is_valid(&self) -> bool {
        self.page > 0
            && u64::from(self.data) >= CHUNK
            && self.data.is_multiple_of(self.page)
            && self.table >= Self::LEAST_TABLE
            && self.table.is_multiple_of(self.page)
            && (1..=64).contains(&self.windows)
            && self.total() <= Self::MOST_BYTES
    }

    /// Bytes from one window to the next.
    pub fn stride(&self) -> u64 {
        u64::from(self.data) + u64::from(self.table)
    }

    /// Bytes of the region.
    pub fn total(&self) -> u64 {
        self.stride() * u64::from(self.windows)
    }

    /// Which window of the region `sequence` is.
    pub fn slot(&self, sequence: u64) -> usize {
        (sequence % u64::from(self.windows)) as usize
    }

    /// Where the bytes of window `sequence` lie in the region.
    pub fn data_at(&self, sequence: u64) -> usize {
        self.slot(sequence) * self.stride() as usize
    }

    /// Where the table of window `sequence` lies in the region.
    pub fn table_at(&self, sequence: u64) -> usize {
        self.data_at(sequence) + self.data as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_checked() {
        let sound = Layout::OFFERED;
        assert!(sound.is_valid());
        for broken in [
            Layout { page: 0, ..sound },
            Layout { page: 4097, ..sound },
            Layout { data: 0, ..sound },
            Layout { data: u32::MAX, page: 1, ..sound },
            Layout { table: 0, ..sound },
            Layout { table: u32::MAX, page: 1, ..sound },
            Layout { windows: 0, ..sound },
            Layout { windows: 64, ..sound },
            Layout { windows: u32::MAX, ..sound },
        ] {
            assert!(!broken.is_valid(), "{broken:?}");
        }
        assert_eq!(sound.data_at(5), sound.stride() as usize);
        assert_eq!(sound.table_at(4), sound.data as usize);
    }
}
