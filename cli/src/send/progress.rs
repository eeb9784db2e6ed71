//! The progress of sending: a bar on a terminal, or rows of JSON.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::failure::CommandResult;
use crate::output;

/// Counts and shows the sent bytes.
pub struct SendProgress {
    bar: ProgressBar,
    rows: bool,
    sent: u64,
    /// The bytes that were sent in vain.
    wasted: u64,
    total: u64,
}

#[derive(Serialize)]
struct ProgressRow {
    progress_bytes: u64,
    total_bytes: u64,
}

impl SendProgress {
    /// The progress of `total` bytes. With `rows` it prints JSON.
    pub fn new(total: u64, json: bool, rows: bool) -> Self {
        let target = if json || rows { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template =
            "[{bar:30}] {binary_bytes} of {binary_total_bytes}, {decimal_bytes_per_sec}, {eta} left {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, rows, sent: 0, wasted: 0, total }
    }

    /// Adds bytes that are about to be sent.
    pub fn add_sent(&mut self, bytes: u64) -> CommandResult {
        self.sent += bytes;
        self.bar.inc(bytes);
        match self.rows && bytes > 0 {
            true => output::json(&ProgressRow { progress_bytes: self.sent, total_bytes: self.total }),
            false => Ok(()),
        }
    }

    /// The bytes sent so far, also those sent in vain.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Notes that `bytes` of those sent were sent in vain. `total` bytes are to be sent beside all of those.
    pub fn waste(&mut self, bytes: u64, total: u64) {
        self.wasted += bytes;
        self.total = total + self.wasted;
        self.bar.set_length(self.total);
    }

    /// Adds bytes that need not be sent.
    pub fn skip(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Shows what the command is doing.
    pub fn set_message(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }

    /// Hides the bar while `print` prints.
    pub fn print_without_bar(&self, print: impl FnOnce() -> CommandResult) -> CommandResult {
        self.bar.suspend(print)
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
