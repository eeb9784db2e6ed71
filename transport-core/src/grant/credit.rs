//! What a peer allows us, and what of it we have used.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::spi::{Allowance, WorkKind};

/// The sender's side of a grant, over one transport. Used by the worker and, for small
/// operations, by any thread.
#[derive(Debug, Default)]
pub(crate) struct Credit(CachePadded<State>);

#[derive(Debug, Default)]
struct State {
    bytes: AtomicU64,
    imms: Allowed,
    messages: Allowed,
    /// The engine has been told of news and has not looked yet.
    told: AtomicBool,
}

/// How many of a kind are allowed and used, since the peer was connected.
#[derive(Debug, Default)]
pub(crate) struct Allowed {
    allowed: AtomicU64,
    used: AtomicU64,
}

impl Credit {
    /// Takes a new grant over; `false` if it takes something back, which no peer may.
    pub fn raise(&self, to: &Allowance) -> bool {
        let rises = self.0.imms.raise(to.imms) & self.0.messages.raise(to.messages);
        self.0.bytes.store(to.bytes, Ordering::SeqCst);
        rises
    }

    /// Bytes that may be posted and not acknowledged.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::SeqCst)
    }

    /// What a request of that kind takes one of, besides bytes.
    pub fn unit(&self, kind: WorkKind, imm: Option<u32>) -> Option<&Allowed> {
        match kind {
            WorkKind::Send => Some(&self.0.messages),
            WorkKind::Write if imm.is_some() => Some(&self.0.imms),
            WorkKind::Write | WorkKind::Read => None,
        }
    }

    /// Whether the engine is to be told of news; `true` once until it has looked.
    pub fn tells(&self) -> bool {
        !self.0.told.swap(true, Ordering::AcqRel)
    }

    /// The engine looks now.
    pub fn looked(&self) {
        self.0.told.store(false, Ordering::Release);
    }
}

impl Allowed {
    /// Whether they are not counted.
    pub fn is_unlimited(&self) -> bool {
        self.allowed.load(Ordering::Relaxed) == u64::MAX
    }

    /// Whether nothing is left.
    pub fn is_used_up(&self) -> bool {
        self.used.load(Ordering::SeqCst) >= self.allowed.load(Ordering::SeqCst)
    }

    /// Takes up to `wanted` and says how many.
    pub fn take(&self, wanted: u32) -> u32 {
        let allowed = self.allowed.load(Ordering::SeqCst);
        if allowed == u64::MAX {
            return wanted;
        }
        let mut used = self.used.load(Ordering::SeqCst);
        loop {
            let taken = u64::from(wanted).min(allowed.saturating_sub(used));
            if taken == 0 {
                return 0;
            }
            match self.used.compare_exchange(used, used + taken, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return taken as u32,
                Err(now) => used = now,
            }
        }
    }

    /// Gives back what did not arrive after all.
    pub fn give_back(&self, count: u32) {
        // What was taken without a limit was not counted; a limit never comes later.
        if !self.is_unlimited() {
            self.used.fetch_sub(u64::from(count), Ordering::SeqCst);
        }
    }

    fn raise(&self, to: u64) -> bool {
        self.allowed.fetch_max(to, Ordering::SeqCst) <= to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowance(imms: u64) -> Allowance {
        Allowance { bytes: 1, imms, messages: 0 }
    }

    #[test]
    fn no_more_is_taken_than_was_allowed() {
        let credit = Credit::default();
        let imms = credit.unit(WorkKind::Write, Some(1)).unwrap();
        assert_eq!(imms.take(1), 0);
        assert!(credit.raise(&allowance(5)) && !imms.is_unlimited());
        assert_eq!([imms.take(3), imms.take(3), imms.take(3)], [3, 2, 0]);
        imms.give_back(1);
        assert_eq!(imms.take(3), 1);
        // Neither twice the same nor less adds anything.
        assert!(credit.raise(&allowance(5)) && imms.is_used_up());
        assert!(!credit.raise(&allowance(4)) && imms.is_used_up());
        assert!(credit.raise(&allowance(u64::MAX)) && imms.is_unlimited());
        assert_eq!(imms.take(u32::MAX), u32::MAX);
        imms.give_back(9);
        assert!(!credit.raise(&allowance(7)) && imms.is_unlimited());
        assert!(credit.unit(WorkKind::Read, None).is_none() && credit.unit(WorkKind::Write, None).is_none());
        assert!(credit.unit(WorkKind::Send, Some(1)).unwrap().is_used_up());
    }

    #[test]
    fn threads_share_one_allowance() {
        let credit = Credit::default();
        assert!(credit.raise(&allowance(1000)));
        let took = || {
            let imms = credit.unit(WorkKind::Write, Some(0)).unwrap();
            std::iter::from_fn(|| Some(imms.take(3)).filter(|taken| *taken > 0)).map(u64::from).sum::<u64>()
        };
        let sum: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(took)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(sum, 1000);
    }
}
