//! The messages from the server, and the free windows.

use std::time::{Duration, Instant};

use crate::files::{ReceiverMessage, WindowLayout};
use multirail::{Fabric, Message, Peer};

use crate::failure::{CommandFailure, CommandResult, printable};
use crate::wire::{MESSAGE_BYTES, MessageReceiver, RECEIVES};

/// How long a live server may take to sync or read files.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// What the user can do when the server is gone.
pub const RESTART: &str = "restart the server, then send again with --resume";

/// The reason why the sender stops early.
pub enum SendError {
    /// The server refused. This is the cause of other failures.
    ServerRefused(CommandFailure),
    /// Something failed. If the window writer failed too, its failure was first.
    Failed(CommandFailure),
    /// The connection to the server is lost.
    ServerLost(CommandFailure),
    /// The current file is no longer as it was offered.
    FileChanged,
}

impl SendError {
    /// The same reason with a context: `prefix: text`.
    pub fn context(self, prefix: impl std::fmt::Display) -> Self {
        match self {
            Self::ServerRefused(failure) => Self::ServerRefused(failure.context(prefix)),
            Self::Failed(failure) => Self::Failed(failure.context(prefix)),
            Self::ServerLost(failure) => Self::ServerLost(failure.context(prefix)),
            Self::FileChanged => Self::Failed(CommandFailure::from(self).context(prefix)),
        }
    }
}

impl From<multirail::Error> for SendError {
    fn from(error: multirail::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl From<CommandFailure> for SendError {
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<SendError> for CommandFailure {
    fn from(stop: SendError) -> Self {
        match stop {
            SendError::ServerRefused(failure) | SendError::Failed(failure) => failure,
            SendError::ServerLost(failure) => Self::new(format!("{}; {RESTART}", failure.message())),
            SendError::FileChanged => Self::new("a file changed while it was sent; send it again"),
        }
    }
}

/// The messages from the server, over one connection after another.
pub struct ServerChannel {
    incoming: MessageReceiver,
    /// Messages of another connection than the current one. The server may greet on the next connection while this side
    /// still looks for the reason why the last one ended.
    other_messages: Vec<Message>,
    /// The layout of the region.
    pub layout: WindowLayout,
    /// The next window.
    pub next: u64,
    /// The free windows of the region.
    free: Vec<bool>,
}

impl ServerChannel {
    /// The messages of a server over the connection `peer`. The windows are all free.
    pub fn new(fabric: &Fabric, peer: &Peer) -> CommandResult<Self> {
        let incoming = MessageReceiver::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
        let layout = WindowLayout::OFFERED;
        let free = vec![true; layout.windows as usize];
        Ok(Self { incoming, other_messages: Vec::new(), layout, next: 0, free })
    }

    /// Goes on with the connection `peer`, whose windows are all free. The receives stay: the server may have sent to
    /// them already.
    pub fn continue_with(&mut self, peer: &Peer) {
        self.incoming.set_peer(peer);
        self.other_messages.retain(|message| message.peer() == peer.id());
        self.next = 0;
        self.set_layout(WindowLayout::OFFERED);
    }

    /// Sets the server's layout, before the first window.
    pub fn set_layout(&mut self, layout: WindowLayout) {
        (self.layout, self.free) = (layout, vec![true; layout.windows as usize]);
    }

    /// Waits for the next message that is not about windows.
    pub fn receive(&mut self) -> Result<ReceiverMessage, SendError> {
        self.receive_within(MAX_WAIT)
    }

    /// The same, with a limit.
    pub fn receive_within(&mut self, limit: Duration) -> Result<ReceiverMessage, SendError> {
        loop {
            let message = self.message(limit)?;
            match message {
                ReceiverMessage::Free { sequence } => self.free(sequence)?,
                message => return Ok(message),
            }
        }
    }

    /// Waits until the next window is free.
    pub fn wait_until_free(&mut self) -> Result<(), SendError> {
        while !self.free[self.layout.slot(self.next)] {
            match self.message(MAX_WAIT)? {
                ReceiverMessage::Free { sequence } => self.free(sequence)?,
                other => return Err(SendError::ServerRefused(unexpected(other))),
            }
        }
        Ok(())
    }

    /// Marks the next window as used, and moves on to the one after it.
    pub fn take_window(&mut self) {
        self.free[self.layout.slot(self.next)] = false;
        self.next += 1;
    }

    /// The server's reason to end the session, if it arrives within `limit`.
    pub fn refusal(&mut self, limit: Duration) -> Option<String> {
        let until = Instant::now() + limit;
        loop {
            match self.message(until.saturating_duration_since(Instant::now())) {
                Ok(ReceiverMessage::Refused(reason)) => return Some(reason),
                Ok(
                    ReceiverMessage::Free { .. } | ReceiverMessage::Stored | ReceiverMessage::Actions { .. },
                ) => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }

    fn message(&mut self, limit: Duration) -> CommandResult<ReceiverMessage> {
        ReceiverMessage::decode(&self.next_message(limit)?.to_vec()).map_err(CommandFailure::new)
    }

    /// The next message of the current connection.
    fn next_message(&mut self, limit: Duration) -> CommandResult<Message> {
        let peer = self.incoming.peer();
        if let Some(at) = self.other_messages.iter().position(|message| message.peer() == peer) {
            return Ok(self.other_messages.remove(at));
        }
        loop {
            let message = self.incoming.next(limit)?;
            if message.peer() == peer {
                return Ok(message);
            }
            self.other_messages.push(message);
        }
    }

    fn free(&mut self, sequence: u64) -> Result<(), SendError> {
        if sequence >= self.next {
            return Err(SendError::ServerRefused(CommandFailure::new(
                "the server freed a window that was not filled",
            )));
        }
        self.free[self.layout.slot(sequence)] = true;
        Ok(())
    }
}

/// The failure with the server's reason.
pub fn refused(reason: &str) -> CommandFailure {
    CommandFailure::new(format!("the server refused: {}", printable(reason)))
}

/// The failure for an unexpected message.
pub fn unexpected(message: ReceiverMessage) -> CommandFailure {
    match message {
        ReceiverMessage::Refused(reason) => refused(&reason),
        _ => CommandFailure::new(
            "the server sent an unexpected message; run the same multirail version on both sides",
        ),
    }
}

/// Tells when the sender has to show the server that it is alive.
pub struct KeepAliveTimer {
    every: Duration,
    last: Instant,
}

impl KeepAliveTimer {
    /// A timer that is due every `every`.
    pub fn new(every: Duration) -> Self {
        Self { every, last: Instant::now() }
    }

    /// Returns true if the timer is due, and restarts it.
    pub fn is_due(&mut self) -> bool {
        let due = self.last.elapsed() >= self.every;
        if due {
            self.last = Instant::now();
        }
        due
    }
}
