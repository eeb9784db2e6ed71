//! The rungs: each adds one technique to the rung before.

use multirail::{Pinning, Workers};

/// A rung and its engine settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rung {
    pub name: &'static str,
    /// All rails instead of one.
    pub all_rails: bool,
    /// Every rail has moved bytes before the measurement.
    pub warm: bool,
    /// One thread per rail group instead of one for all.
    pub thread_per_group: bool,
    pub pinned: bool,
    /// Threads share no lock.
    pub sharded: bool,
    /// Several requests per doorbell.
    pub batched: bool,
    /// Requests are written when they are posted, not earlier.
    pub lazy: bool,
}

const FIRST: Rung = Rung {
    name: "one rail with a queue",
    all_rails: false,
    warm: false,
    thread_per_group: false,
    pinned: false,
    sharded: false,
    batched: false,
    lazy: false,
};
const ALL: Rung = Rung { name: "all rails on one thread", all_rails: true, ..FIRST };
const WARM: Rung = Rung { name: "warm-up", warm: true, ..ALL };
const THREADS: Rung = Rung { name: "a thread per group", thread_per_group: true, ..WARM };
const PINNED: Rung = Rung { name: "threads pinned", pinned: true, ..THREADS };
const SHARDED: Rung = Rung { name: "state sharded", sharded: true, ..PINNED };
const BATCHED: Rung = Rung { name: "batched posting", batched: true, ..SHARDED };
const LAZY: Rung = Rung { name: "lazy posting", lazy: true, ..BATCHED };

/// Perplexity's steps to 3108 of 3200 Gbps, in their order.
pub const RUNGS: [Rung; 8] = [FIRST, ALL, WARM, THREADS, PINNED, SHARDED, BATCHED, LAZY];

impl Rung {
    /// The engine's worker settings. Threads are pinned to `cores` in turn.
    pub fn workers(&self, batch: usize, cores: &[usize]) -> Workers {
        let mut workers = if self.thread_per_group { Workers::per_group() } else { Workers::at_most(1) };
        workers = workers.pinning(if self.pinned { Pinning::Cores(cores.to_vec()) } else { Pinning::Off });
        workers = workers.batch(if self.batched { batch } else { 1 });
        if !self.sharded {
            workers = workers.behind_one_lock();
        }
        if self.lazy { workers } else { workers.eager() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rung_adds_one_setting() {
        let switches = |rung: &Rung| {
            let Rung { all_rails, warm, thread_per_group, pinned, sharded, batched, lazy, .. } = *rung;
            [all_rails, warm, thread_per_group, pinned, sharded, batched, lazy]
        };
        for (height, rung) in RUNGS.iter().enumerate() {
            let on = switches(rung).iter().filter(|on| **on).count();
            assert_eq!(on, height, "{}", rung.name);
            assert!(switches(rung)[..height].iter().all(|on| *on), "{}", rung.name);
        }
    }
}
