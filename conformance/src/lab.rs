//! Caller-driven fabrics and the clock they share.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use transport_core::spi::Capabilities;
use transport_core::{
    Clock, Error, ErrorKind, Fabric, FabricBuilder, GrantPolicy, Op, Outcome, Peer, RailGroups, Time, Token,
    VirtualClock,
};

use crate::check::{Failure, Verdict, ensure, refused};
use crate::end::End;
use crate::real::Silence;
use crate::subject::{Shape, Side, Variant};
use crate::trial::Context;

/// The label of a fabric's only transport.
pub(crate) const LABEL: &str = "under-test";
/// Turns after which a wait that should have ended is a failure.
const PATIENCE: usize = 200_000;
/// Turns without a request posted after which time moves on, whatever else happens: a
/// refused post is tried again at once, as often as there are operations.
const STUCK: u32 = 8;
/// To what is due so soon the clock may leap: the latencies of cards, not deadlines.
const SOON: Duration = Duration::from_millis(1);
/// What a ticking clock moves by: every device of a fabric looks in a turn.
const LOOK: Duration = Duration::from_nanos(100);
/// The first step of the clock when nothing happens; it doubles up to [`LEAP`].
const TICK: Duration = Duration::from_micros(1);
const LEAP: Duration = Duration::from_millis(500);

/// Fabrics that live in one virtual time.
pub(crate) struct Lab {
    pub clock: VirtualClock,
    pub context: Context,
    fabrics: RefCell<Vec<Fabric>>,
    /// Turns in a row without any event, and without a request posted.
    idle: Cell<u32>,
    unposted: Cell<u32>,
    silence: Silence,
}

/// What is special about a fabric.
pub(crate) struct Options<'a> {
    pub labels: &'a [&'a str],
    pub rails: Option<u32>,
    /// Each rail makes a rail group of its own.
    pub apart: bool,
    pub variant: Option<Variant>,
    pub max_operations: usize,
    pub deadline: Duration,
    pub token: Option<Token>,
    pub admission: Option<Arc<dyn GrantPolicy>>,
    /// Time passes for it whenever it looks: for waits that nobody moves the clock in.
    pub ticking: bool,
}

/// A lab's clock that moves a little with every look.
struct Ticking(VirtualClock);

impl Clock for Ticking {
    fn now(&self) -> Time {
        self.0.advance(LOOK);
        self.0.now()
    }
}

impl Default for Options<'_> {
    fn default() -> Self {
        let (max_operations, deadline) = (1024, Duration::from_secs(3600));
        let (labels, token, admission, ticking) = (&[LABEL][..], None, None, false);
        let (rails, variant, apart) = (None, None, false);
        Self { labels, rails, apart, variant, max_operations, deadline, token, admission, ticking }
    }
}

/// The builder of a fabric of the subject's, with transports and seed.
#[track_caller]
pub(crate) fn builder(context: &Context, options: &Options<'_>) -> Verdict<FabricBuilder> {
    let rails = options.rails.unwrap_or_else(|| context.subject.rails());
    let variant = options.variant.unwrap_or(context.variant);
    let shape = Shape { rails, variant, seed: context.seed };
    let mut builder = FabricBuilder::new().max_operations(options.max_operations).deadline(options.deadline);
    static FABRICS: AtomicU64 = AtomicU64::new(0);
    let number = FABRICS.fetch_add(1, Ordering::Relaxed);
    let alone = format!("ahead-{}-{number}", std::process::id());
    builder = context.subject.ahead(&alone).into_iter().fold(builder, FabricBuilder::transport);
    for label in options.labels {
        builder = builder.transport(context.subject.transport(label, shape).map_err(Failure::new)?);
    }
    if options.apart {
        // A device that no group names makes one of its own.
        builder = builder.rail_groups(RailGroups::Listed(Vec::new()));
    }
    if let Some(token) = &options.token {
        builder = builder.token(token.clone());
    }
    if let Some(admission) = &options.admission {
        builder = builder.grant_policy(Arc::clone(admission));
    }
    Ok(builder)
}

impl Lab {
    pub(crate) fn new(context: &Context) -> Self {
        let (fabrics, context) = (RefCell::default(), context.clone());
        let (clock, idle, unposted, silence) = Default::default();
        Self { clock, context, fabrics, idle, unposted, silence }
    }

    /// Opens a fabric, the first at the source; the lab drives it from now on.
    #[track_caller]
    pub(crate) fn open(&self, options: &Options<'_>) -> Verdict<End> {
        let number = self.fabrics.borrow().len() as u64;
        let clock: Arc<dyn Clock> = match options.ticking {
            true => Arc::new(Ticking(self.clock.clone())),
            false => Arc::new(self.clock.clone()),
        };
        let builder = builder(&self.context, options)?
            .caller_driven()
            .clock(clock)
            .seed(self.context.seed.wrapping_mul(1000).wrapping_add(number))
            .incarnation(self.context.seed.wrapping_mul(1000).wrapping_add(number + 1));
        let fabric = builder.open()?;
        self.drive(&fabric);
        let side = if number == 0 { Side::Source } else { Side::Target };
        Ok(End::new(fabric, &self.context, side))
    }

    /// Drives a fabric that was opened elsewhere on this lab's clock.
    pub(crate) fn drive(&self, fabric: &Fabric) {
        self.fabrics.borrow_mut().push(fabric.clone());
    }

    /// One turn of every fabric, in the order they were opened. Time stands still.
    pub(crate) fn turn(&self) -> usize {
        let (mut events, mut posted) = (0, 0);
        for fabric in self.fabrics.borrow().iter() {
            let turn = fabric.step();
            events += turn.events;
            posted += turn.posted;
        }
        self.unposted.set(if posted > 0 { 0 } else { self.unposted.get() + 1 });
        events
    }

    /// One turn; time moves on if nothing happened.
    pub(crate) fn tick(&self) -> usize {
        let events = self.turn();
        if events == 0 {
            if self.context.subject.has_gpus() && self.outstanding() > 0 && self.silence.may_be_work() {
                self.clock.advance(TICK);
                return 0;
            }
            let step = (TICK * (1 << self.idle.get().min(20))).min(LEAP);
            self.clock.advance(self.soonest(step));
            self.idle.set(self.idle.get() + 1);
            return 0;
        }
        self.idle.set(0);
        self.silence.end();
        if self.unposted.get() >= STUCK {
            self.clock.advance(TICK);
        }
        events
    }

    /// `step`, or the time to what a device has under way if nothing happens before.
    fn soonest(&self, step: Duration) -> Duration {
        let now = self.clock.now();
        let fabrics = self.fabrics.borrow();
        let spans = fabrics.iter().map(|fabric| fabric.due().since(now));
        spans.filter(|span| !span.is_zero() && *span <= SOON).min().map_or(step, |span| span.max(step))
    }

    /// Operations under way.
    pub(crate) fn outstanding(&self) -> usize {
        self.fabrics.borrow().iter().map(|fabric| fabric.step().outstanding).sum()
    }

    /// Ticks until `done`.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) -> Verdict {
        for _ in 0..PATIENCE {
            if done() {
                return Ok(());
            }
            self.tick();
        }
        Err(Failure::new(format!("{what}: not after {PATIENCE} turns")))
    }

    /// Ticks until `op` has its result.
    #[track_caller]
    pub(crate) fn result(&self, op: &mut Op) -> Verdict<Result<Outcome, Error>> {
        let mut result = None;
        self.until("an operation", || {
            result = op.try_result();
            result.is_some()
        })?;
        result.ok_or_else(|| Failure::new("no result"))
    }

    /// The operation must succeed.
    #[track_caller]
    pub(crate) fn done(&self, mut op: Op) -> Verdict<Outcome> {
        Ok(self.result(&mut op)??)
    }

    /// All must succeed.
    #[track_caller]
    pub(crate) fn all_done(&self, ops: Vec<Op>) -> Verdict {
        for op in ops {
            self.done(op)?;
        }
        Ok(())
    }

    /// The operation must be refused, at once or later.
    #[track_caller]
    pub(crate) fn fails(&self, what: &str, op: Result<Op, Error>, kinds: &[ErrorKind]) -> Verdict<Error> {
        match op {
            Ok(mut op) => refused(what, self.result(&mut op)?, kinds),
            Err(error) => refused::<()>(what, Err(error), kinds),
        }
    }

    /// Ticks until nothing is under way and nothing happens any more, also later.
    #[track_caller]
    pub(crate) fn settle(&self) -> Verdict {
        self.until("everything ends", || self.outstanding() == 0)?;
        // Two leaps of silence: longer than any latency of a variant.
        let mut silent = 0;
        self.until("silence", || {
            silent = if self.turn() == 0 { silent + 1 } else { 0 };
            self.clock.advance(Variant::SLOW / 4);
            silent > 8
        })
    }

    /// Two fabrics, connected.
    #[track_caller]
    pub(crate) fn pair(self) -> Verdict<Pair> {
        let options = Options::default();
        self.pair_of(&options, &options)
    }

    /// Two fabrics of these options, connected.
    #[track_caller]
    pub(crate) fn pair_of(self, ours: &Options<'_>, theirs: &Options<'_>) -> Verdict<Pair> {
        let (a, b) = (self.open(ours)?, self.open(theirs)?);
        let (to_b, to_a) = a.connect_local(&b)?;
        Ok(Pair { lab: self, a, b, to_b, to_a })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.fabrics.get_mut().iter().for_each(|fabric| self.context.witness.saw(fabric.event_hash()));
    }
}

/// Two connected fabrics: `a` begins, `b` is the target.
pub(crate) struct Pair {
    pub lab: Lab,
    pub a: End,
    pub b: End,
    /// `a`'s view of `b`.
    pub to_b: Peer,
    /// `b`'s view of `a`.
    pub to_a: Peer,
}

impl Pair {
    #[track_caller]
    pub(crate) fn new(context: &Context) -> Verdict<Self> {
        Lab::new(context).pair()
    }

    /// Of `a`'s first transport.
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.a.transports()[0].capabilities.clone()
    }

    /// Requests that `a` has posted.
    pub(crate) fn posts(&self) -> u64 {
        self.a.counters().iter().map(|rail| rail.posts).sum()
    }

    /// Steps until at least `posts` requests of `a` were posted, and one is not complete. A
    /// device that takes nothing for a while gets a little time.
    #[track_caller]
    pub(crate) fn post(&self, posts: u64) -> Verdict {
        for _ in 0..1000 {
            self.a.step();
            if self.posts() >= posts {
                return ensure(self.a.step().outstanding > 0, "nothing is outstanding");
            }
            self.lab.clock.advance(TICK);
        }
        Err(Failure::new(format!("{} requests were posted, not {posts}", self.posts())))
    }
}
