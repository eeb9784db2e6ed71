//! `multirail serve`: receives files into a directory, from several senders at once.

mod beneath;
mod decide;
mod directory;
mod durable;
mod group_writer;
pub(super) mod journal;
mod partial_file;
mod quota;
mod refused_senders;
mod report;
mod reservation;
mod send_command;
mod senders;
mod session;
mod staged_file;
mod staging_directory;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use multirail::{ErrorKind, Fabric, Peer, RecvPool};

use super::common::ObserveOptions;
use super::discovery::JoinOptions;
use super::failure::{CommandFailure, CommandResult};
use super::units::{self, Size};
use super::wire::MESSAGE_BYTES;
use super::{Common, connection, output};
use directory::{Directory, NameClash};
use quota::Quota;
use refused_senders::RefusedSenders;
use senders::Senders;
use session::SenderSession;

/// The pause after a failed connection attempt, so that many of them cost little CPU time.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

#[derive(clap::Args)]
pub struct ServeArguments {
    /// The directory to store files in; unfinished files are in its .multirail
    #[arg(long, value_name = "DIR")]
    into: PathBuf,

    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:7411", value_name = "ADDRESS")]
    listen: String,

    #[command(flatten)]
    observed: ObserveOptions,

    #[command(flatten)]
    joins: JoinOptions,

    /// Serve one sender, then exit
    #[arg(long)]
    once: bool,

    /// What to do with a file or link whose name exists. An existing directory receives the files sent
    /// into it; only the rule overwrite changes its mode and time
    #[arg(long, value_enum, default_value_t = NameClash::Refuse, value_name = "RULE")]
    on_clash: NameClash,

    /// Replace existing files: the same as --on-clash overwrite
    #[arg(long, conflicts_with = "on_clash")]
    overwrite: bool,

    /// Limit of the disk use, such as 500MiB or 2GiB. It counts blocks of 4 KiB, one block for each file,
    /// link and directory, unfinished files, and journals
    #[arg(long, value_name = "SIZE")]
    max_bytes: Option<Size>,

    /// Drop a sender that is silent for this time, such as 30s or 5min, while the server waits for it. A
    /// sender that reads or compares files sends signs of life
    #[arg(long, default_value = "1min", value_name = "TIME", value_parser = silence)]
    silence: Duration,
}

struct FileServer {
    fabric: Fabric,
    directory: Directory,
    senders: Arc<Senders>,
    /// How long a sender may be silent.
    silence: Duration,
    json: bool,
    /// True after a signal to stop.
    interrupted: Arc<AtomicBool>,
    /// The number of senders that could not finish because of the signal.
    unfinished_senders: AtomicUsize,
}

/// Serves until a signal, or one sender with `--once`.
pub fn run(common: &Common, arguments: ServeArguments) -> CommandResult {
    let on_clash = if arguments.overwrite { NameClash::Overwrite } else { arguments.on_clash };
    let directory = Directory::open(arguments.into, on_clash, Quota::new(arguments.max_bytes))?;
    let fabric = common.open_observed(&arguments.observed)?;
    // Closing the fabric ends every session. Complete files stay, and so do partial files with their journals.
    let interrupted = Arc::<AtomicBool>::default();
    let (closing, flag) = (fabric.clone(), Arc::clone(&interrupted));
    let interrupt = move || {
        flag.store(true, Ordering::SeqCst);
        closing.close();
    };
    ctrlc::set_handler(interrupt)
        .map_err(|error| CommandFailure::new(format!("cannot handle signals: {error}")))?;
    // A sender waits for the welcome of its session, so receives are posted before its first message.
    let opened = || -> CommandResult<_> {
        let pool = fabric.recv_pool(senders::MOST * senders::BACKLOG, MESSAGE_BYTES)?;
        let listener = connection::listen(&fabric, &arguments.listen)?;
        Ok((pool, listener, RefusedSenders::new(&fabric)?))
    };
    let (pool, listener, mut refused_senders) = match opened() {
        // A signal has closed the fabric.
        Err(_) if interrupted.load(Ordering::SeqCst) => return ended_by_signal(&directory, 0),
        opened => opened?,
    };
    let address = listener.local_addr();
    let send = send_command::line(common, &address)?;
    let _joined = arguments.joins.join(&fabric, &address)?;
    match common.json {
        true => output::json(&serde_json::json!({ "listening": address, "send": send }))?,
        false => output::line(&format!("listening on {address}; run: {send}"))?,
    }
    let (senders, silence, json) = (Arc::<Senders>::default(), arguments.silence, common.json);
    let server = Arc::new(FileServer {
        fabric,
        directory,
        senders: Arc::clone(&senders),
        silence,
        json,
        interrupted,
        unfinished_senders: AtomicUsize::new(0),
    });
    let served = Arc::clone(&senders);
    std::thread::spawn(move || dispatch(pool, &served));
    if arguments.once {
        let peer = match pollster::block_on(listener.accept()) {
            Err(error) if error.kind() == ErrorKind::Closed => return server.interrupted(),
            accepted => accepted?,
        };
        drop(listener);
        return match senders.add(&peer) {
            Some(incoming) => server.serve(&peer, incoming),
            None => Ok(()),
        };
    }
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    loop {
        let accepted = match refused_senders.disconnect_expired() {
            None => pollster::block_on(listener.accept()),
            Some(limit) => match multirail::wait(listener.accept(), limit) {
                Ok(accepted) => accepted,
                // No sender has connected, but the time of a refused sender is over.
                Err(_) => continue,
            },
        };
        match accepted {
            Ok(peer) => {
                let Some(incoming) = senders.add(&peer) else {
                    refused_senders.add(peer);
                    continue;
                };
                let server = Arc::clone(&server);
                sessions.retain(|session| !session.is_finished());
                sessions.push(std::thread::spawn(move || {
                    if let Err(failure) = server.serve(&peer, incoming) {
                        output::print_error(failure.message());
                    }
                }));
            }
            Err(error) if error.kind() == ErrorKind::Closed => {
                sessions.into_iter().for_each(|session| drop(session.join()));
                return server.interrupted();
            }
            Err(error) => {
                output::print_error(&format!("a sender could not connect: {error}"));
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

/// Parses the limit of silence. Senders send signs of life four times as often.
fn silence(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        limit if limit < Duration::from_secs(1) => Err("the silence must be at least 1 s".into()),
        limit => Ok(limit),
    }
}

/// Passes every message to its peer's session until the fabric closes.
fn dispatch(pool: RecvPool, senders: &Senders) {
    loop {
        match pollster::block_on(pool.next()) {
            Ok(message) => senders.deliver(message.peer(), message.to_vec()),
            Err(error) if matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeviceLost) => return,
            // The message breaks the protocol. Its sender's session times out or ends.
            Err(error) => tracing::warn!(%error, "a message was dropped"),
        }
    }
}

impl FileServer {
    fn serve(&self, peer: &Peer, incoming: Receiver<Vec<u8>>) -> CommandResult {
        let served = SenderSession::run(self, peer, incoming);
        if served.is_err() && self.interrupted.load(Ordering::SeqCst) {
            self.unfinished_senders.fetch_add(1, Ordering::SeqCst);
        }
        self.senders.remove(peer.id());
        peer.disconnect();
        served
    }

    /// The result after a signal and the end of all sessions: success if nothing is unfinished.
    fn interrupted(&self) -> CommandResult {
        ended_by_signal(&self.directory, self.unfinished_senders.load(Ordering::SeqCst))
    }
}

/// The result after a signal that interrupted this many senders.
fn ended_by_signal(directory: &Directory, senders: usize) -> CommandResult {
    let unfinished_senders = match senders {
        0 => String::new(),
        1 => ": one sender had not finished".to_owned(),
        many => format!(": {many} senders had not finished"),
    };
    let waiting = match directory.staging.partials() {
        0 if senders == 0 => return Ok(()),
        0 => "send again with --resume".to_owned(),
        1 => "one unfinished file is in .multirail for `send --resume`".to_owned(),
        many => format!("{many} unfinished files are in .multirail for `send --resume`"),
    };
    Err(CommandFailure::new(format!("interrupted{unfinished_senders}; {waiting}")))
}

/// The failure of an operation of the server. The sender gets this text too, so it has no local path.
pub fn failed(what: &str, error: impl Into<std::io::Error>) -> CommandFailure {
    let error = error.into();
    let remedy = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; free disk space on the server, then run `send --resume`"
        }
        std::io::ErrorKind::PermissionDenied => "; check the directory's permissions",
        _ => "",
    };
    CommandFailure::new(format!("the server cannot {what}: {error}{remedy}"))
}

/// The failure for a sender that breaks the protocol.
pub fn unexpected_item() -> CommandFailure {
    CommandFailure::new("the sender sent an unexpected item; run the same multirail version on both sides")
}
