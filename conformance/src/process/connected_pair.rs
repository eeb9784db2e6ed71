//! Two connected processes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{HelperProcess, worker_fabric};
use crate::backend_under_test::Variant;
use crate::check::{TestResult, within};
use crate::trial::{TrialContext, TrialFabric};

/// A fabric of this process, connected to a fabric in a helper process.
pub(crate) struct ConnectedPair {
    pub fabric: TrialFabric,
    pub peer: transport_core::Peer,
    pub helper: HelperProcess,
}

impl ConnectedPair {
    /// Starts a helper that listens, and connects to it.
    #[track_caller]
    pub(crate) fn new(context: &TrialContext) -> TestResult<Self> {
        let fabric = worker_fabric(context)?;
        let (helper, peer) = HelperProcess::spawn_connected(context, &fabric)?;
        Ok(Self { fabric, peer, helper })
    }

    /// Waits until the peer is closed, and returns the reason.
    #[track_caller]
    pub(crate) fn wait_closed(&self, limit: Duration) -> TestResult<transport_core::Error> {
        within(limit, "the close of the peer", self.peer.closed())
    }

    /// Returns the pair that the previous trial kept, or a new pair.
    #[track_caller]
    pub(crate) fn kept_or_new(context: &TrialContext) -> TestResult<Self> {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).take();
        match kept.filter(|(key, pair)| *key == ReuseKey::of(context) && pair.peer.is_alive()) {
            Some((_, pair)) => Ok(pair),
            None => Self::new(context),
        }
    }

    /// Keeps the pair for the next trial: to open 32 devices on both sides may take longer than the trial.
    pub(crate) fn keep(self, context: &TrialContext) {
        *KEPT.lock().unwrap_or_else(PoisonError::into_inner) = Some((ReuseKey::of(context), self));
    }
}

/// Two trials may use one pair if their keys are equal.
#[derive(PartialEq)]
struct ReuseKey {
    backend: String,
    variant: Variant,
    seed: u64,
}

impl ReuseKey {
    fn of(context: &TrialContext) -> Self {
        Self { backend: context.backend.name().into(), variant: context.variant, seed: context.seed }
    }
}

static KEPT: Mutex<Option<(ReuseKey, ConnectedPair)>> = Mutex::new(None);

/// Closes the pair that a trial kept.
pub(crate) fn drop_kept_pair() {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(kept);
}
