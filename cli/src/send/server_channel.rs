//! The messages from the server, and the free windows.

use std::time::{Duration, Instant};

use crate::files::{ReceiverMessage, WindowLayout};

use crate::failure::{CommandFailure, CommandResult, printable};
use crate::wire::MessageReceiver;

/// How long a live server may take to sync or read files.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// The reason why the sender stops early.
pub enum SendError {
    /// The server refused. This is the cause of other failures.
    ServerRefused(CommandFailure),
    /// Something failed. If the window writer failed too, its failure was first.
    Failed(CommandFailure),
    /// The current file is no longer as it was offered.
    FileChanged,
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
            SendError::FileChanged => Self::new("a file changed while it was sent; send it again"),
        }
    }
}

/// The messages from the server.
pub struct ServerChannel {
    incoming: MessageReceiver,
    /// The layout of the region.
    pub layout: WindowLayout,
    /// The next window.
    pub next: u64,
    /// The free windows of the region.
    free: Vec<bool>,
}

impl ServerChannel {
    /// The messages of a server whose windows are all free.
    pub fn new(incoming: MessageReceiver, layout: WindowLayout) -> Self {
        Self { incoming, layout, next: 0, free: vec![true; layout.windows as usize] }
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
        ReceiverMessage::decode(&self.incoming.next(limit)?.to_vec()).map_err(CommandFailure::new)
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
