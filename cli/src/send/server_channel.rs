//! What the sender hears, and which windows are free by it.

use std::time::{Duration, Instant};

use crate::files::{Layout, ToSender};

use crate::failure::{CommandResult, Failure, printable};
use crate::wire::MessageReceiver;

/// How long a server that is alive may take to sync files, or to read those it has.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// Why the sender stops early.
pub enum SendError {
    /// The server said so: that explains whatever broke elsewhere.
    ServerRefused(Failure),
    /// Something broke; if the mover broke too, that was first.
    Failed(Failure),
    /// The file at hand is no longer as it was offered.
    FileChanged,
}

impl From<Failure> for SendError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<SendError> for Failure {
    fn from(stop: SendError) -> Self {
        match stop {
            SendError::ServerRefused(failure) | SendError::Failed(failure) => failure,
            SendError::FileChanged => Self::new("a file changed while it was sent; send it again"),
        }
    }
}

/// The server's side of the conversation.
pub struct ServerChannel {
    incoming: MessageReceiver,
    /// How the region is divided.
    pub layout: Layout,
    /// The next window.
    pub next: u64,
    /// Which windows of the region are free.
    free: Vec<bool>,
}

impl ServerChannel {
    /// With a server whose windows are all free.
    pub fn new(incoming: MessageReceiver, layout: Layout) -> Self {
        Self { incoming, layout, next: 0, free: vec![true; layout.windows as usize] }
    }

    /// Before the first window: the server divides its region like this.
    pub fn set_layout(&mut self, layout: Layout) {
        (self.layout, self.free) = (layout, vec![true; layout.windows as usize]);
    }

    /// The next message that is not about windows.
    pub fn receive(&mut self) -> Result<ToSender, SendError> {
        self.receive_within(MAX_WAIT)
    }

    /// The same, at most `limit` from now.
    pub fn receive_within(&mut self, limit: Duration) -> Result<ToSender, SendError> {
        loop {
            let message = self.message(limit)?;
            match message {
                ToSender::Free { sequence } => self.free(sequence)?,
                message => return Ok(message),
            }
        }
    }

    /// Waits until the next window is free.
    pub fn wait_until_free(&mut self) -> Result<(), SendError> {
        while !self.free[self.layout.slot(self.next)] {
            match self.message(MAX_WAIT)? {
                ToSender::Free { sequence } => self.free(sequence)?,
                other => return Err(SendError::ServerRefused(unexpected(other))),
            }
        }
        Ok(())
    }

    /// The next window is no longer free, and the one behind it is next.
    pub fn take_window(&mut self) {
        self.free[self.layout.slot(self.next)] = false;
        self.next += 1;
    }

    /// The server's reason to end the conversation, if it comes within `limit`.
    pub fn refusal(&mut self, limit: Duration) -> Option<String> {
        let until = Instant::now() + limit;
        loop {
            match self.message(until.saturating_duration_since(Instant::now())) {
                Ok(ToSender::Refused(reason)) => return Some(reason),
                Ok(ToSender::Free { .. } | ToSender::Stored | ToSender::Actions { .. }) => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }

    fn message(&mut self, limit: Duration) -> CommandResult<ToSender> {
        ToSender::decode(&self.incoming.next(limit)?.to_vec()).map_err(Failure::new)
    }

    fn free(&mut self, sequence: u64) -> Result<(), SendError> {
        if sequence >= self.next {
            return Err(SendError::ServerRefused(Failure::new(
                "the server freed a window that was not filled",
            )));
        }
        self.free[self.layout.slot(sequence)] = true;
        Ok(())
    }
}

/// The server's reason, as ours.
pub fn refused(reason: &str) -> Failure {
    Failure::new(format!("the server refused: {}", printable(reason)))
}

/// What an answer means that does not belong here.
pub fn unexpected(message: ToSender) -> Failure {
    match message {
        ToSender::Refused(reason) => refused(&reason),
        _ => Failure::new("the server spoke out of turn; run the same multirail version on both sides"),
    }
}

/// Beats once in a while.
pub struct KeepAliveTimer {
    every: Duration,
    last: Instant,
}

impl KeepAliveTimer {
    /// Beats after `every`, and not before.
    pub fn new(every: Duration) -> Self {
        Self { every, last: Instant::now() }
    }

    /// Whether it is time; then it is not for a while.
    pub fn is_due(&mut self) -> bool {
        let due = self.last.elapsed() >= self.every;
        if due {
            self.last = Instant::now();
        }
        due
    }
}
