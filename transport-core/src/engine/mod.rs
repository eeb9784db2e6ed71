//! The engine: one thread's turn of taking commands, posting and polling.
//!
//! A worker thread calls [`Engine::step`] in a loop; a caller-driven fabric calls
//! it from the user's thread. Nothing else may touch the endpoints.
//! Reading order: `handle` (what others see), `turn` (what happens when), `commands` (in),
//! `post` (out), `reap` (back), `end` (how operations end).

mod activate;
mod active;
pub(crate) mod alarms;
mod alone;
mod commands;
mod credit;
mod doubts;
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
mod turn;
mod unanswered;
mod window;
mod work;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use handle::{Control, EngineHandle, HandleSetup, Submission};
pub use rail::RailCounters;
pub(crate) use rail::{Rail, RailCounts};
pub(crate) use snapshot::Snapshot;
pub use turn::Progress;
pub(crate) use work::{Gate, Work};

use active::{Active, ActiveRail};
use doubts::Doubts;
use drain::Draining;
use early::Early;
use neighbour::LinkState;
use receive::Receives;
use revoke::Revoking;

use crate::observe::{OperationDump, OperationKind, What};
use crate::op::OpId;
use crate::plan::RailRange;
use crate::spi::{Completions, DeliveredScope};
use crate::{Clock, Error, ErrorKind, PeerId, Time};

/// Events taken per poll of an endpoint.
const POLL_ROOM: usize = 256;

/// How long closing waits for a backend to give back what is posted.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// Of that, how long it looks without a pause.
const CLOSE_SPIN: Duration = Duration::from_micros(100);

pub(crate) struct Engine {
    handle: Arc<EngineHandle>,
    clock: Arc<dyn Clock>,
    rails: Vec<Rail>,
    /// By op index.
    active: Vec<Option<Active>>,
    running: usize,
    /// Requests that were posted while commands were taken, and not counted yet.
    posted_alone: usize,
    links: Vec<Option<LinkState>>,
    link_of: HashMap<PeerId, u32>,
    /// Link by `[rail][slot]`.
    slot_links: Vec<Vec<Option<u32>>>,
    /// Events of peers whose `Link` command is still on its way.
    early: Early,
    /// Failures whose meaning is not known yet.
    doubts: Doubts,
    receives: Receives,
    revoking: Vec<Revoking>,
    draining: Vec<Draining>,
    /// Operations whose trigger was not due at the last look.
    untriggered: Vec<OpId>,
    completions: Completions,
    /// How many of these were acted on, and the rail they are of.
    acted: usize,
    acting_on: usize,
    /// No deadline of an operation under way is before this.
    next_deadline: Time,
    /// No operation under way stalls before this.
    next_look: Time,
    /// Nobody's alarm is before this.
    next_alarm: Time,
    /// The clock in this turn, once somebody has asked.
    time: Option<Time>,
    /// The last record says so.
    parked: bool,
    /// The last operations that a peer's end cut short.
    casualties: VecDeque<OperationDump>,
    /// Its devices deliver each for itself ([`DeliveredScope::Device`]), and operations may have several.
    needs_flushes: bool,
    /// Spare allocations of per-rail state.
    spare: Vec<Vec<ActiveRail>>,
    ranges: Vec<RailRange>,
    hash: u64,
}

impl Engine {
    pub fn new(handle: Arc<EngineHandle>, rails: Vec<Rail>, clock: Arc<dyn Clock>) -> Self {
        let operations = handle.table.capacity();
        let delivers_alone =
            |rail: &Rail| rail.domain.capabilities().delivered_scope == DeliveredScope::Device;
        let needs_flushes = rails.iter().any(delivers_alone);
        Self {
            clock,
            slot_links: rails.iter().map(|_| Default::default()).collect(),
            rails,
            active: (0..operations).map(|_| None).collect(),
            running: 0,
            posted_alone: 0,
            links: Vec::new(),
            link_of: HashMap::new(),
            early: Early::default(),
            doubts: Doubts::default(),
            receives: Receives::default(),
            revoking: Vec::new(),
            draining: Vec::new(),
            untriggered: Vec::new(),
            completions: Completions::with_room(POLL_ROOM),
            acted: 0,
            acting_on: 0,
            next_deadline: Time::NEVER,
            next_look: Time::NEVER,
            next_alarm: Time::NEVER,
            time: None,
            parked: false,
            casualties: VecDeque::new(),
            needs_flushes,
            spare: Vec::new(),
            ranges: Vec::new(),
            hash: 0,
            handle,
        }
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
        self.take_queued(false);
        for link in 0..self.links.len() {
            self.fail_link(link as u32, &error);
        }
        self.receives.close(&error, &mut self.rails, &self.handle);
        let limit = Instant::now() + CLOSE_LIMIT;
        let mut moved = Instant::now();
        while self.is_busy() && Instant::now() < limit {
            if self.reap() + self.take_queued(false) > 0 {
                moved = Instant::now();
            }
            // Nobody rings for the last of it: a nap as long as a worker's.
            let idle = moved.elapsed();
            if idle > CLOSE_SPIN {
                std::thread::sleep(idle / 8);
            }
        }
        self.close_revokes(&error);
        if self.is_busy() {
            tracing::warn!("closing with work outstanding: the endpoints go down with it");
        }
        // A closed endpoint touches nothing any more: what it held is let go now.
        self.rails.clear();
        for active in self.active.iter_mut().filter_map(Option::take) {
            active.leaves(self.handle.group);
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

    /// The number of rail `rail` among those of all groups, as counters and people have it.
    #[inline]
    fn numbered(&self, rail: usize) -> u16 {
        (self.handle.first_rail + rail) as u16
    }

    /// Puts a record into the flight recorder. Inlined, as the words of what is known where it stands
    /// are mostly constants.
    #[inline(always)]
    fn record(&mut self, what: What) {
        if self.handle.recorder.is_off() {
            return;
        }
        let now = self.now();
        if self.parked {
            self.woken(now);
        }
        self.handle.recorder.write(what.pack(now));
    }

    #[cold]
    fn woken(&mut self, now: Time) {
        self.parked = false;
        self.handle.recorder.write(What::Woken.pack(now));
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

    /// Mixes what happened into the event hash: two runs of one seed agree on it.
    #[inline]
    fn note(&mut self, what: u64, which: u64) {
        // One round of splitmix64's finaliser over the running state.
        let mut z = self.hash ^ which.wrapping_add(what << 56).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.hash = z ^ (z >> 27);
    }
}
