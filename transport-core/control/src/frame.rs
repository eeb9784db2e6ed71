//! The frames that two fabrics exchange after their hellos, encoded with postcard.

use serde::{Deserialize, Serialize};

use multirail_spi::{Error, ErrorKind, FenceKind, FenceReport, Result, WireGrant};

/// The authentication code of a proof.
pub type Code = [u8; 32];
/// The most bytes of a name: of a region, a transport, a backend or a host.
pub const MAX_NAME: usize = 255;
/// The most transports of one fabric.
pub const MAX_OFFERS: usize = 64;
/// The most rails of one transport. An AWS p5 host has 32 cards.
const MAX_RAILS: usize = 64;
/// The most bytes of one rail's offer. An offer holds addresses and numbers and fits in a page.
const MAX_RAIL: usize = 4 << 10;
/// The most bytes of a descriptor; `Descriptor::from_bytes` has the same limit.
pub const MAX_DESCRIPTOR: usize = 256 << 10;
/// The most bytes of a reason.
const MAX_REASON: usize = 1 << 10;

/// What a transport of one side offers to the other side. Only the backend of the same name
/// understands the bytes of each rail.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct TransportOffer {
    /// The name that the user gave the transport. Transports with the same label are connected.
    pub label: String,
    /// The backend's name.
    pub backend: String,
    /// The rate of each device in Mbit/s; 0 if it is unknown.
    pub rates: Vec<u32>,
    /// The side that connects sends one offer per device. The side that accepts knows how many
    /// devices both sides have, and sends one offer per pair of rails, in the order of the pairs.
    pub rails: Vec<Vec<u8>>,
}

/// How one side reports on the offer of one transport.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct LinkReport {
    /// The transport's label.
    pub label: String,
    /// Why the transport does not reach the peer; `None` if it does.
    pub refused: Option<String>,
    /// If the side that accepted has more devices, the side that connected sends here its offers for
    /// the pairs that `rails` did not cover, in the order of the pairs.
    pub more: Vec<Vec<u8>>,
}

/// The identity of a fabric.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Identity {
    /// A number that is unique to this opening of the fabric.
    pub incarnation: u64,
    /// The host's name, for messages.
    pub host: String,
}

/// Why a side ends the connection.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The receiver of this frame violated the protocol.
    Protocol,
    /// The two sides have no working transport in common.
    Unreachable,
    /// The receiver was silent for too long, or the sender failed.
    Failed,
    /// The receiver's token is missing or is another one.
    Permission,
}

/// One frame.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Frame {
    /// Sent after the hellos if both sides have a token: proves that the sender has the token. The side that connected
    /// proves first; the side that accepted sends its proof only after it has verified the other one.
    Proof {
        /// The code over the transcript of the hellos.
        mac: Code,
    },
    /// Sent after the hellos and proofs: the sender's identity and offers. The side that connected offers first; the
    /// side that accepted reserves nothing before that.
    Offers {
        /// The sender's identity.
        identity: Identity,
        /// The silence in milliseconds after which the sender takes the receiver for dead.
        peer_timeout_ms: u32,
        /// The sender's transports.
        transports: Vec<TransportOffer>,
    },
    /// Sent after the offers: which links the sender has brought up. The side that connected reports first.
    Report {
        /// One report per transport.
        links: Vec<LinkReport>,
    },
    /// Sent after the reports: the sender has admitted the peer and accepts traffic.
    Ready,
    /// The sender ends the connection because of an error.
    Refuse {
        /// The kind of the reason.
        cause: Cause,
        /// The reason, for messages.
        reason: String,
    },
    /// The sender is alive.
    Heartbeat {
        /// The number of frames that the sender has sent.
        seq: u64,
    },
    /// Asks for the descriptor that is published under a name.
    Lookup {
        /// The number of the lookup; the answer carries the same number.
        id: u64,
        /// The name.
        name: String,
    },
    /// Answers a lookup.
    Found {
        /// The number of the lookup.
        id: u64,
        /// The descriptor; `None` if no region is published under the name.
        descriptor: Option<Vec<u8>>,
    },
    /// The sender has revoked a region.
    Revoked {
        /// The incarnation of the sender's fabric that the region belongs to.
        incarnation: u64,
        /// The number of the region.
        region: u64,
    },
    /// The sender closes the connection in order.
    Goodbye,
    /// Sent before `Ready` and at any later time: what the receiver may send over one transport.
    Grant {
        /// The transport's label.
        transport: String,
        /// The grant. Its counts include all earlier grants, so they never decrease.
        grant: WireGrant,
    },
    /// The sender has reached a barrier.
    Barrier {
        /// The barrier's name.
        name: String,
    },
    /// The sender's endpoint of one pair of rails has a new address.
    Moved {
        /// The transport's label.
        transport: String,
        /// The number of the pair.
        pair: u16,
        /// The sender's offer with the new address.
        offer: Vec<u8>,
    },
    /// The sender uses the receiver's last offer for a pair of rails from now on.
    Followed {
        /// The transport's label.
        transport: String,
        /// The number of the pair.
        pair: u16,
        /// The answer to the offer.
        answer: Vec<u8>,
    },
    /// The sender's device of a pair of rails is lost, or its path to the receiver over that pair. Asks the receiver to
    /// let nothing arrive any more of what was posted there; or, later, to let requests arrive again.
    Fence {
        /// The number of the request; the answer carries the same number.
        id: u64,
        /// The transport's label.
        transport: String,
        /// The number of the pair.
        pair: u16,
        /// Why, or whether this lifts an earlier fence.
        kind: FenceKind,
    },
    /// Answers `Fence`.
    Fenced {
        /// The number of the request.
        id: u64,
        /// What the sender has received over the pair; `None` if it cannot do what was asked.
        report: Option<FenceReport>,
        /// Why it cannot.
        reason: String,
    },
    /// How many messages the sender has posted over a pair of rails since the connection began. The sender says so if its
    /// messages have changed their rail, for the receiver to post receives there.
    MessagesPosted {
        /// The transport's label.
        transport: String,
        /// The number of the pair.
        pair: u16,
        /// The number of messages.
        count: u64,
    },
}

impl Frame {
    /// The `Refuse` frame that tells a peer about `error`.
    pub fn refusal(error: &Error) -> Self {
        let cause = match error.kind() {
            ErrorKind::Protocol | ErrorKind::Version => Cause::Protocol,
            ErrorKind::Unreachable => Cause::Unreachable,
            ErrorKind::Permission => Cause::Permission,
            _ => Cause::Failed,
        };
        let mut reason =
            if error.context().is_empty() { error.to_string() } else { error.context().to_owned() };
        truncate_reason(&mut reason);
        Self::Refuse { cause, reason }
    }

    /// The `Fenced` frame for a result.
    pub fn fenced(id: u64, result: Result<FenceReport>) -> Self {
        let (report, mut reason) = match result {
            Ok(report) => (Some(report), String::new()),
            Err(error) => (None, error.context().to_owned()),
        };
        truncate_reason(&mut reason);
        Self::Fenced { id, report, reason }
    }

    /// The `Report` frame of `links`. Truncates reasons to the length that the peer accepts.
    pub fn report(links: &[LinkReport]) -> Self {
        let mut links = links.to_vec();
        links.iter_mut().filter_map(|link| link.refused.as_mut()).for_each(truncate_reason);
        Self::Report { links }
    }

    /// Encodes the frame. Returns an error if the peer would refuse the frame as too large.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let refuse = |why: String| Error::new(ErrorKind::TooLarge, "send a control frame", why);
        self.check().map_err(refuse)?;
        postcard::to_stdvec(self).map_err(|e| refuse("the frame cannot be encoded".into()).with_source(e))
    }

    /// Parses untrusted bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::Protocol, "read a control frame", why);
        let (mut frame, rest) = postcard::take_from_bytes::<Self>(bytes)
            .map_err(|e| refuse("the frame is damaged, or unknown to this version".into()).with_source(e))?;
        if !rest.is_empty() {
            return Err(refuse(format!("the frame has {} bytes too many", rest.len())));
        }
        frame.check().map_err(refuse)?;
        // Texts that go into messages and logs are made printable. Labels and names stay as they are, because they
        // are compared.
        match &mut frame {
            Self::Refuse { reason, .. } => *reason = printable(reason),
            Self::Offers { identity, .. } => identity.host = printable(&identity.host),
            Self::Report { links } => {
                let reasons = links.iter_mut().filter_map(|link| link.refused.as_mut());
                reasons.for_each(|reason| *reason = printable(reason));
            }
            Self::Fenced { reason, .. } => *reason = printable(reason),
            _ => {}
        }
        Ok(frame)
    }

    /// The frame's name, for messages.
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
            Self::Fence { .. } => "Fence",
            Self::Fenced { .. } => "Fenced",
            Self::MessagesPosted { .. } => "MessagesPosted",
        }
    }

    /// Checks the limits of every field, the same for sent and received frames.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Offers { identity, transports, .. } => {
                check_limit("bytes of a host name", identity.host.len(), MAX_NAME)?;
                check_limit("transports", transports.len(), MAX_OFFERS)?;
                for offer in transports {
                    check_limit("bytes of a label", offer.label.len(), MAX_NAME)?;
                    check_limit("bytes of a backend's name", offer.backend.len(), MAX_NAME)?;
                    check_limit("devices of a transport", offer.rates.len(), MAX_RAILS)?;
                    check_rails(&offer.rails)?;
                }
            }
            Self::Report { links } => {
                check_limit("links", links.len(), MAX_OFFERS)?;
                for link in links {
                    check_limit("bytes of a label", link.label.len(), MAX_NAME)?;
                    check_limit(
                        "bytes of a reason",
                        link.refused.as_ref().map_or(0, String::len),
                        MAX_REASON,
                    )?;
                    check_rails(&link.more)?;
                }
            }
            Self::Refuse { reason, .. } | Self::Fenced { reason, .. } => {
                check_limit("bytes of a reason", reason.len(), MAX_REASON)?
            }
            Self::Fence { transport, .. } => check_limit("bytes of a label", transport.len(), MAX_NAME)?,
            Self::Grant { transport, .. } | Self::MessagesPosted { transport, .. } => {
                check_limit("bytes of a label", transport.len(), MAX_NAME)?
            }
            Self::Lookup { name, .. } => check_limit("bytes of a region's name", name.len(), MAX_NAME)?,
            Self::Barrier { name } => check_limit("bytes of a barrier's name", name.len(), MAX_NAME)?,
            Self::Moved { transport, offer, .. } | Self::Followed { transport, answer: offer, .. } => {
                check_limit("bytes of a label", transport.len(), MAX_NAME)?;
                check_limit("bytes of a rail's offer", offer.len(), MAX_RAIL)?;
            }
            Self::Found { descriptor, .. } => {
                check_limit(
                    "bytes of a descriptor",
                    descriptor.as_ref().map_or(0, Vec::len),
                    MAX_DESCRIPTOR,
                )?;
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
    check_limit("rails of a transport", rails.len(), MAX_RAILS)?;
    rails.iter().try_for_each(|rail| check_limit("bytes of a rail's offer", rail.len(), MAX_RAIL))
}

fn check_limit(what: &str, count: usize, limit: usize) -> Result<(), String> {
    if count > limit { Err(format!("{count} {what}; the limit is {limit}")) } else { Ok(()) }
}

/// Truncates a reason to the length that the peer accepts, at a character boundary.
fn truncate_reason(reason: &mut String) {
    let end = (0..=MAX_REASON.min(reason.len())).rev().find(|&at| reason.is_char_boundary(at));
    reason.truncate(end.unwrap_or(0));
}

/// Replaces control characters in a peer's text, so that it is safe to print on a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Converts a `Refuse` frame of the peer to an error.
pub(crate) fn refused(cause: Cause, reason: &str) -> Error {
    let kind = match cause {
        Cause::Protocol => ErrorKind::Protocol,
        Cause::Unreachable => ErrorKind::Unreachable,
        Cause::Failed => ErrorKind::PeerDied,
        Cause::Permission => ErrorKind::Permission,
    };
    Error::new(kind, "control", format!("the peer ended the connection: {reason}"))
}

#[cfg(test)]
mod tests;
