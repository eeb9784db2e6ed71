//! Fences: a side that has lost a device or a path asks the other one to let nothing arrive any more of what was posted
//! there. Later it asks to lift the fence.

use std::collections::HashMap;

use multirail_spi::{Error, ErrorKind, FenceKind, FenceReply, FenceReport, Result};

use crate::frame::Frame;
use crate::session::close::CloseReason;

/// The fences of one session.
#[derive(Default)]
pub(crate) struct Fences {
    next_id: u64,
    /// Those that the peer has not answered.
    outstanding: HashMap<u64, FenceReply>,
    /// What the peer asks for, and this side has not answered, by its numbers.
    unanswered: HashMap<u64, Asked>,
}

/// What a peer asks for.
#[derive(PartialEq)]
struct Asked {
    transport: String,
    pair: u16,
    kind: FenceKind,
}

impl Fences {
    /// Adds a fence that the peer is asked for, or asked to lift. Returns the frame to send.
    pub fn request(&mut self, transport: String, pair: u16, kind: FenceKind, reply: FenceReply) -> Frame {
        let id = self.next_id;
        self.next_id += 1;
        self.outstanding.insert(id, reply);
        Frame::Fence { id, transport, pair, kind }
    }

    /// Takes the peer's answer.
    pub fn fenced(&mut self, id: u64, report: Option<FenceReport>, reason: String) -> Result<()> {
        let Some(reply) = self.outstanding.remove(&id) else {
            let why = format!("the peer answered fence {id}, which is not outstanding");
            return Err(Error::new(ErrorKind::Protocol, "control", why));
        };
        reply(report.ok_or_else(|| Error::new(ErrorKind::Unsupported, "fence", reason)));
        Ok(())
    }

    /// Notes that the peer asks for a fence, or to lift one.
    pub fn note_request(
        &mut self,
        id: u64,
        transport: &str,
        pair: u16,
        kind: FenceKind,
    ) -> std::result::Result<(), CloseReason> {
        let asked = Asked { transport: transport.to_owned(), pair, kind };
        if self.unanswered.values().any(|known| *known == asked) {
            return Err(CloseReason::protocol_violation("the peer asks twice for a fence that is under way"));
        }
        let is_new = self.unanswered.insert(id, asked).is_none();
        let why = "the peer has given two fences one number";
        if is_new { Ok(()) } else { Err(CloseReason::protocol_violation(why)) }
    }

    /// Notes that this side has answered a fence.
    pub fn note_answer(&mut self, id: u64) {
        self.unanswered.remove(&id);
    }
}
