//! What two fabrics say to each other after their hellos, in postcard.

use serde::{Deserialize, Serialize};

use super::proof::Code;
use crate::engine::flow_control::Allowance;
use crate::{Error, ErrorKind, Result};

/// Bytes of a name: of a region, a transport, a backend, a host.
pub(crate) const MAX_NAME: usize = 255;
/// Transports of one fabric.
pub(crate) const MAX_OFFERS: usize = 64;
/// Rails of one transport: a p5 host has 32 cards.
const MAX_RAILS: usize = 64;
/// Bytes of one rail's offer: addresses and numbers, never more than a page.
const MAX_RAIL: usize = 4 << 10;
/// Bytes of a descriptor; `Descriptor::from_bytes` takes no longer one.
pub(crate) const MAX_DESCRIPTOR: usize = 256 << 10;
/// Bytes of a sentence for people.
const MAX_REASON: usize = 1 << 10;

/// What a transport of one side offers the other: bytes per rail that only the
/// backend of the same name understands.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct TransportOffer {
    /// The name the user gave it; transports of one label are connected.
    pub label: String,
    /// The backend's name.
    pub backend: String,
    /// One per device: its rate in Mbit/s, 0 where that is unknown.
    pub rates: Vec<u32>,
    /// From the side that connects, one offer per device. From the other, which knows
    /// how many devices both have, one per pair of rails, in the order of the pairs.
    pub rails: Vec<Vec<u8>>,
}

/// What one side made of the offer of one transport.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct LinkReport {
    /// The transport.
    pub label: String,
    /// Why it does not reach the peer; `None` if it does.
    pub refused: Option<String>,
    /// From the side that connected, where the other has more devices: its offers for the
    /// pairs that it had none for, in the order of the pairs.
    pub more: Vec<Vec<u8>>,
}

/// Who a fabric is.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Identity {
    /// A number for this opening of the fabric.
    pub incarnation: u64,
    /// The host's name, for people to read.
    pub host: String,
}

/// Why a side ends the conversation.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The receiver of this frame broke the protocol.
    Protocol,
    /// No transport in common.
    Unreachable,
    /// It went silent, or the sender failed.
    Failed,
    /// Its token is missing or another one.
    Permission,
}

/// One frame.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub(crate) enum Frame {
    /// After the hellos, where both sides have a token: the sender has it. The side
    /// that connected proves first, and the other only to one that has proved.
    Proof { mac: Code },
    /// After the hellos and proofs: who the sender is, the silence in milliseconds
    /// after which it takes us for dead, and its transports. The side that connected
    /// offers first; the other reserves nothing before that.
    Offers { identity: Identity, peer_timeout_ms: u32, transports: Vec<TransportOffer> },
    /// After the offers: which of them the sender brought up. The side that connected
    /// reports first.
    Report { links: Vec<LinkReport> },
    /// After the reports: the sender has admitted the peer; traffic may come.
    Ready,
    /// The sender ends the conversation and says why.
    Refuse { cause: Cause, reason: String },
    /// The sender is alive.
    Heartbeat { seq: u64 },
    /// Asks for the descriptor published under a name.
    Lookup { id: u64, name: String },
    /// Answers the lookup of that id; `None` if nothing of that name is published.
    Found { id: u64, descriptor: Option<Vec<u8>> },
    /// The sender took a region back.
    Revoked { incarnation: u64, region: u64 },
    /// The sender closes the connection in order.
    Goodbye,
    /// Before `Ready`, and later on: what the peer may send over the transport of that
    /// label. Imms and messages are counted from the beginning, and only rise.
    Grant { transport: String, allowance: Allowance },
    /// The sender has reached the barrier of that name.
    Barrier { name: String },
    /// The sender's end of one pair of rails of a transport has moved: what it offers now.
    Moved { transport: String, pair: u16, offer: Vec<u8> },
    /// The sender of this goes by the receiver's last offer for that pair, and answers it.
    Followed { transport: String, pair: u16, answer: Vec<u8> },
}

impl Frame {
    /// The refusal that tells a peer about `error`.
    pub fn refusal(error: &Error) -> Self {
        let cause = match error.kind() {
            ErrorKind::Protocol | ErrorKind::Version => Cause::Protocol,
            ErrorKind::Unreachable => Cause::Unreachable,
            ErrorKind::Permission => Cause::Permission,
            _ => Cause::Failed,
        };
        let mut reason =
            if error.context().is_empty() { error.to_string() } else { error.context().to_owned() };
        clip(&mut reason);
        Self::Refuse { cause, reason }
    }

    /// The report of `links`, with reasons no longer than the peer takes.
    pub fn report(links: &[LinkReport]) -> Self {
        let mut links = links.to_vec();
        links.iter_mut().filter_map(|link| link.refused.as_mut()).for_each(clip);
        Self::Report { links }
    }

    /// The frame as bytes; an error if the peer would refuse them.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let refuse = |why: String| Error::new(ErrorKind::TooLarge, "send a control frame", why);
        self.check().map_err(refuse)?;
        postcard::to_stdvec(self).map_err(|e| refuse("not encodable".into()).with_source(e))
    }

    /// Parses bytes that are not trusted.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "read a control frame", why);
        let (mut frame, rest) = postcard::take_from_bytes::<Self>(bytes)
            .map_err(|e| refuse("damaged, or unknown to this version".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes too many", rest.len())));
        }
        frame.check().map_err(refuse)?;
        // What goes into messages and logs; labels and names are compared as they are.
        match &mut frame {
            Self::Refuse { reason, .. } => *reason = printable(reason),
            Self::Offers { identity, .. } => identity.host = printable(&identity.host),
            Self::Report { links } => {
                let reasons = links.iter_mut().filter_map(|link| link.refused.as_mut());
                reasons.for_each(|reason| *reason = printable(reason));
            }
            _ => {}
        }
        Ok(frame)
    }

    /// Its name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Proof { .. } => "Proof",
            Self::Offers { .. } => "Offers",
            Self::Report { .. } => "Report",
            Self::Ready => "Ready",
            Self::Refuse { .. } => "Refuse",
            Self::Heartbeat { .. } => "Heartbeat",
            Self::Lookup { .. } => "Lookup",
            Self::Found { .. } => "Found",
            Self::Revoked { .. } => "Revoked",
            Self::Goodbye => "Goodbye",
            Self::Grant { .. } => "Grant",
            Self::Barrier { .. } => "Barrier",
            Self::Moved { .. } => "Moved",
            Self::Followed { .. } => "Followed",
        }
    }

    /// The bounds of every field; the same for what is sent and what is received.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Offers { identity, transports, .. } => {
                within("bytes of a host name", identity.host.len(), MAX_NAME)?;
                within("transports", transports.len(), MAX_OFFERS)?;
                for offer in transports {
                    within("bytes of a label", offer.label.len(), MAX_NAME)?;
                    within("bytes of a backend's name", offer.backend.len(), MAX_NAME)?;
                    within("devices of a transport", offer.rates.len(), MAX_RAILS)?;
                    check_rails(&offer.rails)?;
                }
            }
            Self::Report { links } => {
                within("links", links.len(), MAX_OFFERS)?;
                for link in links {
                    within("bytes of a label", link.label.len(), MAX_NAME)?;
                    within("bytes of a reason", link.refused.as_ref().map_or(0, String::len), MAX_REASON)?;
                    check_rails(&link.more)?;
                }
            }
            Self::Refuse { reason, .. } => within("bytes of a reason", reason.len(), MAX_REASON)?,
            Self::Grant { transport, .. } => within("bytes of a label", transport.len(), MAX_NAME)?,
            Self::Lookup { name, .. } => within("bytes of a region's name", name.len(), MAX_NAME)?,
            Self::Barrier { name } => within("bytes of a barrier's name", name.len(), MAX_NAME)?,
            Self::Moved { transport, offer, .. } | Self::Followed { transport, answer: offer, .. } => {
                within("bytes of a label", transport.len(), MAX_NAME)?;
                within("bytes of a rail's offer", offer.len(), MAX_RAIL)?;
            }
            Self::Found { descriptor, .. } => {
                within("bytes of a descriptor", descriptor.as_ref().map_or(0, Vec::len), MAX_DESCRIPTOR)?;
            }
            Self::Proof { .. }
            | Self::Ready
            | Self::Heartbeat { .. }
            | Self::Revoked { .. }
            | Self::Goodbye => {}
        }
        Ok(())
    }
}

fn check_rails(rails: &[Vec<u8>]) -> Result<(), String> {
    within("rails of a transport", rails.len(), MAX_RAILS)?;
    rails.iter().try_for_each(|rail| within("bytes of a rail's offer", rail.len(), MAX_RAIL))
}

fn within(what: &str, count: usize, limit: usize) -> Result<(), String> {
    if count > limit { Err(format!("{count} {what}; the limit is {limit}")) } else { Ok(()) }
}

/// Shortens a sentence to what the peer takes, at the border of a character.
fn clip(reason: &mut String) {
    let end = (0..=MAX_REASON.min(reason.len())).rev().find(|&at| reason.is_char_boundary(at));
    reason.truncate(end.unwrap_or(0));
}

/// A peer's words, safe to print on a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
#[path = "tests/frame.rs"]
mod tests;
