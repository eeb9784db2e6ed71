//! What receivers allow their senders: the receivers' rule.
//!
//! A sender cannot bound a receiver's completion queue or its receives, and an overrun
//! is silent loss on some devices. So each side grants its peers what they may send, per
//! transport, and says so over the control connection: the first [`Grant`] comes with the
//! handshake, before the first operation, and further ones as arrivals are taken out of
//! the completion queue. What a grant has no room for waits at the sender as a few
//! integers of its plan, and is in nobody's way.

mod credit;
mod ledger;

use crate::PeerId;

pub(crate) use credit::{Allowed, Credit};
pub(crate) use ledger::Ledger;
pub(crate) use multirail_spi::Allowance;

/// How much one peer may send over one transport: three windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Bytes that may be posted and not acknowledged, of writes and messages.
    /// `u64::MAX` is no limit, 0 a pause; otherwise one request may always go.
    /// Small operations that run in the calling thread are over when the call returns,
    /// and are not counted.
    pub bytes: u64,
    /// Requests with immediate data that may be under way, or wait in the receiver's
    /// completion queue. `u64::MAX` is no limit, for as long as the peer is connected.
    pub imms: u64,
    /// The same for messages, with or without immediate data.
    pub messages: u64,
}

impl Grant {
    /// No limits.
    pub const UNLIMITED: Self = Self { bytes: u64::MAX, imms: u64::MAX, messages: u64::MAX };
    /// Nothing at all, for now.
    pub const NOTHING: Self = Self { bytes: 0, imms: 0, messages: 0 };
}

/// A peer that is to be granted something, and what the receiver has.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Applicant<'a> {
    /// Its number.
    pub peer: PeerId,
    /// Its host, as it says.
    pub host: &'a str,
    /// The tenant of ours that it is a peer of; empty for the fabric itself.
    pub tenant: &'a str,
    /// The transport's label.
    pub transport: &'a str,
    /// Peers of this transport, this one among them.
    pub peers: usize,
    /// Arrivals that the smallest completion queue of the transport's devices holds;
    /// `u64::MAX` where none can be overrun.
    pub capacity: u64,
    /// Of these, what no other peer may fill by what it was granted already.
    pub free: u64,
    /// Arrivals of this peer taken out of the queue so far.
    pub taken: u64,
}

/// Decides how much each peer may send; see [`FabricBuilder::admission`](crate::FabricBuilder::admission).
///
/// It is asked when a peer is connected, whenever half of what it had was taken out
/// of the completion queue, and on [`Peer::regrant`](crate::Peer::regrant). The answer
/// counts from that moment on. What was granted before cannot be taken back: smaller
/// windows of imms and messages hold once the larger ones are used up. Bytes hold
/// at once, for operations that begin then.
///
/// Called by workers and by the control thread, one call per transport at a time: it
/// decides by what it is given, does not block, and calls nothing of the fabric.
///
/// ```
/// use std::sync::Arc;
/// use multirail_core::{Admission, Applicant, EvenShares, FabricBuilder, Grant};
///
/// /// Prefill hosts may send as much as there is room for, all others 64 imms at a time
/// /// and 8 MiB.
/// struct PrefillFirst;
///
/// impl Admission for PrefillFirst {
///     fn grant(&self, applicant: &Applicant<'_>) -> Grant {
///         match applicant.host.starts_with("prefill-") {
///             true => EvenShares.grant(applicant),
///             false => Grant { bytes: 8 << 20, imms: applicant.free.min(64), messages: 1 },
///         }
///     }
/// }
///
/// let builder = FabricBuilder::new().admission(Arc::new(PrefillFirst));
/// ```
pub trait Admission: Send + Sync {
    /// What the peer may send from now on.
    fn grant(&self, applicant: &Applicant<'_>) -> Grant;
}

/// The default: even shares of half the completion queue, more than enough where there
/// are few peers.
///
/// A newcomer gets a 128th of the queue, and a 64th of what is free at most; past 64
/// peers, its part of what is free. Whoever sends gets up to an even share of half the
/// queue, made for eight peers where there are fewer, and a 16th of what is free at most.
/// So what all may send together never exceeds a queue of `n` arrivals up to 64 peers
/// (with 128 arrivals or more), or about `4 * sqrt(n)`: 360 for one of 8192, an EFA card's.
/// Beyond that a peer still gets one imm and one message, or it could never begin: take a
/// larger queue, or an [`Admission`] of your own. A queue that cannot be overrun is granted
/// without limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct EvenShares;

/// Peers that shares are made for, as long as there are fewer.
const FEW: u64 = 8;
/// Newcomers that half the queue is kept for.
const NEWCOMERS: u64 = 64;
/// The part of what is free that one peer takes at most, once it sends.
const PART: u64 = 16;

impl Admission for EvenShares {
    fn grant(&self, applicant: &Applicant<'_>) -> Grant {
        if applicant.capacity == u64::MAX {
            return Grant::UNLIMITED;
        }
        let (half, peers) = (applicant.capacity / 2, applicant.peers as u64);
        let share = match applicant.taken {
            0 => (half / NEWCOMERS).min(applicant.free / NEWCOMERS.max(peers)),
            _ => (half / peers.max(FEW)).min(applicant.free / PART),
        };
        let share = share.max(2);
        // Messages need a receive each and are rare; imms come with the pages.
        let messages = (share / 4).max(1);
        Grant { bytes: u64::MAX, imms: share - messages, messages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of `capacity`, and peers that come one by one and send nothing.
    fn reserved(capacity: u64, peers: usize) -> u64 {
        (1..=peers).fold(0, |reserved, peers| {
            let grant = EvenShares.grant(&Applicant {
                peer: PeerId::next(),
                host: "",
                tenant: "",
                transport: "",
                peers,
                capacity,
                free: capacity.saturating_sub(reserved),
                taken: 0,
            });
            assert!(grant.imms > 0 && grant.messages > 0);
            reserved + grant.imms + grant.messages
        })
    }

    #[test]
    fn newcomers_never_exceed_the_queue() {
        for capacity in [128_u64, 1000, 8192, 1 << 20] {
            let most = ((capacity as f64).sqrt() * 3.5) as usize;
            for peers in [1, 2, 8, 64, most.max(64)] {
                let reserved = reserved(capacity, peers);
                assert!(reserved <= capacity, "{reserved} of {capacity} for {peers} peers");
            }
        }
        assert_eq!(reserved(8192, 64), 4096);
        assert!(reserved(u64::from(u32::MAX), 1000) / 1000 > 1000);
    }
}
