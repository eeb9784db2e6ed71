//! Caller-driven fabrics and the virtual clock that they share.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use transport_core::spi::Capabilities;
use transport_core::{
    Clock, Error, ErrorKind, Fabric, FabricBuilder, GrantPolicy, Op, Outcome, PathPolicy, Peer, RailGroups,
    Time, Token, VirtualClock,
};

use crate::backend_under_test::{TransferSide, TransportShape, Variant};
use crate::check::{TestResult, TrialFailure, ensure, ensure_err, poll_once};
use crate::trial::{TrialContext, TrialFabric};

/// The label of a fabric's only transport.
pub(crate) const LABEL: &str = "under-test";
/// The number of turns after which a wait fails.
const MAX_TURNS: usize = 200_000;
/// The number of turns without a posted request after which the clock moves even if there were events: the
/// engine tries a refused post again at once, once per operation.
const MAX_TURNS_WITHOUT_POST: u32 = 8;
/// The clock may jump to work that is due this soon: latencies of devices are this short, deadlines are not.
const MAX_LATENCY: Duration = Duration::from_millis(1);
/// The step of a [`TickingClock`] per read. It is short, because every device of a fabric reads the clock in a turn.
const CLOCK_READ_STEP: Duration = Duration::from_nanos(100);
/// The clock's first step when nothing happens. The step doubles up to [`MAX_TICK`].
const TICK: Duration = Duration::from_micros(1);
const MAX_TICK: Duration = Duration::from_millis(500);

/// Drives the fabrics of a trial and moves their common virtual clock.
pub(crate) struct SimHarness {
    pub clock: VirtualClock,
    pub context: TrialContext,
    fabrics: RefCell<Vec<Fabric>>,
    /// The number of turns in a row without any event.
    turns_without_event: Cell<u32>,
    /// The number of turns in a row without a posted request.
    turns_without_post: Cell<u32>,
    idle_timer: IdleTimer,
}

/// Options of a fabric that a trial opens.
pub(crate) struct Options<'a> {
    pub labels: &'a [&'a str],
    pub rails: Option<u32>,
    /// True if each rail makes its own rail group.
    pub group_per_rail: bool,
    pub variant: Option<Variant>,
    pub max_operations: usize,
    pub deadline: Duration,
    pub token: Option<Token>,
    pub grant_policy: Option<Arc<dyn GrantPolicy>>,
    pub path_policy: PathPolicy,
    /// The memory for notifications, if the fabric is opened with them.
    pub notifications: Option<usize>,
    /// True if each read of the clock moves the clock: for waits during which nothing else moves it.
    pub ticking: bool,
}

/// The harness's clock, moved by [`CLOCK_READ_STEP`] at each read.
struct TickingClock(VirtualClock);

impl Clock for TickingClock {
    fn now(&self) -> Time {
        self.0.advance(CLOCK_READ_STEP);
        self.0.now()
    }
}

impl Default for Options<'_> {
    fn default() -> Self {
        let (max_operations, deadline) = (1024, Duration::from_secs(3600));
        let (labels, token, grant_policy, ticking) = (&[LABEL][..], None, None, false);
        let (rails, variant, group_per_rail) = (None, None, false);
        let (path_policy, notifications) = (PathPolicy::ANY, None);
        Self {
            labels,
            rails,
            group_per_rail,
            variant,
            max_operations,
            deadline,
            token,
            grant_policy,
            path_policy,
            notifications,
            ticking,
        }
    }
}

/// The builder of a fabric with transports of the backend under test.
#[track_caller]
pub(crate) fn builder(context: &TrialContext, options: &Options<'_>) -> TestResult<FabricBuilder> {
    let rails = options.rails.unwrap_or_else(|| context.backend.rails());
    let variant = options.variant.unwrap_or(context.variant);
    let shape = TransportShape { rails, variant, seed: context.seed };
    let mut builder = FabricBuilder::new()
        .max_operations(options.max_operations)
        .deadline(options.deadline)
        .path_policy(options.path_policy);
    static FABRICS: AtomicU64 = AtomicU64::new(0);
    let number = FABRICS.fetch_add(1, Ordering::Relaxed);
    let unique_label = format!("ahead-{}-{number}", std::process::id());
    builder = context
        .backend
        .preceding_transports(&unique_label)
        .into_iter()
        .fold(builder, FabricBuilder::transport);
    for label in options.labels {
        builder = builder.transport(context.backend.transport(label, shape).map_err(TrialFailure::new)?);
    }
    if options.group_per_rail {
        // A device that no listed group names makes its own group.
        builder = builder.rail_groups(RailGroups::Listed(Vec::new()));
    }
    if let Some(memory) = options.notifications {
        builder = builder.notifications(memory);
    }
    if let Some(token) = &options.token {
        builder = builder.token(token.clone());
    }
    if let Some(policy) = &options.grant_policy {
        builder = builder.grant_policy(Arc::clone(policy));
    }
    Ok(builder)
}

impl SimHarness {
    pub(crate) fn new(context: &TrialContext) -> Self {
        let (fabrics, context) = (RefCell::default(), context.clone());
        let (clock, turns_without_event, turns_without_post, idle_timer) = Default::default();
        Self { clock, context, fabrics, turns_without_event, turns_without_post, idle_timer }
    }

    /// Opens a fabric and drives it from now on. The first fabric is on the source side.
    #[track_caller]
    pub(crate) fn open(&self, options: &Options<'_>) -> TestResult<TrialFabric> {
        let number = self.fabrics.borrow().len() as u64;
        let clock: Arc<dyn Clock> = match options.ticking {
            true => Arc::new(TickingClock(self.clock.clone())),
            false => Arc::new(self.clock.clone()),
        };
        let builder = builder(&self.context, options)?
            .caller_driven()
            .clock(clock)
            .seed(self.context.seed.wrapping_mul(1000).wrapping_add(number))
            .incarnation(self.context.seed.wrapping_mul(1000).wrapping_add(number + 1));
        let fabric = builder.open()?;
        self.drive(&fabric);
        let side = if number == 0 { TransferSide::Source } else { TransferSide::Target };
        Ok(TrialFabric::new(fabric, &self.context, side))
    }

    /// Drives a fabric that other code opened on this harness's clock.
    pub(crate) fn drive(&self, fabric: &Fabric) {
        self.fabrics.borrow_mut().push(fabric.clone());
    }

    /// Runs one turn of every fabric, in the order of opening, and returns the number of events. The clock
    /// does not move.
    pub(crate) fn step(&self) -> usize {
        let (mut events, mut posted) = (0, 0);
        for fabric in self.fabrics.borrow().iter() {
            let report = fabric.step();
            events += report.events;
            posted += report.posted;
        }
        self.turns_without_post.set(if posted > 0 { 0 } else { self.turns_without_post.get() + 1 });
        events
    }

    /// Runs one turn of every fabric, and moves the clock if there was no event.
    pub(crate) fn tick(&self) -> usize {
        let events = self.step();
        if events == 0 {
            if self.context.backend.has_gpus() && self.outstanding() > 0 && self.idle_timer.gpu_may_be_busy()
            {
                self.clock.advance(TICK);
                return 0;
            }
            let step = (TICK * (1 << self.turns_without_event.get().min(20))).min(MAX_TICK);
            self.clock.advance(self.next_clock_step(step));
            self.turns_without_event.set(self.turns_without_event.get() + 1);
            return 0;
        }
        self.turns_without_event.set(0);
        self.idle_timer.reset();
        if self.turns_without_post.get() >= MAX_TURNS_WITHOUT_POST {
            self.clock.advance(TICK);
        }
        events
    }

    /// Returns `step`, or the time until the next device work is due if that is longer.
    fn next_clock_step(&self, step: Duration) -> Duration {
        let now = self.clock.now();
        let fabrics = self.fabrics.borrow();
        let spans = fabrics.iter().map(|fabric| fabric.due().since(now));
        spans.filter(|span| !span.is_zero() && *span <= MAX_LATENCY).min().map_or(step, |span| span.max(step))
    }

    /// The number of outstanding operations of all fabrics.
    pub(crate) fn outstanding(&self) -> usize {
        self.fabrics.borrow().iter().map(|fabric| fabric.step().outstanding).sum()
    }

    /// Ticks until `done` returns true.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) -> TestResult {
        for _ in 0..MAX_TURNS {
            if done() {
                return Ok(());
            }
            self.tick();
        }
        Err(TrialFailure::new(format!("{what}: did not happen within {MAX_TURNS} turns")))
    }

    /// Ticks until `future` is ready, and returns its output.
    #[track_caller]
    pub(crate) fn output<F: Future>(&self, what: &str, future: F) -> TestResult<F::Output> {
        let (mut future, mut output) = (pin!(future), None);
        self.until(what, || {
            output = poll_once(future.as_mut());
            output.is_some()
        })?;
        output.ok_or_else(|| TrialFailure::new("no result"))
    }

    /// Ticks until `op` has its result.
    #[track_caller]
    pub(crate) fn result(&self, op: &mut Op) -> TestResult<Result<Outcome, Error>> {
        let mut result = None;
        self.until("an operation", || {
            result = op.try_result();
            result.is_some()
        })?;
        result.ok_or_else(|| TrialFailure::new("no result"))
    }

    /// Ticks until `op` has its result, and fails unless the operation succeeded.
    #[track_caller]
    pub(crate) fn done(&self, mut op: Op) -> TestResult<Outcome> {
        Ok(self.result(&mut op)??)
    }

    /// Waits for all operations, and fails unless all succeeded.
    #[track_caller]
    pub(crate) fn all_done(&self, ops: Vec<Op>) -> TestResult {
        for op in ops {
            self.done(op)?;
        }
        Ok(())
    }

    /// Fails unless the operation ends with an error of one of these kinds, at the call or later.
    #[track_caller]
    pub(crate) fn fails(&self, what: &str, op: Result<Op, Error>, kinds: &[ErrorKind]) -> TestResult<Error> {
        match op {
            Ok(mut op) => ensure_err(what, self.result(&mut op)?, kinds),
            Err(error) => ensure_err::<()>(what, Err(error), kinds),
        }
    }

    /// Ticks until no operation is outstanding and no event comes any more.
    #[track_caller]
    pub(crate) fn settle(&self) -> TestResult {
        self.until("the end of all operations", || self.outstanding() == 0)?;
        // Nine steps of a quarter of `SLOW` without an event: longer than any latency of a variant.
        let mut silent_turns = 0;
        self.until("turns without events", || {
            silent_turns = if self.step() == 0 { silent_turns + 1 } else { 0 };
            self.clock.advance(Variant::SLOW / 4);
            silent_turns > 8
        })
    }

    /// Opens two fabrics with default options and connects them.
    #[track_caller]
    pub(crate) fn pair(self) -> TestResult<SimPair> {
        let options = Options::default();
        self.pair_of(&options, &options)
    }

    /// Opens two fabrics with these options and connects them.
    #[track_caller]
    pub(crate) fn pair_of(self, ours: &Options<'_>, theirs: &Options<'_>) -> TestResult<SimPair> {
        let (a, b) = (self.open(ours)?, self.open(theirs)?);
        let (to_b, to_a) = a.connect_local(&b)?;
        Ok(SimPair { sim: self, a, b, to_b, to_a })
    }
}

impl Drop for SimHarness {
    fn drop(&mut self) {
        self.fabrics.get_mut().iter().for_each(|fabric| self.context.event_digest.add(fabric.event_hash()));
    }
}

/// Two connected fabrics: `a` is the initiator, `b` is the target.
pub(crate) struct SimPair {
    pub sim: SimHarness,
    pub a: TrialFabric,
    pub b: TrialFabric,
    /// `a`'s view of `b`.
    pub to_b: Peer,
    /// `b`'s view of `a`.
    pub to_a: Peer,
}

impl SimPair {
    #[track_caller]
    pub(crate) fn new(context: &TrialContext) -> TestResult<Self> {
        SimHarness::new(context).pair()
    }

    /// The capabilities of `a`'s first transport.
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.a.transports()[0].capabilities.clone()
    }

    /// The number of requests that `a` has posted.
    pub(crate) fn posts(&self) -> u64 {
        self.a.counters().iter().map(|rail| rail.posts).sum()
    }

    /// Steps `a` until it has posted at least `posts` requests, one of which is not complete. The clock moves
    /// a little in each turn, for devices that accept nothing for a while.
    #[track_caller]
    pub(crate) fn post(&self, posts: u64) -> TestResult {
        for _ in 0..1000 {
            self.a.step();
            if self.posts() >= posts {
                return ensure(self.a.step().outstanding > 0, "no request is outstanding");
            }
            self.sim.clock.advance(TICK);
        }
        Err(TrialFailure::new(format!("{} requests were posted, want {posts}", self.posts())))
    }
}

/// The real time since the last event, for trials with GPUs: no virtual clock moves a GPU's work.
#[derive(Default)]
struct IdleTimer(Cell<Option<Instant>>);

impl IdleTimer {
    /// The work of a GPU, and its opening, take less time than this. Until then the virtual clock does not jump.
    const GPU_WORK: Duration = Duration::from_millis(200);
    /// The pause between two polls of a GPU, which wakes no thread.
    const POLL_INTERVAL: Duration = Duration::from_micros(20);

    /// Starts again, after an event.
    fn reset(&self) {
        self.0.set(None);
    }

    /// Sleeps for a short time after a turn without an event. Returns true if a GPU may still be at work.
    fn gpu_may_be_busy(&self) -> bool {
        let since = self.0.get().unwrap_or_else(Instant::now);
        self.0.set(Some(since));
        std::thread::sleep(Self::POLL_INTERVAL);
        since.elapsed() < Self::GPU_WORK
    }
}
