//! Senders that come while enough are being served.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::files::ToSender;
use multirail::{Access, Fabric, Op, Peer, Region};

use super::senders;
use crate::connection::DISCONNECT_LIMIT;
use crate::failure::CommandResult;
use crate::output;
use crate::wire;

/// Refused senders that are still connected; with more, the first of them is disconnected.
const MOST: usize = 64;

/// Refuses senders without a thread or memory of their own: all get the same message, and each
/// has the same time to read it and leave.
pub struct RefusedSenders {
    /// The refusal as a message.
    refusal: Region,
    bytes: usize,
    /// Senders that are still connected, the longest first.
    leaving: VecDeque<Leaving>,
}

struct Leaving {
    peer: Peer,
    /// The refusal on its way. Dropped, it is not sent any more.
    _refusal: Op,
    until: Instant,
}

impl RefusedSenders {
    /// Has refused nobody yet.
    pub fn new(fabric: &Fabric) -> CommandResult<Self> {
        let message = wire::encode(&ToSender::Refused(reason()))?;
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

    /// Disconnects senders that left or had time to; how long until the next must go.
    pub fn tidy(&mut self) -> Option<Duration> {
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
    format!("{} senders are being served already; try again later", senders::MOST)
}
