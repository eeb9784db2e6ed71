//! The layout of the server's region.

use serde::{Deserialize, Serialize};

use super::CHUNK;

/// The layout of a region: it has windows, and each window has bytes of files and a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowLayout {
    /// The size of a page.
    pub page: u32,
    /// The bytes of files in a window, a multiple of the page.
    pub data: u32,
    /// The bytes of a window's table, a multiple of the page. The table comes after the bytes of files.
    pub table: u32,
    /// The number of windows.
    pub windows: u32,
}

impl WindowLayout {
    /// The layout that a server offers: 8 MiB outstanding per sender, which is also the most that an interruption may
    /// lose. Windows are small enough that the server reads them from the cache.
    pub const OFFERED: Self = Self { page: 64 << 10, data: 2 << 20, table: 256 << 10, windows: 4 };

    /// The most bytes that a sender allocates for a server's layout.
    const MOST_BYTES: u64 = 128 << 20;

    /// The smallest table. It holds several of the longest entries.
    const LEAST_TABLE: u32 = 32 << 10;

    /// Returns true if a layout from the wire is consistent and within its limits.
    pub fn is_valid(&self) -> bool {
        self.page > 0
            && u64::from(self.data) >= CHUNK
            && self.data.is_multiple_of(self.page)
            && self.table >= Self::LEAST_TABLE
            && self.table.is_multiple_of(self.page)
            && (1..=64).contains(&self.windows)
            && self.total() <= Self::MOST_BYTES
    }

    /// The bytes from one window to the next.
    pub fn stride(&self) -> u64 {
        u64::from(self.data) + u64::from(self.table)
    }

    /// The bytes of the region.
    pub fn total(&self) -> u64 {
        self.stride() * u64::from(self.windows)
    }

    /// The index in the region of window `sequence`.
    pub fn slot(&self, sequence: u64) -> usize {
        (sequence % u64::from(self.windows)) as usize
    }

    /// The offset of the bytes of window `sequence`.
    pub fn data_at(&self, sequence: u64) -> usize {
        self.slot(sequence) * self.stride() as usize
    }

    /// The offset of the table of window `sequence`.
    pub fn table_at(&self, sequence: u64) -> usize {
        self.data_at(sequence) + self.data as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_checked() {
        let sound = WindowLayout::OFFERED;
        assert!(sound.is_valid());
        for broken in [
            WindowLayout { page: 0, ..sound },
            WindowLayout { page: 4097, ..sound },
            WindowLayout { data: 0, ..sound },
            WindowLayout { data: u32::MAX, page: 1, ..sound },
            WindowLayout { table: 0, ..sound },
            WindowLayout { table: u32::MAX, page: 1, ..sound },
            WindowLayout { windows: 0, ..sound },
            WindowLayout { windows: 64, ..sound },
            WindowLayout { windows: u32::MAX, ..sound },
        ] {
            assert!(!broken.is_valid(), "{broken:?}");
        }
        assert_eq!(sound.data_at(5), sound.stride() as usize);
        assert_eq!(sound.table_at(4), sound.data as usize);
    }
}
