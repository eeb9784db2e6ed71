//! The receiver's side of all grants of one transport: what each peer may send, and how much of it may still arrive.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{GrantPolicy, GrantRequest, WireGrant};
use crate::{Error, ErrorKind, PeerId, Result};

/// A peer may exceed its grant by this many arrivals: the sender takes back the credit of requests that failed, and
/// some of them had arrived.
const TOLERANCE: u64 = 64;

/// The receiver's side of all grants of one transport.
///
/// The fabric uses it when peers connect and disconnect, and the engines when they renew a grant; never per arrival.
pub struct ReceiverCredits {
    transport: String,
    /// The arrivals that the smallest completion queue holds.
    capacity: u64,
    /// The number of engines. Each counts the arrivals that it takes out of its own queues.
    engines: u64,
    policy: Arc<dyn GrantPolicy>,
    table: Mutex<CreditTable>,
}

#[derive(Default)]
struct CreditTable {
    peers: HashMap<PeerId, PeerCredit>,
    /// The arrivals that all peers together may still cause.
    reserved: u64,
}

/// What one peer was granted, and what of it has arrived.
#[derive(Default, Clone, Copy)]
struct PeerCredit {
    granted: WireGrant,
    /// Imms that have arrived.
    imms: u64,
    /// Messages that have arrived.
    messages: u64,
    /// The arrivals that the peer may still cause.
    reserved: u64,
}

/// The peer that a grant is for.
#[derive(Debug, Clone, Copy)]
pub struct Grantee<'a> {
    pub id: PeerId,
    /// The peer's host name, as the peer reports it.
    pub host: &'a str,
    /// The name of this side's tenant that the peer belongs to: a group of peers with domains of its own
    /// (`Fabric::tenant`). Empty for the fabric itself.
    pub tenant: &'a str,
}

/// What a peer may send now, and when the engines renew its grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantState {
    pub grant: WireGrant,
    /// An engine renews the grant after this many imms, or this many messages. Never 0.
    pub renew_after: [u64; 2],
}

impl ReceiverCredits {
    pub fn new(transport: String, capacity: u64, engines: u64, policy: Arc<dyn GrantPolicy>) -> Self {
        Self { transport, capacity, engines, policy, table: Mutex::default() }
    }

    /// Grants a peer its first credit.
    pub fn open(&self, peer: Grantee<'_>) -> GrantState {
        self.grant(&mut self.lock(), peer, PeerCredit::default(), |_| ())
    }

    /// Grants a peer more after `imms` and `messages` further arrivals, and calls `announce` to tell the peer.
    ///
    /// Several engines may renew one peer's grant at the same time. `announce` runs under the lock, so that the peer
    /// gets the grants in the order in which they were made: a peer ends the connection if a total of imms or messages
    /// is smaller than an earlier one.
    ///
    /// # Errors
    /// `Protocol` if the peer sent more than it was granted. `PeerDied` if its share is freed ([`close`](Self::close)).
    pub fn renew(
        &self,
        peer: Grantee<'_>,
        imms: u64,
        messages: u64,
        announce: impl FnOnce(WireGrant),
    ) -> Result<GrantState> {
        let mut table = self.lock();
        let Some(mut credit) = table.peers.get(&peer.id).copied() else {
            return Err(Error::new(ErrorKind::PeerDied, "receive", "the peer is gone"));
        };
        credit.imms += imms;
        credit.messages += messages;
        let exceeds = |arrived: u64, granted: u64| arrived > granted.saturating_add(TOLERANCE);
        if exceeds(credit.imms, credit.granted.imms) || exceeds(credit.messages, credit.granted.messages) {
            let why = format!(
                "the peer sent {} imms and {} messages, and was granted {} and {}",
                credit.imms, credit.messages, credit.granted.imms, credit.granted.messages
            );
            return Err(Error::new(ErrorKind::Protocol, "receive", why));
        }
        Ok(self.grant(&mut table, peer, credit, announce))
    }

    /// Asks the policy what a peer may send from now on, stores that in the table, and calls `announce` with it.
    /// `credit` is what the peer was granted before, and what of it has arrived. The table is unchanged until the
    /// policy has returned.
    fn grant(
        &self,
        table: &mut CreditTable,
        peer: Grantee<'_>,
        mut credit: PeerCredit,
        announce: impl FnOnce(WireGrant),
    ) -> GrantState {
        let others = table.reserved - credit.reserved;
        let grant = self.policy.grant(&GrantRequest {
            peer: peer.id,
            host: peer.host,
            tenant: peer.tenant,
            transport: &self.transport,
            peers: table.peers.len() + usize::from(!table.peers.contains_key(&peer.id)),
            capacity: self.capacity,
            free: if self.capacity == u64::MAX { u64::MAX } else { self.capacity.saturating_sub(others) },
            taken: credit.imms + credit.messages,
        });
        // The totals of imms and messages never fall. The limit of bytes may.
        let raise = |granted: u64, arrived: u64, window: u64| granted.max(arrived.saturating_add(window));
        credit.granted = WireGrant {
            bytes: grant.bytes,
            imms: raise(credit.granted.imms, credit.imms, grant.imms),
            messages: raise(credit.granted.messages, credit.messages, grant.messages),
        };
        credit.reserved = credit.outstanding();
        table.reserved = others.saturating_add(credit.reserved);
        table.peers.insert(peer.id, credit);
        announce(credit.granted);
        credit.state(self.engines)
    }

    /// The grant of a peer; `None` if it has none.
    pub fn state(&self, peer: PeerId) -> Option<GrantState> {
        self.lock().peers.get(&peer).map(|credit| credit.state(self.engines))
    }

    /// Frees the share of a peer that is gone. The transport's first engine calls this once its own rails have no slot
    /// of the peer any more. Other engines may still poll some of the peer's arrivals.
    pub fn close(&self, peer: PeerId) {
        let mut table = self.lock();
        if let Some(credit) = table.peers.remove(&peer) {
            table.reserved -= credit.reserved;
        }
    }

    fn lock(&self) -> MutexGuard<'_, CreditTable> {
        // The table is unchanged if a policy panics, so a poisoned lock is safe to use.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerCredit {
    /// The arrivals that the peer may still cause. An unlimited grant reserves nothing: such a policy does not count
    /// arrivals.
    fn outstanding(&self) -> u64 {
        let left = |granted: u64, arrived: u64| {
            if granted == u64::MAX { 0 } else { granted.saturating_sub(arrived) }
        };
        let left =
            left(self.granted.imms, self.imms).saturating_add(left(self.granted.messages, self.messages));
        // Bounded, so that the sum over all peers cannot overflow.
        left.min(u64::from(u32::MAX))
    }

    fn state(&self, engines: u64) -> GrantState {
        // Each engine counts this many arrivals before it renews the grant. Together, all engines have then counted at
        // most half of what the peer may still send.
        let step = |granted: u64, arrived: u64| (granted.saturating_sub(arrived) / 2 / engines).max(1);
        let renew_after = [step(self.granted.imms, self.imms), step(self.granted.messages, self.messages)];
        GrantState { grant: self.granted, renew_after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EvenShares, Grant};

    fn grantee() -> Grantee<'static> {
        Grantee { id: PeerId::next(), host: "", tenant: "" }
    }

    fn credits(capacity: u64) -> ReceiverCredits {
        ReceiverCredits::new("null".into(), capacity, 1, Arc::new(EvenShares))
    }

    #[test]
    fn all_grants_together_never_exceed_the_queue() {
        let credits = credits(1000);
        let peers: Vec<_> = (0..64).map(|_| grantee()).collect();
        let mut random = fastrand::Rng::with_seed(1);
        let mut arrived = vec![[0_u64; 2]; peers.len()];
        let mut smallest = u64::MAX;
        for peer in &peers {
            credits.open(*peer);
        }
        for _ in 0..5000 {
            let at = random.usize(..peers.len());
            let granted = credits.state(peers[at].id).unwrap();
            let left = [granted.grant.imms - arrived[at][0], granted.grant.messages - arrived[at][1]];
            let more = left.map(|left| random.u64(..=left));
            let renewed = credits.renew(peers[at], more[0], more[1], |_| ()).unwrap();
            arrived[at] = [arrived[at][0] + more[0], arrived[at][1] + more[1]];
            assert!(renewed.grant.imms >= granted.grant.imms);
            let reserved = credits.lock().reserved;
            assert!(reserved <= 1000, "{reserved}");
            smallest = smallest.min(renewed.grant.imms - arrived[at][0]);
        }
        assert!(smallest >= 1);
        peers.iter().for_each(|peer| credits.close(peer.id));
        assert_eq!(credits.lock().reserved, 0);
        assert!(credits.state(peers[0].id).is_none());
    }

    #[test]
    fn shares_become_even() {
        let credits = credits(1 << 14);
        let peers: Vec<_> = (0..64).map(|_| grantee()).collect();
        for peer in &peers {
            credits.open(*peer);
        }
        for _ in 0..3 {
            for peer in &peers {
                let granted = credits.state(peer.id).unwrap();
                let credit = credits.lock().peers[&peer.id];
                let (imms, messages) =
                    (granted.grant.imms - credit.imms, granted.grant.messages - credit.messages);
                credits.renew(*peer, imms, messages, |_| ()).unwrap();
            }
        }
        let shares: Vec<_> = peers.iter().map(|peer| credits.state(peer.id).unwrap().renew_after).collect();
        assert_eq!(shares, vec![[48, 16]; 64]);
    }

    #[test]
    fn a_peer_that_sends_more_than_granted_is_an_error() {
        let credits = credits(1024);
        let peer = grantee();
        let granted = credits.open(peer);
        credits.renew(peer, granted.grant.imms + TOLERANCE, 0, |_| ()).unwrap();
        let error = credits.renew(peer, 1000, 0, |_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.context().contains("was granted"), "{error}");
    }

    #[test]
    fn a_peer_gets_grants_in_the_order_in_which_two_engines_make_them() {
        let credits = ReceiverCredits::new("null".into(), 1 << 20, 2, Arc::new(EvenShares));
        let peer = grantee();
        credits.open(peer);
        let announced = Mutex::new(Vec::new());
        let renewals = if cfg!(miri) { 20 } else { 20_000 };
        let engine = || {
            for _ in 0..renewals {
                credits.renew(peer, 1, 0, |grant| announced.lock().unwrap().push(grant.imms)).unwrap();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(engine);
            scope.spawn(engine);
        });
        let announced = announced.into_inner().unwrap();
        assert_eq!(announced.len(), 2 * renewals);
        assert!(announced.is_sorted(), "a grant came behind a larger one");
    }

    #[test]
    fn the_arrivals_of_a_peer_that_is_gone_reserve_nothing() {
        let credits = credits(1024);
        let peer = grantee();
        credits.open(peer);
        credits.close(peer.id);
        assert_eq!(credits.renew(peer, 1, 0, |_| ()).unwrap_err().kind(), ErrorKind::PeerDied);
        let table = credits.lock();
        assert_eq!((table.peers.len(), table.reserved), (0, 0));
    }

    struct Greedy;

    impl GrantPolicy for Greedy {
        fn grant(&self, _: &GrantRequest<'_>) -> Grant {
            Grant { bytes: 0, imms: u64::MAX - 1, messages: u64::MAX }
        }
    }

    #[test]
    fn huge_grants_do_not_overflow() {
        let credits = ReceiverCredits::new("null".into(), 10, 1, Arc::new(Greedy));
        let peers: Vec<_> = (0..3).map(|_| grantee()).collect();
        for peer in &peers {
            credits.open(*peer);
            let granted = credits.renew(*peer, 5, 5, |_| ()).unwrap();
            assert_eq!(granted.grant, WireGrant { bytes: 0, imms: u64::MAX, messages: u64::MAX });
        }
        peers.iter().for_each(|peer| credits.close(peer.id));
        assert_eq!(credits.lock().reserved, 0);
    }
}
