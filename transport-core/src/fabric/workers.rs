//! The threads that drive the engines: how many there are, on which cores they run, and how they post.

use std::time::Duration;

use crate::engine::Posting;

/// The settings of a fabric's worker threads. The defaults are the fastest. The other settings are for hosts with few
/// cores to spare, and for measurements of what each optimization gains (`bench ladder`).
#[derive(Debug, Clone)]
pub struct Workers {
    pub(crate) threads: Option<usize>,
    pub(crate) pinning: Pinning,
    pub(crate) sharded: bool,
    pub(crate) posting: Posting,
}

/// The core that each worker is bound to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pinning {
    /// A core next to the worker's devices, if the system tells where these are; otherwise the worker is not bound. As
    /// long as there are enough such cores, each worker of this process gets a core of its own, and none that of CPU 0.
    #[default]
    Near,
    /// Workers are not bound: the system moves them between cores.
    Off,
    /// The n-th worker is bound to the n-th of these CPUs. After the last CPU the list starts again.
    Cores(Vec<usize>),
}

impl Default for Workers {
    fn default() -> Self {
        Self { threads: None, pinning: Pinning::Near, sharded: true, posting: Posting::default() }
    }
}

impl Workers {
    /// A thread for every rail group of every transport.
    pub fn per_group() -> Self {
        Self::default()
    }

    /// At most `threads` threads per transport, but at least one. Each drives a share of the rail groups.
    pub fn at_most(threads: usize) -> Self {
        Self { threads: Some(threads.max(1)), ..Self::default() }
    }

    /// The cores that the threads run on.
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = pinning;
        self
    }

    /// Puts the engines of a transport behind one lock, to measure what shared state costs.
    pub fn behind_one_lock(mut self) -> Self {
        self.sharded = false;
        self
    }

    /// The most requests under one doorbell, at least 1. Default 64.
    pub fn batch(mut self, requests: usize) -> Self {
        self.posting.batch = requests.max(1);
        self
    }

    /// The longest sleep of a worker between two steps, while an operation waits for its [`Trigger`](crate::Trigger).
    /// No wakeup tells the worker that the trigger's signal has changed.
    ///
    /// For 100 µs after its last event, the worker runs steps without a pause. Then it sleeps between two steps for an
    /// eighth of its idle time, but no longer than `longest`; Linux adds 50 µs. With zero, the worker takes all of a
    /// core while an operation waits. Default 50 µs.
    pub fn trigger_nap(mut self, longest: Duration) -> Self {
        self.posting.trigger_nap = longest;
        self
    }

    /// Writes all requests of an operation when the worker activates the operation, not when it posts them. This needs
    /// memory for all requests, and touches that memory twice.
    pub fn eager(mut self) -> Self {
        self.posting.lazy = false;
        self
    }
}
