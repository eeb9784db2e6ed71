//! Flow control between peers: each receiver grants its senders what they may send.
//!
//! A sender cannot bound a receiver's completion queue or its receives, and some devices silently lose data when one
//! of them overruns. So each side grants its peers what they may send over each transport, and tells them over the
//! control connection. The first [`Grant`] comes with the handshake, before the first operation. Further grants
//! follow as the receiver takes arrivals out of its completion queue. An operation without credit waits at the sender
//! as a few integers of its plan, and does not delay operations to other peers.
//!
//! In reading order: [`Grant`] and [`GrantPolicy`] (the public API), [`ReceiverCredits`] (what we have granted our
//! peers), [`SendCredit`] (what a peer has granted us), [`Backlog`] (operations under way to a peer).

mod backlog;
mod receiver_credits;
mod send_credit;

use crate::PeerId;

pub use backlog::{Backlog, Weight};
pub use multirail_spi::WireGrant;
pub use receiver_credits::{Grantee, ReceiverCredits};
pub use send_credit::{CreditCounter, SendCredit};

/// How much one peer may send over one transport: three limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Bytes of writes and messages that may be posted and not acknowledged. `u64::MAX` is no limit; 0 pauses the
    /// sender; with any other value, one request of any size may always be in flight. Small operations that run in
    /// the calling thread are over when the call returns, and do not count.
    pub bytes: u64,
    /// Requests with immediate data that may be in flight or in the receiver's completion queue. `u64::MAX` is no
    /// limit, for as long as the peer is connected.
    pub imms: u64,
    /// Messages, with or without immediate data, that may be in flight or in the receiver's completion queue.
    /// `u64::MAX` is no limit, for as long as the peer is connected.
    pub messages: u64,
}

impl Grant {
    /// No limits.
    pub const UNLIMITED: Self = Self { bytes: u64::MAX, imms: u64::MAX, messages: u64::MAX };
    /// Pauses the sender.
    pub const NOTHING: Self = Self { bytes: 0, imms: 0, messages: 0 };
}

/// What a [`GrantPolicy`] decides by: the peer, and the room that the receiver has.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct GrantRequest<'a> {
    /// The peer's number.
    pub peer: PeerId,
    /// The peer's host name, as the peer reports it.
    pub host: &'a str,
    /// Our tenant that the peer belongs to. Empty for the fabric itself.
    pub tenant: &'a str,
    /// The transport's label.
    pub transport: &'a str,
    /// The number of peers of this transport, this one included.
    pub peers: usize,
    /// The number of arrivals that the smallest completion queue of the transport's devices holds. `u64::MAX` if none
    /// can overrun.
    pub capacity: u64,
    /// The part of `capacity` that is not reserved by grants of other peers.
    pub free: u64,
    /// The number of this peer's arrivals that the engines have taken out of the queue so far.
    pub taken: u64,
}

/// Decides how much each peer may send; see `FabricBuilder::grant_policy`.
///
/// The fabric asks the policy when a peer connects, whenever the engines have taken half of the peer's grant out of
/// the completion queue, and on `Peer::regrant`. The answer counts from that moment on. A grant cannot be taken back:
/// smaller limits of imms and messages apply once the peer has used up the larger ones. A smaller limit of bytes
/// applies at once, to operations that begin after it.
///
/// Workers and the control thread call the policy, one call per transport at a time. It must not block, and must not
/// call the fabric.
pub trait GrantPolicy: Send + Sync {
    /// What the peer may send from now on.
    fn grant(&self, request: &GrantRequest<'_>) -> Grant;
}

/// The default policy: even shares of half the completion queue.
///
/// A peer that has sent nothing yet gets a 128th of the queue, but at most a 64th of the free part; with more than 64
/// peers, at most its even share of the free part. A peer that sends gets up to an even share of half the queue, with
/// shares for at least eight peers, but at most a 16th of the free part.
///
/// So the grants of all peers never exceed a queue of `n` arrivals for up to 64 peers (with 128 arrivals or more), or
/// for up to about `4 * sqrt(n)` peers: 360 peers for the queue of an EFA device, 8192. Every further peer still gets
/// one imm and one message, or it could never begin. If you have more peers, use a larger queue or a [`GrantPolicy`]
/// of your own. A queue that cannot overrun is granted without limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct EvenShares;

/// The least number of peers that half the queue is divided among.
const MIN_SHARES: u64 = 8;
/// Half the queue is enough for this many peers that have sent nothing yet.
const NEW_PEERS: u64 = 64;
/// A peer that sends gets at most this fraction (1/16) of the free part.
const FREE_FRACTION: u64 = 16;

impl GrantPolicy for EvenShares {
    fn grant(&self, request: &GrantRequest<'_>) -> Grant {
        if request.capacity == u64::MAX {
            return Grant::UNLIMITED;
        }
        let (half, peers) = (request.capacity / 2, request.peers as u64);
        let share = match request.taken {
            0 => (half / NEW_PEERS).min(request.free / NEW_PEERS.max(peers)),
            _ => (half / peers.max(MIN_SHARES)).min(request.free / FREE_FRACTION),
        };
        let share = share.max(2);
        // Each message needs a receive, and messages are rare. Imms are frequent: they come with pages.
        let messages = (share / 4).max(1);
        Grant { bytes: u64::MAX, imms: share - messages, messages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What all grants reserve after `peers` peers have connected one after the other, and sent nothing.
    fn reserved(capacity: u64, peers: usize) -> u64 {
        (1..=peers).fold(0, |reserved, peers| {
            let grant = EvenShares.grant(&GrantRequest {
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
    fn new_peers_never_exceed_the_queue() {
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
