//! The results of one path, and the row that is printed of them.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::list::SourcePath;
use super::sender::SendOutcome;
use crate::entry_counts::EntryCounts;
use crate::failure::CommandResult;
use crate::files::OfferedEntry;
use crate::units::gbytes_per_s;
use crate::{Common, output};

/// The output row of one path.
#[derive(Serialize)]
struct SentRow {
    sent: String,
    #[serde(flatten)]
    counts: EntryCounts,
    sent_bytes: u64,
    resent_bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

/// Counts the results of one path's entries.
pub struct PathResults {
    counts: EntryCounts,
    total: SendOutcome,
    begun: Instant,
}

impl PathResults {
    /// The results of no entry.
    pub fn new() -> Self {
        Self { counts: EntryCounts::default(), total: SendOutcome::default(), begun: Instant::now() }
    }

    /// Adds the outcome of an entry.
    pub fn add(&mut self, entry: &OfferedEntry, outcome: &SendOutcome) {
        self.counts.add(entry, outcome.entry_result);
        self.total.sent += outcome.sent;
        self.total.again += outcome.again.min(outcome.sent);
        self.total.hash = outcome.hash;
    }

    /// Prints the row of the complete path `root`.
    pub fn print(self, common: &Common, root: &SourcePath) -> CommandResult {
        let took: Duration = self.begun.elapsed();
        let (name, total, speed) = (root.name.to_string(), self.total, gbytes_per_s(self.total.sent, took));
        let is_one_file = self.counts.is_one_file();
        if common.json {
            return output::json(&SentRow {
                sent: name,
                counts: self.counts,
                sent_bytes: total.sent,
                resent_bytes: total.again,
                seconds: took.as_secs_f64(),
                gbytes_per_s: speed,
                blake3: total.hash.filter(|_| is_one_file).map(|hash| hash.to_string()),
            });
        }
        output::line(&self.counts.line("sent", &name, total.sent, took))
    }
}
