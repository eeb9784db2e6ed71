//! The engine: one thread's turn of taking commands, posting and polling.
//!
//! A worker thread calls [`Engine::step`] in a loop; a caller-driven fabric calls
//! it from the user's thread. Nothing else may touch the endpoints.
//! Reading order: `handle` (what others see), `commands` (in), `post` (out),
//! `reap` (back), `end` (how operations end).

mod active;
pub(crate) mod alarms;
mod commands;
mod credit;
mod drain;
mod early;
mod end;
mod errands;
mod handle;
mod neighbour;
#[allow(unsafe_code, reason = "posts what `active` keeps alive")]
mod post;
mod posted;
mod rail;
mod reap;
#[allow(unsafe_code, reason = "posts receives that `known` keeps alive")]
mod receive;
mod revoke;
mod rotation;
mod snapshot;
mod stall;
mod trigger;
mod unanswered;
mod window;
mod work;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(crate) use handle::{Control, EngineHandle, HandleSetup, Submission};
pub use rail::RailCounters;
pub(crate) use rail::{Rail, RailCounts};
pub(crate) use snapshot::Snapshot;
pub(crate) use work::{Gate, Work};

use active::{Active, ActiveRail};
use drain::Draining;
use early::Early;
use neighbour::LinkState;
use receive::Receives;
use revoke::Revoking;

use crate::observe::{OperationDump, OperationKind, What};
use crate::op::OpId;
use crate::plan::RailRange;
use crate::spi::{Completions, PeerSlot};
use crate::{Clock, Error, ErrorKind, PeerId, Time};

/// Events taken per poll of an endpoint.
const POLL_ROOM: usize = 256;

/// How long closing waits for a backend to give back what is posted.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// What a turn did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Commands taken, requests posted and events seen.
    pub events: usize,
    /// Of those, requests posted.
    pub posted: usize,
    /// Operations under way after it.
    pub outstanding: usize,
}

pub(crate) struct Engine {
    handle: Arc<EngineHandle>,
    clock: Arc<dyn Clock>,
    rails: Vec<Rail>,
    /// By op index.
    active: Vec<Option<Active>>,
    running: usize,
    links: Vec<Option<LinkState>>,
    link_of: HashMap<PeerId, u32>,
    /// Link by `[rail][slot]`.
    slot_links: Vec<foldhash::HashMap<PeerSlot, u32>>,
    /// Events of peers whose `Link` command is still on its way.
    early: Early,
    receives: Receives,
    revoking: Vec<Revoking>,
    draining: Vec<Draining>,
    /// Operations whose trigger was not due at the last look.
    untriggered: Vec<OpId>,
    completions: Completions,
    /// No deadline of an operation under way is before this.
    next_deadline: Time,
    /// No operation under way stalls before this.
    next_look: Time,
    /// The clock in this turn, once somebody has asked.
    time: Option<Time>,
    /// The last record says so.
    parked: bool,
    /// The last operations that a peer's end cut short.
    casualties: VecDeque<OperationDump>,
    /// Spare allocations of per-rail state.
    spare: Vec<Vec<ActiveRail>>,
    ranges: Vec<RailRange>,
    hash: u64,
}

impl Engine {
    pub fn new(handle: Arc<EngineHandle>, rails: Vec<Rail>, clock: Arc<dyn Clock>) -> Self {
        let operations = handle.table.capacity();
        Self {
            clock,
            slot_links: rails.iter().map(|_| Default::default()).collect(),
            rails,
            active: (0..operations).map(|_| None).collect(),
            running: 0,
            links: Vec::new(),
            link_of: HashMap::new(),
            early: Early::default(),
            receives: Receives::default(),
            revoking: Vec::new(),
            draining: Vec::new(),
            untriggered: Vec::new(),
            completions: Completions::with_room(POLL_ROOM),
            next_deadline: Time::NEVER,
            next_look: Time::NEVER,
            time: None,
            parked: false,
            casualties: VecDeque::new(),
            spare: Vec::new(),
            ranges: Vec::new(),
            hash: 0,
            handle,
        }
    }

    /// One turn. Never blocks.
    pub fn step(&mut self) -> Progress {
        self.time = None;
        let mut events = self.take_commands();
        let posted = self.post();
        events += posted + self.turns_left() + self.reap();
        events += self.run_errands();
        let alarm = self.next_deadline.min(self.next_look);
        if alarm != Time::NEVER {
            let now = self.now();
            if now >= self.next_deadline {
                events += self.expire(now);
            }
            if now >= self.next_look {
                self.look_for_stalls(now);
            }
        }
        self.handle.hash.store(self.hash, Ordering::Relaxed);
        Progress { events, posted, outstanding: self.outstanding() }
    }

    /// Operations that have not ended, posted receives apart.
    pub fn outstanding(&self) -> usize {
        self.running + self.revoking.len() + self.draining.len()
    }

    /// How long a worker may sleep although nothing happens: to the next
    /// deadline, and briefly while a backend cannot wake it: an eighth of its idle time.
    pub fn nap(&self, can_be_woken: bool, idle: Duration) -> Option<Duration> {
        let longest = self.rails.iter().map(|rail| rail.domain.capabilities().idle_backoff).min();
        let backoff = longest.map(|it| (idle / 8).min(it * (self.rails.len() as u32 + 15) / 16));
        // Nothing tells when a peer leaves a region that is being revoked.
        let look_again = if can_be_woken && self.revoking.is_empty() { None } else { backoff };
        let due = self.due();
        let due = (due != Time::NEVER).then(|| due.since(self.clock.now()));
        look_again.into_iter().chain(self.trigger_nap(idle)).chain(due).min()
    }

    /// When something is due by itself: a deadline, a look for stalls, or something of a rail's.
    pub fn due(&self) -> Time {
        let rails = (0..self.rails.len()).map(|rail| self.due_on(rail));
        rails.fold(self.next_deadline.min(self.next_look), Time::min)
    }

    /// The rails' endpoints, to be armed before a sleep.
    pub fn rails_mut(&mut self) -> &mut [Rail] {
        &mut self.rails
    }

    pub fn handle(&self) -> &Arc<EngineHandle> {
        &self.handle
    }

    /// Ends everything with `Closed`: what is posted is aborted and awaited.
    pub fn close(&mut self) {
        let error = Error::new(ErrorKind::Closed, "close", "the fabric was closed");
        self.time = None;
        self.take_commands();
        for link in 0..self.links.len() {
            self.fail_link(link as u32, &error);
        }
        self.receives.close(&error, &mut self.rails, &self.handle);
        let limit = Instant::now() + CLOSE_LIMIT;
        while self.is_busy() && Instant::now() < limit {
            self.reap();
            self.take_commands();
        }
        for revoking in std::mem::take(&mut self.revoking) {
            self.handle.table.end(revoking.id, Err(error.clone()));
        }
        if self.is_busy() {
            tracing::warn!("closing with work outstanding: the endpoints go down with it");
        }
        // A closed endpoint touches nothing any more: what it held is let go now.
        self.rails.clear();
        for active in self.active.iter_mut().filter_map(Option::take) {
            active.leaves(self.handle.position);
            let id = active.id;
            drop(active);
            self.handle.table.end(id, Err(error.clone()));
        }
        self.running = 0;
        self.advance_drains();
        self.receives.end_all(&error, &self.handle);
        self.handle.close();
    }

    fn is_busy(&self) -> bool {
        self.running > 0 || self.receives.posted() > 0 || self.handle.has_commands()
    }

    /// The time in this turn: read once, and only if somebody asks.
    #[inline]
    fn now(&mut self) -> Time {
        *self.time.get_or_insert_with(|| self.clock.now())
    }

    /// The number of rail `rail` among those of all groups, as counters and people have it.
    #[inline]
    fn numbered(&self, rail: usize) -> u16 {
        (self.handle.first_rail + rail) as u16
    }

    /// Puts a record into the flight recorder.
    #[inline]
    fn record(&mut self, what: What) {
        if self.handle.recorder.is_off() {
            return;
        }
        let now = self.now();
        if std::mem::take(&mut self.parked) {
            self.handle.recorder.write(What::Woken.pack(now));
        }
        self.handle.recorder.write(what.pack(now));
    }

    /// The worker is about to sleep. Waking up for nothing leaves no record.
    pub fn parks(&mut self) {
        self.time = None;
        // Who wakes us does not say whose turn came.
        self.rails.iter_mut().for_each(|rail| rail.passed = 0);
        if !self.parked {
            self.record(What::Parked);
            self.parked = true;
        }
    }

    /// An operation is taken over.
    #[inline]
    fn begins(&mut self, op: OpId, kind: OperationKind, peer: u32, bytes: u64) {
        self.record(What::Begun { op, kind, peer, bytes });
    }

    /// An operation ended.
    #[inline]
    fn ends(&mut self, op: OpId, span: &tracing::Span, error: Option<&Error>) {
        self.record(What::Ended { op, error: error.map(Error::kind) });
        match error {
            Some(error) => tracing::debug!(parent: span, op = %op, %error, "ended"),
            None => tracing::trace!(parent: span, op = %op, "done"),
        }
    }

    /// Looks at an operation of now again at its deadline, and when it may have stalled.
    #[inline]
    fn watch_until(&mut self, now: Time, deadline: Time) {
        self.next_deadline = self.next_deadline.min(deadline);
        self.next_look = self.next_look.min(now.after(self.handle.watch.after));
    }

    /// Mixes what happened into the event hash: two runs of one seed agree on it.
    #[inline]
    fn note(&mut self, what: u64, which: u64) {
        // One round of splitmix64's finaliser over the running state.
        let mut z = self.hash ^ which.wrapping_add(what << 56).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.hash = z ^ (z >> 27);
    }
}
