//! What a server prints about what it stored: a line per file, or per whole tree.

use std::time::Instant;

use multirail::files::{Entry, Kind};
use serde::Serialize;

use crate::cli::failure::Done;
use crate::cli::output;
use crate::cli::units::{Size, gbytes_per_s};

/// Something that has its final name.
pub struct Stored {
    /// Which.
    pub entry: Entry,
    /// Of files without holes.
    pub hash: Option<blake3::Hash>,
    /// When the group began.
    pub begun: Instant,
}

/// Counts what lies in a tree until the tree is complete.
pub struct Report {
    json: bool,
    /// Nobody reads what is printed.
    closed: bool,
    files: u64,
    bytes: u64,
    begun: Option<Instant>,
}

#[derive(Serialize)]
struct StoredRow {
    stored: String,
    files: u64,
    bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

impl Report {
    /// Prints rows of JSON, or lines.
    pub fn new(json: bool) -> Self {
        Self { json, closed: false, files: 0, bytes: 0, begun: None }
    }

    /// Prints what is complete with this. A sender goes on if that fails, and we say so once.
    pub fn add(&mut self, stored: &Stored) {
        if !self.closed
            && let Err(failure) = self.print(stored)
        {
            self.closed = true;
            output::complain(&format!("cannot print what is stored: {}", failure.sentence()));
        }
    }

    fn print(&mut self, stored: &Stored) -> Done {
        let entry = &stored.entry;
        let begun = *self.begun.get_or_insert(stored.begun);
        self.files += u64::from(entry.kind != Kind::Leave);
        self.bytes += entry.size();
        if !entry.path.is_top() {
            return Ok(());
        }
        let (files, bytes, took) = (self.files, self.bytes, begun.elapsed());
        (self.files, self.bytes, self.begun) = (0, 0, None);
        let speed = gbytes_per_s(bytes, took);
        if self.json {
            return output::json(&StoredRow {
                stored: entry.path.to_string(),
                files,
                bytes,
                seconds: took.as_secs_f64(),
                gbytes_per_s: speed,
                blake3: stored.hash.map(|hash| hash.to_string()),
            });
        }
        let what = match entry.kind {
            Kind::Leave => format!("{files} files, {}", Size(bytes)),
            _ => Size(bytes).to_string(),
        };
        output::line(&format!(
            "stored {}: {what} in {:.2} s, {speed:.2} GB/s",
            entry.path,
            took.as_secs_f64()
        ))
    }
}
