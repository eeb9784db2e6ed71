//! What `send` and `serve` say to each other, and the names files may have.
//!
//! The sender writes window `sequence % windows` of the server's region by paged
//! writes, says `Filled`, and may write it again once the server said `Free`.
//! Messages may overtake each other; sequence numbers put them in order.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use serde::{Deserialize, Serialize};

use super::failure::printable;

/// First words of a server, so that a sender knows whom it reached.
pub const PROTOCOL: [u8; 8] = *b"mr-files";

/// Raised with every change of the messages.
pub const VERSION: u16 = 1;

/// From the sender.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToServer {
    /// A file comes.
    Begin {
        /// Its name, without directories.
        name: Vec<u8>,
        /// Its bytes.
        size: u64,
    },
    /// A window is written.
    Filled {
        /// Counted from 0 in each file; all windows but the last are full.
        sequence: u64,
    },
    /// Every window is written and free again; this is the file's BLAKE3.
    End {
        /// 32 bytes.
        hash: [u8; 32],
    },
    /// The rest of the file will not come, because of this.
    Abandon(String),
    /// No more files.
    Bye,
}

/// From the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToSender {
    /// First message.
    Welcome {
        /// [`PROTOCOL`].
        protocol: [u8; 8],
        /// [`VERSION`].
        version: u16,
        /// How the region is divided.
        layout: Layout,
        /// The region's descriptor.
        region: Vec<u8>,
    },
    /// Begin.
    Accepted,
    /// This window may be written again.
    Free {
        /// The `Filled` it answers.
        sequence: u64,
    },
    /// The file is whole, on disk, under its name.
    Stored,
    /// It cannot be done, and the conversation ends.
    Refused(String),
    /// The answer to `Bye`.
    Farewell,
}

/// How a region is divided into windows, and windows into pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of a page.
    pub page: u32,
    /// Bytes of a window, a multiple of the page.
    pub window: u32,
    /// Windows of the region.
    pub windows: u32,
}

impl Layout {
    /// What a server offers: 32 MiB per sender. Windows are far below the 16 MiB at
    /// which copies bypass the caches, so the server reads them out of the cache.
    pub const OFFERED: Self = Self { page: 64 << 10, window: 8 << 20, windows: 4 };

    /// Most bytes a sender lets a server make it allocate.
    const MOST_BYTES: u64 = 128 << 20;

    /// Whether a layout from the wire is sound and bounded.
    pub fn is_sound(&self) -> bool {
        self.page > 0
            && self.window > 0
            && self.window.is_multiple_of(self.page)
            && (1..=64).contains(&self.windows)
            && self.total() <= Self::MOST_BYTES
    }

    /// Bytes of the region.
    pub fn total(&self) -> u64 {
        u64::from(self.window) * u64::from(self.windows)
    }

    /// Windows that a file of `size` bytes takes.
    pub fn count(&self, size: u64) -> u64 {
        size.div_ceil(u64::from(self.window))
    }

    /// Where window `sequence` lies in the region.
    pub fn offset(&self, sequence: u64) -> usize {
        (sequence % u64::from(self.windows)) as usize * self.window as usize
    }

    /// Bytes of window `sequence` of a file of `size` bytes.
    pub fn len(&self, sequence: u64, size: u64) -> usize {
        let before = sequence.saturating_mul(u64::from(self.window));
        size.saturating_sub(before).min(u64::from(self.window)) as usize
    }
}

/// The plain name of a file: no directory, nothing that leads out of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileName(Vec<u8>);

impl FileName {
    /// Longest name of the file systems at hand (`NAME_MAX`).
    const LONGEST: usize = 255;

    /// Checks a name, wherever it comes from.
    pub fn new(bytes: &[u8]) -> Result<Self, String> {
        let why = match bytes {
            b"" => "is empty",
            b"." | b".." => "is a directory",
            _ if bytes.contains(&b'/') => "has a slash in it",
            _ if bytes.contains(&0) => "has a NUL in it",
            _ if bytes.len() > Self::LONGEST => "is over 255 bytes long",
            _ => return Ok(Self(bytes.to_vec())),
        };
        Err(format!("the file's name {why}; send it under a plain name"))
    }

    /// The name for the system.
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// The name as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&String::from_utf8_lossy(&self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\0b", &"n".repeat(256)] {
            assert!(FileName::new(name.as_bytes()).is_err(), "{name:?}");
        }
        for name in ["a", "...", ".hidden", "näme with space", &"n".repeat(255)] {
            assert_eq!(FileName::new(name.as_bytes()).unwrap().as_bytes(), name.as_bytes());
        }
        assert_eq!(FileName::new(b"a\x1b[2Jb").unwrap().to_string(), "a [2Jb");
    }

    #[test]
    fn layouts_are_checked_and_cover_the_file() {
        assert!(Layout::OFFERED.is_sound());
        for (page, window, windows) in
            [(0, 0, 1), (4096, 0, 1), (4096, 4097, 1), (4096, 4096, 0), (1, 1 << 31, 64)]
        {
            assert!(!Layout { page, window, windows }.is_sound());
        }
        let layout = Layout { page: 10, window: 100, windows: 3 };
        for size in [0, 1, 99, 100, 101, 299, 300, 1000] {
            let total: usize = (0..layout.count(size)).map(|sequence| layout.len(sequence, size)).sum();
            assert_eq!(total as u64, size);
        }
        assert_eq!(layout.offset(4), 100);
        assert_eq!(layout.len(u64::MAX, 1000), 0);
    }
}
