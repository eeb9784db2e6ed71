//! `multirail send`: sends files to a `multirail serve`.

mod mover;
mod source;

use std::path::PathBuf;
use std::sync::mpsc::{self, SyncSender};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use multirail::{Access, Descriptor, Fabric, Peer, Region};
use serde::Serialize;

use super::failure::{Done, Failure, printable};
use super::files::{Layout, PROTOCOL, ToSender, ToServer, VERSION};
use super::units::{Size, gbytes_per_s};
use super::wire::{Inbox, MESSAGE_BYTES, Outbox, PROMPT, RECEIVES};
use super::{Common, output, wait};
use mover::Mover;
use source::Source;

/// How long a server that is alive may take to write a window, or to sync a file.
const PATIENCE: Duration = Duration::from_secs(1800);

/// How long to look for the server's reason once something broke.
const AUTOPSY: Duration = Duration::from_millis(300);

/// How long the server may take to answer that we give up.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub struct SendArguments {
    /// The files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The address the server printed
    #[arg(long, value_name = "ADDRESS")]
    to: String,
}

#[derive(Serialize)]
struct SentRow {
    sent: String,
    bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    blake3: String,
}

/// Sends every file; the first that fails ends it.
pub fn run(common: &Common, arguments: SendArguments) -> Done {
    let sources = arguments.files.iter().map(Source::open).collect::<Done<Vec<_>>>()?;
    let fabric = common.open()?;
    let peer = wait::connect(&fabric, &arguments.to)?;
    let mut sender = Sender::greet(&fabric, &peer)?;
    for source in &sources {
        let begun = Instant::now();
        let bar = progress(source, common.json);
        let sent = sender.send(source, &bar);
        bar.finish_and_clear();
        let hash = sent.map_err(|failure| failure.within(format!("{} was not sent", source.name())))?;
        report(common, source, begun.elapsed(), hash)?;
    }
    sender.leave()
}

/// A sender that a server has welcomed.
struct Sender {
    peer: Peer,
    outbox: Outbox,
    inbox: Inbox,
    layout: Layout,
    region: Region,
    mover: Mover,
}

impl Sender {
    fn greet(fabric: &Fabric, peer: &Peer) -> Done<Self> {
        let mut inbox = Inbox::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
        let outbox = Outbox::new(fabric, peer)?;
        let (layout, descriptor) = match inbox.hear(PROMPT)? {
            ToSender::Welcome { protocol: PROTOCOL, version: VERSION, layout, region } => (layout, region),
            ToSender::Welcome { protocol: PROTOCOL, version, .. } => {
                return Err(Failure::new(format!(
                    "the server speaks version {version}, this sender {VERSION}; run the same multirail on both sides"
                )));
            }
            ToSender::Refused(reason) => return Err(refused(&reason)),
            _ => return Err(Failure::new("that address is no `multirail serve`")),
        };
        let remote = peer.import(&Descriptor::from_bytes(&descriptor)?)?;
        if !layout.is_sound() || (remote.len() as u64) < layout.total() {
            return Err(Failure::new(
                "the server's windows make no sense; run the same multirail on both sides",
            ));
        }
        let region = fabric.alloc(layout.total() as usize, Access::LOCAL)?;
        let mover = Mover::new(peer, &region, remote, layout);
        Ok(Self { peer: peer.clone(), outbox, inbox, layout, region, mover })
    }

    fn send(&mut self, source: &Source, bar: &ProgressBar) -> Done<blake3::Hash> {
        self.send_whole(source, bar).map_err(|failure| self.give_up(failure))
    }

    /// Ends the conversation for `failure`, or rather for the server's reason if it
    /// gave one: that says more than the broken connection that follows it.
    fn give_up(&mut self, failure: Failure) -> Failure {
        if let Some(reason) = self.refusal(AUTOPSY) {
            return refused(&reason);
        }
        // If this is not taken, the server sees us leave instead.
        if self.outbox.say(&ToServer::Abandon(failure.sentence().to_owned())).is_ok() {
            // It answers with a refusal; leaving earlier might drop our word unread.
            self.refusal(FAREWELL);
        }
        failure
    }

    /// The server's reason to end the conversation, if it comes within `limit`.
    fn refusal(&mut self, limit: Duration) -> Option<String> {
        let until = Instant::now() + limit;
        loop {
            match self.inbox.hear(until.saturating_duration_since(Instant::now())) {
                Ok(ToSender::Refused(reason)) => return Some(reason),
                Ok(ToSender::Free { .. }) => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }

    fn send_whole(&mut self, source: &Source, bar: &ProgressBar) -> Done<blake3::Hash> {
        let (name, size) = (source.name().as_bytes().to_vec(), source.size());
        self.outbox.say(&ToServer::Begin { name, size })?;
        match self.inbox.hear(PATIENCE)? {
            ToSender::Accepted => {}
            other => return Err(unexpected(other)),
        }
        let hash = self.windows(source, bar)?;
        bar.set_message("the server syncs it to disk");
        self.outbox.say(&ToServer::End { hash: hash.into() })?;
        match self.inbox.hear(PATIENCE)? {
            ToSender::Stored => Ok(hash),
            other => Err(unexpected(other)),
        }
    }

    /// Reads and hashes windows here while a thread moves those before.
    fn windows(&mut self, source: &Source, bar: &ProgressBar) -> Done<blake3::Hash> {
        let (layout, region, size) = (self.layout, &self.region, source.size());
        let (inbox, outbox, mover, peer) = (&mut self.inbox, &mut self.outbox, &self.mover, &self.peer);
        std::thread::scope(|scope| {
            let (filled, to_move) = mpsc::sync_channel::<u64>(layout.windows as usize);
            let moving = scope.spawn(move || {
                let moved = to_move.iter().try_for_each(|sequence| {
                    let len = layout.len(sequence, size);
                    mover.move_window(sequence, len)?;
                    bar.inc(len as u64);
                    outbox.say(&ToServer::Filled { sequence })
                });
                if moved.is_err() {
                    // The reader may wait for a window that will never be free again.
                    // First it may hear the server's reason, if there is one.
                    let _ = multirail::wait(peer.closed(), AUTOPSY);
                    peer.disconnect();
                }
                moved
            });
            let read = read(source, region, layout, inbox, filled);
            let moved = moving.join().unwrap_or_else(|_| Err(Failure::new("the moving thread panicked")));
            match (read, moved) {
                (Ok(hash), Ok(())) => Ok(hash),
                (Err(Stop::Answered(failure)), _) => Err(failure),
                (_, Err(failure)) | (Err(Stop::Broken(failure)), Ok(())) => Err(failure),
            }
        })
    }

    fn leave(mut self) -> Done {
        self.outbox.say(&ToServer::Bye)?;
        match self.inbox.hear(PROMPT)? {
            ToSender::Farewell => {
                self.peer.disconnect();
                Ok(())
            }
            other => Err(unexpected(other)),
        }
    }
}

/// Why the reader stopped early.
enum Stop {
    /// The server said so: that explains whatever broke elsewhere.
    Answered(Failure),
    /// Something broke; if the mover broke too, that was first.
    Broken(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Broken(failure)
    }
}

/// Fills windows as they become free; at the end all of them are free again.
fn read(
    source: &Source,
    region: &Region,
    layout: Layout,
    inbox: &mut Inbox,
    filled: SyncSender<u64>,
) -> Result<blake3::Hash, Stop> {
    let (size, windows) = (source.size(), u64::from(layout.windows));
    let count = layout.count(size);
    let mut reader = source.reader();
    let mut free = vec![true; layout.windows as usize];
    for sequence in 0..count {
        let slot = (sequence % windows) as usize;
        await_free(inbox, &mut free, slot)?;
        reader.fill(region, layout.offset(sequence), layout.len(sequence, size))?;
        free[slot] = false;
        if filled.send(sequence).is_err() {
            return Err(Stop::Broken(Failure::new("the moving thread ended early")));
        }
    }
    (0..free.len()).try_for_each(|slot| await_free(inbox, &mut free, slot))?;
    Ok(reader.hash())
}

fn await_free(inbox: &mut Inbox, free: &mut [bool], slot: usize) -> Result<(), Stop> {
    while !free[slot] {
        match inbox.hear(PATIENCE)? {
            ToSender::Free { sequence } => {
                let slot = (sequence % free.len() as u64) as usize;
                free[slot] = true;
            }
            other => return Err(Stop::Answered(unexpected(other))),
        }
    }
    Ok(())
}

fn progress(source: &Source, json: bool) -> ProgressBar {
    let target = if json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(source.size()), target);
    let template = "{prefix} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {decimal_bytes_per_sec}, {eta} left {msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_prefix(source.name().to_string())
}

fn report(common: &Common, source: &Source, took: Duration, hash: blake3::Hash) -> Done {
    let (size, speed) = (source.size(), gbytes_per_s(source.size(), took));
    if common.json {
        return output::json(&SentRow {
            sent: source.name().to_string(),
            bytes: size,
            seconds: took.as_secs_f64(),
            gbytes_per_s: speed,
            blake3: hash.to_string(),
        });
    }
    output::line(&format!(
        "sent {}: {} in {:.2} s, {speed:.2} GB/s",
        source.name(),
        Size(size),
        took.as_secs_f64()
    ))
}

fn refused(reason: &str) -> Failure {
    Failure::new(format!("the server refused: {}", printable(reason)))
}

fn unexpected(message: ToSender) -> Failure {
    match message {
        ToSender::Refused(reason) => refused(&reason),
        _ => Failure::new("the server spoke out of turn; run the same multirail version on both sides"),
    }
}
