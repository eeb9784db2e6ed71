//! Counts of the entries of a path, as `send` and `serve` print them.

use std::fmt;
use std::time::Duration;

use crate::files::{EntryKind, OfferedEntry};
use serde::Serialize;

use crate::units::{Size, gbytes_per_s};

/// The result of sending or storing an entry.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum EntryResult {
    /// The server stored or created the entry.
    #[default]
    Stored,
    /// The server had the entry already.
    Same,
    /// The server keeps another file with the entry's name.
    Skipped,
}

/// Counts of files, directories and links. They include entries that were the same or skipped.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EntryCounts {
    files: u64,
    directories: u64,
    links: u64,
    /// The bytes of all files, including holes.
    bytes: u64,
    same_files: u64,
    same_links: u64,
    skipped_files: u64,
    skipped_directories: u64,
    skipped_links: u64,
}

impl EntryCounts {
    /// Counts an entry. The end of a directory does not count.
    pub fn add(&mut self, entry: &OfferedEntry, entry_result: EntryResult) {
        let (all, same, skipped) = match entry.kind {
            EntryKind::Leave => return,
            EntryKind::Directory => (&mut self.directories, None, &mut self.skipped_directories),
            EntryKind::File { .. } => (&mut self.files, Some(&mut self.same_files), &mut self.skipped_files),
            EntryKind::Link { .. } => (&mut self.links, Some(&mut self.same_links), &mut self.skipped_links),
        };
        *all += 1;
        match (entry_result, same) {
            (EntryResult::Same, Some(same)) => *same += 1,
            (EntryResult::Skipped, _) => *skipped += 1,
            _ => {}
        }
        self.bytes += entry.size();
    }

    /// Returns true if there is one file and nothing else.
    pub fn is_one_file(&self) -> bool {
        (self.files, self.directories, self.links) == (1, 0, 0)
    }

    /// `sent NAME: 3 files, 2 directories, 5 MiB in 0.10 s, 0.05 GB/s`, for `moved` bytes over the wire, followed by
    /// the entries that were not stored. The line of a single file has no counts.
    pub fn line(&self, verb: &str, name: &str, moved: u64, took: Duration) -> String {
        let counts = if self.is_one_file() { String::new() } else { format!("{self}, ") };
        let (seconds, speed) = (took.as_secs_f64(), gbytes_per_s(moved, took));
        let not_stored = self.not_stored();
        format!("{verb} {name}: {counts}{} in {seconds:.2} s, {speed:.2} GB/s{not_stored}", Size(moved))
    }

    /// The entries that were not stored, as the end of a sentence: empty, or starting with a semicolon.
    fn not_stored(&self) -> String {
        let mut text = String::new();
        let (same, many) = counted_names([self.same_files, 0, self.same_links]);
        if !same.is_empty() {
            text += &format!("; {same} {} there already", if many { "were" } else { "was" });
        }
        let (skipped, many) =
            counted_names([self.skipped_files, self.skipped_directories, self.skipped_links]);
        if !skipped.is_empty() {
            let why =
                if many { "were skipped: their names are taken" } else { "was skipped: its name is taken" };
            text += &format!("; {skipped} {why}");
        }
        text
    }
}

impl fmt::Display for EntryCounts {
    /// `3 files, 2 directories, 1 link`, without the counts that are zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match counted_names([self.files, self.directories, self.links]).0 {
            none if none.is_empty() => f.write_str("0 files"),
            counts => f.write_str(&counts),
        }
    }
}

/// The numbers of files, directories and links as text. The flag is true if they add up to more than one.
fn counted_names(numbers: [u64; 3]) -> (String, bool) {
    let names = [("file", "files"), ("directory", "directories"), ("link", "links")];
    let named = numbers.iter().zip(names).filter(|(number, _)| **number > 0);
    let words =
        named.map(|(number, (one, many))| format!("{number} {}", if *number == 1 { one } else { many }));
    (words.collect::<Vec<_>>().join(", "), numbers.iter().sum::<u64>() > 1)
}

#[cfg(test)]
mod tests {
    use crate::files::{Mtime, TreePath};

    use super::*;

    #[test]
    fn files_directories_and_links_have_separate_counts() {
        let entry = |kind| {
            let mtime = Mtime { seconds: 0, nanoseconds: 0 };
            OfferedEntry { path: TreePath::new(b"name").unwrap(), kind, mode: 0, mtime }
        };
        let file = entry(EntryKind::File { size: 7, data: 3 });
        let link = entry(EntryKind::Link { target: b"x".to_vec() });
        let mut counts = EntryCounts::default();
        assert_eq!((counts.to_string(), counts.not_stored()), ("0 files".into(), String::new()));
        counts.add(&file, EntryResult::Stored);
        assert!(counts.is_one_file() && counts.to_string() == "1 file");
        counts.add(&file, EntryResult::Same);
        counts.add(&entry(EntryKind::Directory), EntryResult::Skipped);
        counts.add(&entry(EntryKind::Leave), EntryResult::Skipped);
        assert_eq!(counts.to_string(), "2 files, 1 directory");
        assert_eq!(
            counts.not_stored(),
            "; 1 file was there already; 1 directory was skipped: its name is taken"
        );
        counts.add(&link, EntryResult::Same);
        counts.add(&link, EntryResult::Skipped);
        assert_eq!(counts.to_string(), "2 files, 1 directory, 2 links");
        assert_eq!(
            counts.not_stored(),
            "; 1 file, 1 link were there already; 1 directory, 1 link were skipped: their names are taken"
        );
        assert_eq!(counts.bytes, 14);
    }
}
