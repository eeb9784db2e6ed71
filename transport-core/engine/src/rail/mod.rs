//! One rail: an endpoint, the requests posted to it, and the operations that wait to post.
//!
//! In reading order: [`Rail`], `RoundRobin` (which operation posts next), `SendWindow` (how many bytes may be in
//! flight), `Inflight` (the requests in flight), `Receives` and [`PoolPart`] (receives), [`RailCounts`] (counters).

mod counters;
mod inflight;
mod progress_watch;
mod receive_pool;
#[allow(unsafe_code, reason = "posts receives; their table keeps the regions alive")]
mod receives;
mod round_robin;
mod send_window;
mod speed_meter;

use std::sync::Arc;
use std::time::Duration;

pub use counters::RailCounters;
pub use counters::RailCounts;
pub(super) use inflight::{MAX_RUN, PostedPiece, Run};
pub use receive_pool::Message;
pub use receive_pool::{Inbox, PoolPart};
pub(super) use receives::{FIRST_MESSAGE_RAIL, Receives};
pub(super) use speed_meter::{FULL_SPEED, speeds};

use crate::memory::{RetainedByRail, RetainedMemory};
use crate::spi::{Batch, Domain, Endpoint, EndpointConfig, Progress, Revocation, Status};
use crate::{Result, Time};
use inflight::Inflight;
use progress_watch::ProgressWatch;
use round_robin::RoundRobin;
use send_window::SendWindow;
use speed_meter::SpeedMeter;

/// A rail counts as unresponsive after this many round trips without any completion. If the link is only slow, the
/// engine posts too early at most once per 100 round trips.
const UNRESPONSIVE_ROUND_TRIPS: u32 = 100;

/// A path counts as broken no earlier than this after its oldest request has stopped to make progress. A card that loses a
/// packet repeats it within a few milliseconds. verbs may take longer (its packet timeout): then one lost packet breaks a
/// path, which costs less than to wait for the card.
const LEAST_STUCK: Duration = Duration::from_millis(10);

/// The same where the peer's processor takes part in each request: its threads may be kept off their cores.
pub(crate) const LEAST_STUCK_EMULATED: Duration = Duration::from_secs(1);

pub struct Rail {
    pub(crate) endpoint: Box<dyn Endpoint>,
    pub(crate) domain: Arc<dyn Domain>,
    pub(crate) inflight: Inflight,
    /// Probes of paths that are in the send queue.
    pub(crate) probes: usize,
    /// Operations that have pieces to post.
    pub(crate) queue: RoundRobin,
    /// The batch that is being posted.
    pub(crate) batch: Batch,
    /// The most requests in a batch.
    pub(crate) max_batch: usize,
    /// The same batch as runs of pieces.
    pub(crate) batch_runs: Vec<Run>,
    /// The device's last status, once the device is lost. The engine posts nothing more.
    pub(crate) lost: Option<Status>,
    /// Whether the user has taken the rail out of service: the engine uses it only for what no other rail can carry.
    pub(crate) is_retired: bool,
    /// The previous batch found the send queue full: the engine records this once, not per step.
    pub(crate) queue_full_logged: bool,
    /// The endpoint accepted nothing of the previous batch: the engine records this once, not per batch.
    pub(crate) backpressure_logged: bool,
    /// The number of consecutive batches of which the endpoint accepted nothing.
    pub(crate) refused_batches: usize,
    /// The most bytes in a batch. A device that moves bytes by itself counts none of them.
    pub(crate) batch_bytes: u64,
    /// The depth of the send queue.
    pub(crate) depth: usize,
    pub(crate) window: SendWindow,
    pub(crate) watch: ProgressWatch,
    pub(crate) meter: SpeedMeter,
    /// Set while the rail has no room for the next request.
    pub(crate) blocked: Option<BlockedSends>,
    /// Memory that the endpoint may still touch: dropped after it.
    _retained: Option<RetainedByRail>,
}

/// Since when a rail has had no room, and without any completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockedSends {
    since: Time,
    /// The requests that had ended by then.
    ended: u64,
}

impl Rail {
    /// Opens an endpoint. A batch holds up to `max_batch` requests, but no more than the send queue.
    pub fn open(domain: Arc<dyn Domain>, max_batch: usize, retained: &Arc<RetainedMemory>) -> Result<Self> {
        let is_late = domain.capabilities().revocation == Revocation::Late;
        let share = || RetainedByRail { memory: Arc::clone(retained), domain: Arc::clone(&domain) };
        let retained = is_late.then(share);
        let endpoint = domain.endpoint(EndpointConfig::default())?;
        let depth = domain.capabilities().send_depth.max(1) as usize;
        let max_batch = max_batch.min(depth);
        let batch_bytes = domain.capabilities().batch_bytes;
        let window = SendWindow::of(domain.capabilities());
        let nominal = domain.capabilities().link_bits_per_s.map(|bits| bits / 8);
        let meter = SpeedMeter::new(
            nominal.filter(|_| window.is_limited()),
            domain.capabilities().round_trip,
            window.limit(),
        );
        Ok(Self {
            endpoint,
            domain,
            inflight: Inflight::default(),
            probes: 0,
            queue: RoundRobin::default(),
            batch: Batch::with_capacity(max_batch),
            batch_runs: Vec::with_capacity(max_batch),
            max_batch,
            lost: None,
            is_retired: false,
            queue_full_logged: false,
            backpressure_logged: false,
            refused_batches: 0,
            batch_bytes,
            depth,
            window,
            watch: ProgressWatch::default(),
            meter,
            blocked: None,
            _retained: retained,
        })
    }

    /// Whether the rail carries any operation that it reaches.
    pub fn is_in_service(&self) -> bool {
        self.lost.is_none() && !self.is_retired
    }

    /// How many requests the send queue has room for.
    pub fn free_send_slots(&self) -> usize {
        match self.lost {
            Some(_) => 0,
            None => self.depth.saturating_sub(self.inflight.used_slots() + self.probes),
        }
    }

    /// Whether a request of `bytes` bytes must wait until earlier requests complete.
    pub fn is_window_full(&self, bytes: u64) -> bool {
        let (cost_in_flight, oldest) = (self.inflight.cost_in_flight(), self.inflight.oldest_cost());
        self.window.room(cost_in_flight, oldest, self.window.cost(bytes)) == 0
    }

    /// Evicts all requests in flight if the rail has had no room, and no request has completed, for too long: so
    /// requests to a peer that does not respond do not block the requests to other peers. `ended` is the number of
    /// requests that have ended since the rail was opened. Returns the operations of the evicted requests, or `None`
    /// if it is too early.
    #[cold]
    pub fn evict_unresponsive(&mut self, now: Time, ended: u64) -> Option<Vec<u32>> {
        let since = match self.blocked {
            Some(blocked) if blocked.ended == ended => blocked.since,
            _ => now,
        };
        self.blocked = Some(BlockedSends { since, ended });
        if now < since.after(self.eviction_delay()) {
            return None;
        }
        self.blocked = None;
        let ops = self.inflight.evict();
        self.window.on_evicted();
        Some(ops)
    }

    /// The time at which something happens without a command or an event: the endpoint's own timer, or the eviction
    /// of requests that do not complete. `ended` as in [`Rail::evict_unresponsive`].
    pub fn due(&self, ended: u64) -> Time {
        let still_blocked = |blocked: &BlockedSends| blocked.ended == ended && self.queue.front().is_some();
        let eviction =
            self.blocked.filter(still_blocked).map(|blocked| blocked.since.after(self.eviction_delay()));
        eviction.into_iter().fold(self.endpoint.due(), Time::min)
    }

    /// How long the oldest request must make no progress before its path counts as broken, at the least.
    pub fn least_stuck_limit(&self) -> Duration {
        // A card works alone, and tells its line rate.
        let capabilities = self.domain.capabilities();
        let needs_peer = !capabilities.emulated.is_empty()
            || capabilities.progress == Progress::Manual
            || capabilities.link_bits_per_s.is_none();
        self.eviction_delay().max(if needs_peer { LEAST_STUCK_EMULATED } else { LEAST_STUCK })
    }

    fn eviction_delay(&self) -> Duration {
        self.domain.capabilities().round_trip * UNRESPONSIVE_ROUND_TRIPS
    }
}
