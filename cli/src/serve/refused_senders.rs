//! Senders that connect while the server already serves the maximum number.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::files::ReceiverMessage;
use multirail::{Access, Fabric, Op, Peer, Region};

use super::senders;
use crate::connection::DISCONNECT_LIMIT;
use crate::failure::CommandResult;
use crate::{output, wire};

/// The maximum number of refused senders that are still connected. Above it, the first is disconnected.
const MOST: usize = 64;

/// Refuses senders without a thread or memory for each: all get the same message, and the same time to read it and
/// disconnect.
pub struct RefusedSenders {
    /// The refusal as a message.
    refusal: Region,
    bytes: usize,
    /// The senders that are still connected, the oldest first.
    leaving: VecDeque<Leaving>,
}

struct Leaving {
    peer: Peer,
    /// The send of the refusal. Dropping it would cancel the send.
    _refusal: Op,
    until: Instant,
}

impl RefusedSenders {
    /// No sender is refused yet.
    pub fn new(fabric: &Fabric) -> CommandResult<Self> {
        let message = wire::encode(&ReceiverMessage::Refused(reason()))?;
        let refusal = fabric.alloc(message.len(), Access::LOCAL)?;
        refusal.copy_in(0, &message)?;
        Ok(Self { refusal, bytes: message.len(), leaving: VecDeque::new() })
    }

    /// Refuses a sender.
    pub fn add(&mut self, peer: Peer) {
        output::print_error(&format!("a sender was refused: {}", reason()));
        while self.leaving.len() >= MOST {
            self.disconnect_first();
        }
        match peer.send(&self.refusal, 0..self.bytes) {
            Ok(refusal) => {
                let until = Instant::now() + DISCONNECT_LIMIT;
                self.leaving.push_back(Leaving { peer, _refusal: refusal, until });
            }
            Err(_) => peer.disconnect(),
        }
    }

    /// Disconnects senders that have left or whose time is over. Returns the time until the next one.
    pub fn disconnect_expired(&mut self) -> Option<Duration> {
        loop {
            let first = self.leaving.front()?;
            let left = first.until.saturating_duration_since(Instant::now());
            if first.peer.is_alive() && !left.is_zero() {
                return Some(left);
            }
            self.disconnect_first();
        }
    }

    fn disconnect_first(&mut self) {
        if let Some(first) = self.leaving.pop_front() {
            first.peer.disconnect();
        }
    }
}

fn reason() -> String {
    format!("the server already serves {} senders; try again later", senders::MOST)
}
