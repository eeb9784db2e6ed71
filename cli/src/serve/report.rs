//! The output of a server: one line per file or tree.

use std::time::Instant;

use crate::files::{EntryKind, OfferedEntry};
use serde::Serialize;

use crate::entry_counts::{EntryCounts, EntryResult};
use crate::failure::CommandResult;
use crate::output;
use crate::units::gbytes_per_s;

/// A complete entry.
pub struct Stored {
    /// The entry.
    pub entry: OfferedEntry,
    /// Whether it was stored.
    pub entry_result: EntryResult,
    /// The bytes received.
    pub received: u64,
    /// The BLAKE3 of a file without holes.
    pub hash: Option<blake3::Hash>,
    /// The start of the group.
    pub begun: Instant,
}

/// Counts the entries of a tree until the tree is complete.
pub struct TreeReport {
    json: bool,
    /// True if the output cannot be printed any more.
    closed: bool,
    counts: EntryCounts,
    received: u64,
    begun: Option<Instant>,
}

#[derive(Serialize)]
struct StoredRow {
    stored: String,
    #[serde(flatten)]
    counts: EntryCounts,
    received_bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

impl TreeReport {
    /// A report that prints rows of JSON, or lines.
    pub fn new(json: bool) -> Self {
        Self { json, closed: false, counts: EntryCounts::default(), received: 0, begun: None }
    }

    /// Adds an entry, and prints a tree that is complete with it. If printing fails, the server reports it once and the
    /// session goes on.
    pub fn add(&mut self, stored: &Stored) {
        if !self.closed
            && let Err(failure) = self.print(stored)
        {
            self.closed = true;
            output::print_error(&format!("cannot print the stored files: {}", failure.message()));
        }
    }

    fn print(&mut self, stored: &Stored) -> CommandResult {
        let entry = &stored.entry;
        let begun = *self.begun.get_or_insert(stored.begun);
        self.counts.add(entry, stored.entry_result);
        self.received += stored.received;
        // A directory is complete at its end.
        if !entry.path.is_top() || entry.kind == EntryKind::Directory {
            return Ok(());
        }
        let (counts, received, took) = (self.counts, self.received, begun.elapsed());
        (self.counts, self.received, self.begun) = (EntryCounts::default(), 0, None);
        let name = entry.path.to_string();
        if self.json {
            return output::json(&StoredRow {
                stored: name,
                counts,
                received_bytes: received,
                seconds: took.as_secs_f64(),
                gbytes_per_s: gbytes_per_s(received, took),
                blake3: stored.hash.map(|hash| hash.to_string()),
            });
        }
        output::line(&counts.line("stored", &name, received, took))
    }
}
