//! The transfer of all paths, over as many connections as it takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::{AddressSource, ErrorKind, Fabric, Peer, PeerHandle, ReconnectPolicy, wait};

use super::SendArguments;
use super::list::List;
use super::path_results::PathResults;
use super::progress::SendProgress;
use super::sender::FileSender;
use super::server_channel::{RESTART, SendError, ServerChannel};
use crate::failure::{CommandFailure, CommandResult};
use crate::{Common, connection, output};

/// How long after a failure this side waits for the end of the connection, to know whether the server is lost.
const LOSS_LIMIT: Duration = Duration::from_millis(300);

/// How much longer than the limit of reconnecting this side waits for the result.
const SLACK: Duration = Duration::from_secs(30);

/// The transfer of all paths.
pub struct Transfer<'a> {
    common: &'a Common,
    arguments: &'a SendArguments,
    server: Arc<dyn AddressSource>,
    list: List,
    progress: SendProgress,
    /// The next entry.
    next: usize,
    /// The first path that is not complete.
    root: usize,
    /// The results of that path.
    row: PathResults,
}

/// What `send` had done when it lost the connection: it compares two losses, to see whether there is progress.
#[derive(PartialEq, Eq)]
struct Mark {
    next: usize,
    sent: u64,
}

impl<'a> Transfer<'a> {
    /// The transfer of `list`.
    pub fn new(
        common: &'a Common,
        arguments: &'a SendArguments,
        server: Arc<dyn AddressSource>,
        list: List,
    ) -> Self {
        let progress = SendProgress::new(list.total, common.json, arguments.progress);
        Self { common, arguments, server, list, progress, next: 0, root: 0, row: PathResults::new() }
    }

    /// Sends everything.
    pub fn run(mut self) -> CommandResult {
        let sent = self.send();
        self.progress.end();
        sent
    }

    fn send(&mut self) -> CommandResult {
        let fabric = self.common.open()?;
        let policy = self.arguments.reconnect.map_or(ReconnectPolicy::OFF, policy);
        let mut server = connection::connect_handle(&fabric, &self.server, policy)?;
        let mut peer = server.peer()?;
        let mut channel = ServerChannel::new(&fabric, &peer)?;
        let mut last_progress = (Mark { next: 0, sent: 0 }, Instant::now());
        let (mut known_losses, mut resume) = (fabric.lost_devices(), self.arguments.resume);
        loop {
            let stop = match self.session(&fabric, &peer, &mut channel, resume) {
                Ok(()) => return Ok(()),
                Err(stop) => stop,
            };
            // A device that is lost may take messages with it of which nobody can tell whether they have arrived. Over
            // another connection the server tells what it has.
            let losses = fabric.lost_devices();
            let new_loss = losses.iter().find(|device| !known_losses.contains(device));
            if let (SendError::Failed(failure) | SendError::ServerLost(failure), Some(device)) =
                (&stop, new_loss)
            {
                peer.disconnect();
                self.say(&format!("{device} is lost ({}); send connects again", failure.message()))?;
                (known_losses, resume) = (losses, true);
                server = connection::connect_handle(&fabric, &self.server, policy)?;
                peer = server.peer()?;
                channel.continue_with(&peer);
                continue;
            }
            let (SendError::ServerLost(failure), Some(limit)) = (&stop, self.arguments.reconnect) else {
                return Err(stop.into());
            };
            let mark = Mark { next: self.next, sent: self.progress.sent() };
            if mark != last_progress.0 {
                last_progress = (mark, Instant::now());
            } else if last_progress.1.elapsed() > limit {
                // The server comes back again and again, and takes nothing.
                return Err(stop.into());
            }
            self.say(&format!(
                "the connection to the server is lost ({}); send waits up to {} s for the server to come back",
                failure.message(),
                limit.as_secs_f64()
            ))?;
            peer = wait_for(&server, limit)?;
            channel.continue_with(&peer);
            self.say("the server is back, and send continues")?;
        }
    }

    /// Sends what is left over one connection.
    fn session(
        &mut self,
        fabric: &Fabric,
        peer: &Peer,
        channel: &mut ServerChannel,
        resume: bool,
    ) -> Result<(), SendError> {
        let sparse = !self.arguments.no_sparse;
        let reconnects = self.arguments.reconnect.is_some();
        let lost = |stop| match stop {
            SendError::Failed(failure) if reconnects && wait(peer.closed(), LOSS_LIMIT).is_ok() => {
                SendError::ServerLost(failure)
            }
            stop => stop,
        };
        let mut sender =
            FileSender::connect(fabric, peer, channel, &self.list, resume, sparse).map_err(lost)?;
        self.groups(&mut sender)?;
        sender.finish().map_err(lost)
    }

    /// Sends one group of entries after the other.
    fn groups(&mut self, sender: &mut FileSender<'_>) -> Result<(), SendError> {
        while self.root < self.list.roots.len() {
            let before = self.progress.sent();
            let outcomes = if self.next < self.list.entries.len() {
                sender.group(&mut self.list, self.next, &mut self.progress).inspect_err(|_| {
                    // The group is offered again over the next connection, if there is one.
                    self.progress.waste(self.progress.sent() - before, self.list.total);
                })?
            } else {
                Vec::new()
            };
            for outcome in &outcomes {
                // A path whose entries are all skipped is complete at once.
                self.print_done()?;
                let entry = &self.list.entries[self.next];
                self.row.add(entry, outcome);
                self.progress.skip(entry.data().saturating_sub(outcome.sent));
                self.next += 1;
            }
            self.print_done()?;
        }
        Ok(())
    }

    /// Prints the complete paths: those that end at or before the next entry.
    fn print_done(&mut self) -> CommandResult {
        while let Some(done) = self.list.roots.get(self.root).filter(|root| root.end <= self.next) {
            let row = std::mem::replace(&mut self.row, PathResults::new());
            self.progress.print_without_bar(|| row.print(self.common, done))?;
            self.root += 1;
        }
        Ok(())
    }

    /// Tells the user what happens.
    fn say(&self, what: &str) -> CommandResult {
        self.progress.print_without_bar(|| {
            output::print_error(what);
            Ok(())
        })
    }
}

/// Waits until the server is back.
fn wait_for(server: &PeerHandle, limit: Duration) -> CommandResult<Peer> {
    let connected = wait(server.connected(), limit.saturating_add(SLACK)).unwrap_or_else(Err);
    connected.map_err(|error| match error.kind() {
        ErrorKind::PeerDied | ErrorKind::DeadlineExceeded => {
            let (address, seconds) = (server.address(), limit.as_secs_f64());
            let last = std::error::Error::source(&error);
            let last = last.map_or_else(String::new, |last| format!(" ({last})"));
            CommandFailure::new(format!("{address} was not back within {seconds} s{last}; {RESTART}"))
        }
        _ => error.into(),
    })
}

/// Looks for the server every 2 s or more often, for at most `limit`.
fn policy(limit: Duration) -> ReconnectPolicy {
    ReconnectPolicy::within(limit).longest_delay(Duration::from_secs(2))
}
