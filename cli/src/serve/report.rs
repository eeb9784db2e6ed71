//! What a server prints about what it stored: a line per file, or per whole tree.

use std::time::Instant;

use crate::files::{Entry, Kind};
use serde::Serialize;

use crate::failure::Done;
use crate::output;
use crate::tally::{Became, Tally};
use crate::units::gbytes_per_s;

/// An entry that is done.
pub struct Stored {
    /// Which.
    pub entry: Entry,
    /// Whether it was stored.
    pub became: Became,
    /// Bytes of it that came over the wire.
    pub received: u64,
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
    tally: Tally,
    received: u64,
    begun: Option<Instant>,
}

#[derive(Serialize)]
struct StoredRow {
    stored: String,
    #[serde(flatten)]
    tally: Tally,
    received_bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

impl Report {
    /// Prints rows of JSON, or lines.
    pub fn new(json: bool) -> Self {
        Self { json, closed: false, tally: Tally::default(), received: 0, begun: None }
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
        self.tally.add(entry, stored.became);
        self.received += stored.received;
        // A directory is complete with its end.
        if !entry.path.is_top() || entry.kind == Kind::Directory {
            return Ok(());
        }
        let (tally, received, took) = (self.tally, self.received, begun.elapsed());
        (self.tally, self.received, self.begun) = (Tally::default(), 0, None);
        let name = entry.path.to_string();
        if self.json {
            return output::json(&StoredRow {
                stored: name,
                tally,
                received_bytes: received,
                seconds: took.as_secs_f64(),
                gbytes_per_s: gbytes_per_s(received, took),
                blake3: stored.hash.map(|hash| hash.to_string()),
            });
        }
        output::line(&tally.line("stored", &name, received, took))
    }
}
