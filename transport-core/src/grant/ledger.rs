//! What a transport has granted its peers, and how much of it may still arrive.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Admission, Allowance, Applicant};
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, PeerId, Result};

/// Arrivals beyond its grant that a peer is not ended for: requests that failed at the
/// sender, which takes them for lost, and had landed.
const SLACK: u64 = 64;

/// The receiver's books of one transport. Touched when peers come and go and when
/// grants are renewed, never per arrival.
pub(crate) struct Ledger {
    transport: String,
    /// Arrivals that the smallest completion queue holds.
    capacity: u64,
    /// Engines that take arrivals out, each counting its own.
    engines: u64,
    admission: Arc<dyn Admission>,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    peers: HashMap<PeerId, Account>,
    /// Arrivals that all peers together may still cause.
    reserved: u64,
}

#[derive(Default, Clone, Copy)]
struct Account {
    allowed: Allowance,
    imms: u64,
    messages: u64,
    reserved: u64,
}

/// What a peer may send now, and when it is to be granted more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Given {
    pub allowance: Allowance,
    /// Arrivals until then: imms, messages; never 0.
    pub steps: [u64; 2],
}

impl Ledger {
    pub fn new(transport: String, capacity: u64, engines: u64, admission: Arc<dyn Admission>) -> Self {
        Self { transport, capacity, engines, admission, books: Mutex::default() }
    }

    /// Opens an account for a peer.
    ///
    /// # Errors
    /// As [`renew`](Self::renew).
    pub fn open(&self, peer: &PeerInner) -> Result<Given> {
        self.renew(peer, 0, 0, |_| ())
    }

    /// Gives a peer more after so many arrivals, and has `tell` tell it.
    ///
    /// Several engines may renew one peer's grant at the same time. `tell` runs under the lock, so that the peer
    /// gets the grants in the order in which they were given: it ends a connection whose grants sink.
    ///
    /// # Errors
    /// `Protocol` if it sent more than it was granted.
    pub fn renew(
        &self,
        peer: &PeerInner,
        imms: u64,
        messages: u64,
        tell: impl FnOnce(Allowance),
    ) -> Result<Given> {
        let mut books = self.lock();
        let mut account = books.peers.get(&peer.id).copied().unwrap_or_default();
        account.imms += imms;
        account.messages += messages;
        let over = |taken: u64, allowed: u64| taken > allowed.saturating_add(SLACK);
        if over(account.imms, account.allowed.imms) || over(account.messages, account.allowed.messages) {
            let why = format!(
                "it sent {} imms and {} messages, and was granted {} and {}",
                account.imms, account.messages, account.allowed.imms, account.allowed.messages
            );
            return Err(Error::new(ErrorKind::Protocol, "receive", why));
        }
        let others = books.reserved - account.reserved;
        let grant = self.admission.grant(&Applicant {
            peer: peer.id,
            host: &peer.identity.host,
            tenant: peer.tenant(),
            transport: &self.transport,
            peers: books.peers.len() + usize::from(!books.peers.contains_key(&peer.id)),
            capacity: self.capacity,
            free: if self.capacity == u64::MAX { u64::MAX } else { self.capacity.saturating_sub(others) },
            taken: account.imms + account.messages,
        });
        // What was granted stays granted.
        let raise = |allowed: u64, taken: u64, window: u64| allowed.max(taken.saturating_add(window));
        account.allowed = Allowance {
            bytes: grant.bytes,
            imms: raise(account.allowed.imms, account.imms, grant.imms),
            messages: raise(account.allowed.messages, account.messages, grant.messages),
        };
        account.reserved = account.outstanding();
        books.reserved = others.saturating_add(account.reserved);
        books.peers.insert(peer.id, account);
        tell(account.allowed);
        Ok(account.given(self.engines))
    }

    /// How a peer stands.
    pub fn given(&self, peer: PeerId) -> Option<Given> {
        self.lock().peers.get(&peer).map(|account| account.given(self.engines))
    }

    /// A peer is gone, and all that it sent was taken out: its share is free.
    pub fn close(&self, peer: PeerId) {
        let mut books = self.lock();
        if let Some(account) = books.peers.remove(&peer) {
            books.reserved -= account.reserved;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        // An admission that panics leaves the books as they were.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// Arrivals that it may still cause. What has no limit reserves nothing: whoever
    /// grants that does not count.
    fn outstanding(&self) -> u64 {
        let left =
            |allowed: u64, taken: u64| if allowed == u64::MAX { 0 } else { allowed.saturating_sub(taken) };
        // So that many accounts add up without a check.
        let left =
            left(self.allowed.imms, self.imms).saturating_add(left(self.allowed.messages, self.messages));
        left.min(u64::from(u32::MAX))
    }

    fn given(&self, engines: u64) -> Given {
        // What engines keep to themselves adds up to half a window at most.
        let step = |allowed: u64, taken: u64| (allowed.saturating_sub(taken) / 2 / engines).max(1);
        let steps = [step(self.allowed.imms, self.imms), step(self.allowed.messages, self.messages)];
        Given { allowance: self.allowed, steps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EvenShares, Grant, Peer};

    fn ledger(capacity: u64) -> Ledger {
        Ledger::new("null".into(), capacity, 1, Arc::new(EvenShares))
    }

    #[test]
    fn what_all_may_send_never_exceeds_the_queue() {
        let ledger = ledger(1000);
        let peers: Vec<_> = (0..64).map(|_| Peer::alone()).collect();
        let mut random = fastrand::Rng::with_seed(1);
        let mut arrived = vec![[0_u64; 2]; peers.len()];
        let mut smallest = u64::MAX;
        for peer in &peers {
            ledger.open(&peer.0).unwrap();
        }
        for _ in 0..5000 {
            let at = random.usize(..peers.len());
            let given = ledger.given(peers[at].0.id).unwrap();
            let left = [given.allowance.imms - arrived[at][0], given.allowance.messages - arrived[at][1]];
            let more = left.map(|left| random.u64(..=left));
            let renewed = ledger.renew(&peers[at].0, more[0], more[1], |_| ()).unwrap();
            arrived[at] = [arrived[at][0] + more[0], arrived[at][1] + more[1]];
            assert!(renewed.allowance.imms >= given.allowance.imms);
            let reserved = ledger.lock().reserved;
            assert!(reserved <= 1000, "{reserved}");
            smallest = smallest.min(renewed.allowance.imms - arrived[at][0]);
        }
        assert!(smallest >= 1);
        peers.iter().for_each(|peer| ledger.close(peer.0.id));
        assert_eq!(ledger.lock().reserved, 0);
        assert!(ledger.given(peers[0].0.id).is_none());
    }

    #[test]
    fn shares_become_even() {
        let ledger = ledger(1 << 14);
        let peers: Vec<_> = (0..64).map(|_| Peer::alone()).collect();
        for peer in &peers {
            ledger.open(&peer.0).unwrap();
        }
        for _ in 0..3 {
            for peer in &peers {
                let given = ledger.given(peer.0.id).unwrap();
                let account = ledger.lock().peers[&peer.0.id];
                let (imms, messages) =
                    (given.allowance.imms - account.imms, given.allowance.messages - account.messages);
                ledger.renew(&peer.0, imms, messages, |_| ()).unwrap();
            }
        }
        let shares: Vec<_> = peers.iter().map(|peer| ledger.given(peer.0.id).unwrap().steps).collect();
        assert_eq!(shares, vec![[48, 16]; 64]);
    }

    #[test]
    fn who_sends_more_than_granted_is_told_apart() {
        let ledger = ledger(1024);
        let peer = Peer::alone();
        let given = ledger.open(&peer.0).unwrap();
        ledger.renew(&peer.0, given.allowance.imms + SLACK, 0, |_| ()).unwrap();
        let error = ledger.renew(&peer.0, 1000, 0, |_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.context().contains("was granted"), "{error}");
    }

    #[test]
    fn a_peer_is_told_of_grants_in_the_order_in_which_two_engines_give_them() {
        let ledger = Ledger::new("null".into(), 1 << 20, 2, Arc::new(EvenShares));
        let peer = Peer::alone();
        ledger.open(&peer.0).unwrap();
        let told = Mutex::new(Vec::new());
        let renewals = if cfg!(miri) { 20 } else { 20_000 };
        let engine = || {
            for _ in 0..renewals {
                ledger.renew(&peer.0, 1, 0, |grant| told.lock().unwrap().push(grant.imms)).unwrap();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(engine);
            scope.spawn(engine);
        });
        let told = told.into_inner().unwrap();
        assert_eq!(told.len(), 2 * renewals);
        assert!(told.is_sorted(), "a grant came behind a larger one");
    }

    struct Greedy;

    impl Admission for Greedy {
        fn grant(&self, _: &Applicant<'_>) -> Grant {
            Grant { bytes: 0, imms: u64::MAX - 1, messages: u64::MAX }
        }
    }

    #[test]
    fn numbers_without_measure_do_no_harm() {
        let ledger = Ledger::new("null".into(), 10, 1, Arc::new(Greedy));
        let peers: Vec<_> = (0..3).map(|_| Peer::alone()).collect();
        for peer in &peers {
            ledger.open(&peer.0).unwrap();
            let given = ledger.renew(&peer.0, 5, 5, |_| ()).unwrap();
            assert_eq!(given.allowance, Allowance { bytes: 0, imms: u64::MAX, messages: u64::MAX });
        }
        peers.iter().for_each(|peer| ledger.close(peer.0.id));
        assert_eq!(ledger.lock().reserved, 0);
    }
}
