//! Who drives the engines: how many threads, on which cores, and how they post.

use std::time::Duration;

/// The worker threads of a fabric. The defaults are the fastest; the rest is for hosts
/// with few cores to spare, and for measuring what each step gains (`bench ladder`).
#[derive(Debug, Clone)]
pub struct Workers {
    pub(crate) threads: Option<usize>,
    pub(crate) pinning: Pinning,
    pub(crate) sharded: bool,
    pub(crate) posting: Posting,
}

/// How requests are written and posted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posting {
    /// Most requests under one doorbell.
    pub batch: usize,
    /// Requests are written when they are posted, not when they are submitted.
    pub lazy: bool,
    /// The longest nap between two looks at what operations wait for.
    pub trigger_nap: Duration,
}

/// Which core a worker keeps to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pinning {
    /// One of those next to its devices, where the system tells where these are, else none: another
    /// for each worker of this process, and not that of CPU 0, while there are such.
    #[default]
    Near,
    /// None: the system moves it about.
    Off,
    /// The n-th worker keeps to the n-th of these, and begins anew after the last.
    Cores(Vec<usize>),
}

/// Requests per doorbell. Chains beyond 4 gained little on mlx5 and 16 was
/// Perplexity's choice on EFA; 64 keeps the virtual call per request negligible.
const BATCH: usize = 64;

/// Linux adds 50 µs of slack to any sleep: a shorter nap would cost more and hardly end sooner.
const TRIGGER_NAP: Duration = Duration::from_micros(50);

impl Default for Workers {
    fn default() -> Self {
        let posting = Posting { batch: BATCH, lazy: true, trigger_nap: TRIGGER_NAP };
        Self { threads: None, pinning: Pinning::Near, sharded: true, posting }
    }
}

impl Workers {
    /// A thread for every rail group of every transport.
    pub fn per_group() -> Self {
        Self::default()
    }

    /// At most `threads` threads per transport, at least one, each with its share of
    /// the rail groups.
    pub fn at_most(threads: usize) -> Self {
        Self { threads: Some(threads.max(1)), ..Self::default() }
    }

    /// Where the threads run.
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = pinning;
        self
    }

    /// Puts the engines of a transport behind one lock: what workers cost that share
    /// their state.
    pub fn behind_one_lock(mut self) -> Self {
        self.sharded = false;
        self
    }

    /// Most requests under one doorbell, at least 1. Default 64.
    pub fn batch(mut self, requests: usize) -> Self {
        self.posting.batch = requests.max(1);
        self
    }

    /// The longest nap of a worker while an operation waits for its [`Trigger`](crate::Trigger), whose word
    /// wakes nobody. A worker takes turns without pause for 100 µs after the last thing that happened, then
    /// naps between two of them for an eighth of its idle time, and so long at most, to which Linux adds
    /// 50 µs. Zero: it takes all of a core for as long as one waits. Default 50 µs.
    pub fn trigger_nap(mut self, longest: Duration) -> Self {
        self.posting.trigger_nap = longest;
        self
    }

    /// Writes every request of an operation when it is taken over, not when its turn to be
    /// posted comes: memory for all of them, touched twice.
    pub fn eager(mut self) -> Self {
        self.posting.lazy = false;
        self
    }
}
