//! What the sender hears, and which windows are free by it.

use std::time::{Duration, Instant};

use crate::files::{Layout, ToSender};

use crate::failure::{Done, Failure, printable};
use crate::wire::Inbox;

/// How long a server that is alive may take to sync files, or to read those it has.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Why the sender stops early.
pub enum Stop {
    /// The server said so: that explains whatever broke elsewhere.
    Answered(Failure),
    /// Something broke; if the mover broke too, that was first.
    Broken(Failure),
    /// The file at hand is no longer as it was offered.
    Changed,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Broken(failure)
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Answered(failure) | Stop::Broken(failure) => failure,
            Stop::Changed => Self::new("a file changed while it was sent; send it again"),
        }
    }
}

/// The server's side of the conversation.
pub struct Talk {
    inbox: Inbox,
    /// How the region is divided.
    pub layout: Layout,
    /// The next window.
    pub next: u64,
    /// Which windows of the region are free.
    free: Vec<bool>,
}

impl Talk {
    /// With a server whose windows are all free.
    pub fn new(inbox: Inbox, layout: Layout) -> Self {
        Self { inbox, layout, next: 0, free: vec![true; layout.windows as usize] }
    }

    /// Before the first window: the server divides its region like this.
    pub fn divide(&mut self, layout: Layout) {
        (self.layout, self.free) = (layout, vec![true; layout.windows as usize]);
    }

    /// The next message that is not about windows.
    pub fn hear(&mut self) -> Result<ToSender, Stop> {
        self.hear_within(PATIENCE)
    }

    /// The same, at most `limit` from now.
    pub fn hear_within(&mut self, limit: Duration) -> Result<ToSender, Stop> {
        loop {
            let message = self.message(limit)?;
            match message {
                ToSender::Free { sequence } => self.free(sequence)?,
                message => return Ok(message),
            }
        }
    }

    /// Waits until the next window is free.
    pub fn await_free(&mut self) -> Result<(), Stop> {
        while !self.free[self.layout.slot(self.next)] {
            match self.message(PATIENCE)? {
                ToSender::Free { sequence } => self.free(sequence)?,
                other => return Err(Stop::Answered(unexpected(other))),
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
                Ok(ToSender::Free { .. } | ToSender::Stored | ToSender::Verdicts { .. }) => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }

    fn message(&mut self, limit: Duration) -> Done<ToSender> {
        ToSender::decode(&self.inbox.next(limit)?.to_vec()).map_err(Failure::new)
    }

    fn free(&mut self, sequence: u64) -> Result<(), Stop> {
        if sequence >= self.next {
            return Err(Stop::Answered(Failure::new("the server freed a window that was not filled")));
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
