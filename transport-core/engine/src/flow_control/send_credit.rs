//! The sender's side of a grant: what the peer allows us, and how much of it we have used.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::spi::{WireGrant, WorkKind};

/// The sender's side of a grant, for one transport. The engines use it, and any thread that runs a small request
/// itself.
#[derive(Debug, Default)]
pub struct SendCredit(CachePadded<State>);

#[derive(Debug, Default)]
struct State {
    bytes: AtomicU64,
    imms: CreditCounter,
    messages: CreditCounter,
    /// Whether the engines have been told of a new grant and have not read it yet.
    notified: AtomicBool,
}

/// How many imms, or messages, the peer has granted and we have used, since the peer was connected.
#[derive(Debug, Default)]
pub struct CreditCounter {
    granted: AtomicU64,
    used: AtomicU64,
    /// Whether somebody got less than it wanted, and waits.
    is_short: AtomicBool,
}

impl SendCredit {
    /// Applies a new grant. Returns false if it grants less than an earlier one: the protocol forbids this.
    pub fn raise(&self, to: &WireGrant) -> bool {
        let is_more = self.0.imms.raise(to.imms) & self.0.messages.raise(to.messages);
        self.0.bytes.store(to.bytes, Ordering::SeqCst);
        is_more
    }

    /// Bytes that may be posted and not acknowledged.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::SeqCst)
    }

    /// What a request takes one of besides bytes: an imm, a message, or nothing.
    pub fn counter(&self, kind: WorkKind, imm: Option<u32>) -> Option<&CreditCounter> {
        match kind {
            WorkKind::Send => Some(&self.0.messages),
            WorkKind::Write if imm.is_some() => Some(&self.0.imms),
            WorkKind::Write | WorkKind::Read => None,
        }
    }

    /// Notes that there is a new grant. Returns true if the caller has to notify the engines: they have read all
    /// earlier grants.
    pub fn should_notify(&self) -> bool {
        !self.0.notified.swap(true, Ordering::AcqRel)
    }

    /// Notes that an engine is about to read the grant.
    pub fn clear_notified(&self) {
        self.0.notified.store(false, Ordering::Release);
    }
}

impl CreditCounter {
    /// Whether there is no limit. Then nothing is counted.
    pub fn is_unlimited(&self) -> bool {
        self.granted.load(Ordering::Relaxed) == u64::MAX
    }

    /// Whether nothing is left.
    pub fn is_used_up(&self) -> bool {
        self.used.load(Ordering::SeqCst) >= self.granted.load(Ordering::SeqCst)
    }

    /// Takes up to `wanted`; returns how many it took.
    pub fn take(&self, wanted: u32) -> u32 {
        let taken = self.take_at_once(wanted);
        if taken == wanted {
            return taken;
        }
        // Whoever gives credit back from here on notifies the engines. What was given back before is there now.
        self.is_short.store(true, Ordering::SeqCst);
        taken + self.take_at_once(wanted - taken)
    }

    fn take_at_once(&self, wanted: u32) -> u32 {
        let granted = self.granted.load(Ordering::SeqCst);
        if granted == u64::MAX {
            return wanted;
        }
        let mut used = self.used.load(Ordering::SeqCst);
        loop {
            let taken = u64::from(wanted).min(granted.saturating_sub(used));
            if taken == 0 {
                return 0;
            }
            match self.used.compare_exchange(used, used + taken, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return taken as u32,
                Err(now) => used = now,
            }
        }
    }

    /// Gives back credit of requests that did not arrive.
    pub fn give_back(&self, count: u32) {
        // Requests without a limit were not counted, and an unlimited grant never becomes limited again.
        if !self.is_unlimited() {
            self.used.fetch_sub(u64::from(count), Ordering::SeqCst);
        }
    }

    /// Returns whether somebody got less than it wanted since the last call: the caller, which has given credit back,
    /// then notifies all engines.
    pub fn take_is_short(&self) -> bool {
        self.is_short.swap(false, Ordering::SeqCst)
    }

    fn raise(&self, to: u64) -> bool {
        self.granted.fetch_max(to, Ordering::SeqCst) <= to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(imms: u64) -> WireGrant {
        WireGrant { bytes: 1, imms, messages: 0 }
    }

    #[test]
    fn no_more_is_taken_than_was_granted() {
        let credit = SendCredit::default();
        let imms = credit.counter(WorkKind::Write, Some(1)).unwrap();
        assert_eq!(imms.take(1), 0);
        assert!(credit.raise(&grant(5)) && !imms.is_unlimited());
        assert_eq!([imms.take(3), imms.take(3), imms.take(3)], [3, 2, 0]);
        imms.give_back(1);
        assert!(imms.take_is_short(), "two got less than they wanted");
        assert_eq!(imms.take(1), 1);
        imms.give_back(1);
        assert!(!imms.take_is_short(), "nobody waits");
        assert_eq!(imms.take(3), 1);
        // A repeated grant and a smaller grant add nothing.
        assert!(credit.raise(&grant(5)) && imms.is_used_up());
        assert!(!credit.raise(&grant(4)) && imms.is_used_up());
        assert!(credit.raise(&grant(u64::MAX)) && imms.is_unlimited());
        assert_eq!(imms.take(u32::MAX), u32::MAX);
        imms.give_back(9);
        assert!(!credit.raise(&grant(7)) && imms.is_unlimited());
        assert!(
            credit.counter(WorkKind::Read, None).is_none() && credit.counter(WorkKind::Write, None).is_none()
        );
        assert!(credit.counter(WorkKind::Send, Some(1)).unwrap().is_used_up());
    }

    #[test]
    fn threads_share_one_allowance() {
        let credit = SendCredit::default();
        assert!(credit.raise(&grant(1000)));
        let took = || {
            let imms = credit.counter(WorkKind::Write, Some(0)).unwrap();
            std::iter::from_fn(|| Some(imms.take(3)).filter(|taken| *taken > 0)).map(u64::from).sum::<u64>()
        };
        let sum: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(took)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(sum, 1000);
    }
}
