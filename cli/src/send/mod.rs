//! `multirail send`: sends files and directories to a `multirail serve`.

mod list;
mod window_packer;
mod window_writer;

mod progress;

mod sender;
mod server_channel;
mod source;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::files::OfferedEntry;
use serde::Serialize;

use super::entry_counts::EntryCounts;
use super::failure::CommandResult;
use super::units::gbytes_per_s;
use super::{Common, connection, output};
use list::{List, ListRules, SourcePath};
use progress::SendProgress;
use sender::{FileSender, SendOutcome};

#[derive(clap::Args)]
pub struct SendArguments {
    /// Files, and directories with their content
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// The address that the server printed
    #[arg(long, value_name = "ADDRESS")]
    to: String,

    /// Continue an interrupted attempt: files that the server has with the same content are not
    /// sent again, and partial files are continued where they end or differ
    #[arg(long)]
    resume: bool,

    /// Skip pipes, sockets, devices, and links out of the tree, and print their names
    #[arg(long)]
    skip_special: bool,

    /// Send holes as zeros
    #[arg(long)]
    no_sparse: bool,

    /// Print a JSON row with the bytes sent so far, before each window
    #[arg(long)]
    progress: bool,
}

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

/// Sends every path. The first entry that fails ends the command.
pub fn run(common: &Common, arguments: SendArguments) -> CommandResult {
    let rules = ListRules { skip_special: arguments.skip_special, sparse: !arguments.no_sparse };
    let mut list = List::new(&arguments.paths, rules)?;
    list.skipped.iter().for_each(|why| output::print_error(&format!("skipped: {why}")));
    if list.special_bits > 0 {
        output::print_error(&format!(
            "setuid, setgid and sticky bits are not sent; {} files have such bits",
            list.special_bits
        ));
    }
    let fabric = common.open()?;
    let peer = connection::connect(&fabric, &arguments.to)?;
    let mut sender = FileSender::connect(&fabric, &peer, &list, arguments.resume, rules.sparse)?;
    let mut progress = SendProgress::new(list.total, common.json, arguments.progress);
    let sent = all(common, &mut list, &mut sender, &mut progress);
    progress.end();
    sent?;
    sender.finish()
}

fn all(
    common: &Common,
    list: &mut List,
    sender: &mut FileSender,
    progress: &mut SendProgress,
) -> CommandResult {
    let (mut next, mut root, mut row) = (0, 0, PathResults::new());
    while root < list.roots.len() {
        let outcomes =
            if next < list.entries.len() { sender.group(list, next, progress)? } else { Vec::new() };
        for outcome in &outcomes {
            // A path whose entries are all skipped is complete at once.
            root = print_done(common, list, (root, next), &mut row, progress)?;
            let entry = &list.entries[next];
            row.add(entry, outcome);
            progress.skip(entry.data().saturating_sub(outcome.sent));
            next += 1;
        }
        root = print_done(common, list, (root, next), &mut row, progress)?;
    }
    Ok(())
}

/// Prints the complete paths from `root` on: those that end at or before entry `next`. Returns the first incomplete
/// path.
fn print_done(
    common: &Common,
    list: &List,
    (mut root, next): (usize, usize),
    row: &mut PathResults,
    progress: &SendProgress,
) -> CommandResult<usize> {
    while let Some(done) = list.roots.get(root).filter(|root| root.end <= next) {
        progress.print_without_bar(|| std::mem::replace(row, PathResults::new()).print(common, done))?;
        root += 1;
    }
    Ok(root)
}

/// Counts the results of one path's entries.
struct PathResults {
    counts: EntryCounts,
    total: SendOutcome,
    begun: Instant,
}

impl PathResults {
    fn new() -> Self {
        Self { counts: EntryCounts::default(), total: SendOutcome::default(), begun: Instant::now() }
    }

    fn add(&mut self, entry: &OfferedEntry, outcome: &SendOutcome) {
        self.counts.add(entry, outcome.entry_result);
        self.total.sent += outcome.sent;
        self.total.again += outcome.again.min(outcome.sent);
        self.total.hash = outcome.hash;
    }

    fn print(self, common: &Common, root: &SourcePath) -> CommandResult {
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
