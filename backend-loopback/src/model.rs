//! A device at work behind a link model: what it takes, and when that arrives.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use multirail_spi::{Batch, PeerSlot, PostResult, Time, WorkRequest};

use crate::link::LinkModel;
use crate::status::status;

/// After so long a device that refused for no reason of its own is asked again.
const AGAIN: Duration = Duration::from_micros(1);

/// What becomes of a request that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Run,
    Fail,
    Lost,
}

/// A device at work.
pub(crate) struct Model {
    link: LinkModel,
    random: fastrand::Rng,
    /// By the moment they are due, then by their posting.
    pending: BinaryHeap<Reverse<Pending>>,
    posted: u64,
    due: VecDeque<WorkRequest>,
    /// When the line is free again.
    line: Time,
    /// No request of an ordered link is due before this.
    last: Time,
    judged: u64,
    loss: Loss,
    /// Nothing is taken before this; the first post after it is taken.
    blocked: Option<Time>,
    /// When to ask again after something was refused at random.
    again: Time,
}

struct Pending {
    due: Time,
    place: u64,
    request: WorkRequest,
}

impl Ord for Pending {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.place).cmp(&(other.due, other.place))
    }
}

impl PartialOrd for Pending {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pending {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pending {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    No,
    Unreported,
    Reported,
}

impl Model {
    /// The device `number` of a fabric that was given `seed`.
    pub(crate) fn new(link: LinkModel, seed: u64, number: u32) -> Self {
        // Devices of one fabric must not roll the same dice.
        let seed = seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self {
            link,
            random: fastrand::Rng::with_seed(seed),
            pending: BinaryHeap::new(),
            posted: 0,
            due: VecDeque::new(),
            line: Time::ZERO,
            last: Time::ZERO,
            judged: 0,
            loss: Loss::No,
            blocked: None,
            again: Time::NEVER,
        }
    }

    /// Takes what fits; `room` counts the requests of this endpoint not yet reported.
    pub(crate) fn accept(&mut self, batch: &Batch, now: Time, room: usize) -> PostResult {
        if self.is_lost() {
            let lost = status(multirail_spi::ErrorKind::DeviceLost);
            return PostResult { accepted: 0, error: Some(lost) };
        }
        let fits = batch.len().min(room.saturating_sub(self.pending.len() + self.due.len()));
        let accepted = self.some_of(fits, now);
        let again = self.blocked.map_or(now.after(AGAIN), |until| until.max(now.after(AGAIN)));
        self.again = if accepted < fits { again } else { Time::NEVER };
        for request in batch.requests().take(accepted) {
            let due = self.arrival(request.len, now);
            self.posted += 1;
            self.pending.push(Reverse(Pending { due, place: self.posted, request }));
        }
        PostResult { accepted, error: None }
    }

    /// The next request that is due and not to a peer that is `full`, and its fate.
    pub(crate) fn next(&mut self, now: Time, full: &[PeerSlot]) -> Option<(WorkRequest, Verdict)> {
        self.collect(now);
        if self.again <= now {
            self.again = Time::NEVER;
        }
        if self.is_lost() {
            let request =
                self.due.pop_front().or_else(|| self.pending.pop().map(|Reverse(next)| next.request))?;
            return Some((request, Verdict::Lost));
        }
        let able = if full.is_empty() {
            self.due.len()
        } else {
            self.due.iter().filter(|request| !full.contains(&request.peer)).count()
        };
        let turn = if self.link.reorder && able > 0 { self.random.usize(..able) } else { 0 };
        let at = if full.is_empty() {
            turn
        } else {
            (0..self.due.len()).filter(|at| !full.contains(&self.due[*at].peer)).nth(turn)?
        };
        let request = self.due.remove(at)?;
        if self.link.lose_device_after.is_some_and(|after| self.judged >= after) {
            self.loss = Loss::Unreported;
            return Some((request, Verdict::Lost));
        }
        self.judged += 1;
        let fails = self.link.fail_every.is_some_and(|every| self.judged.is_multiple_of(every.max(1)));
        Some((request, if fails { Verdict::Fail } else { Verdict::Run }))
    }

    /// The receiver was not ready: `request` comes first next time.
    pub(crate) fn put_back(&mut self, request: WorkRequest) {
        self.judged -= 1;
        self.due.push_front(request);
    }

    /// Forgets the requests to `peer`, naming each.
    pub(crate) fn abort(&mut self, peer: PeerSlot, mut each: impl FnMut(u64)) {
        self.due.retain(|request| request.peer != peer || (each(request.id), false).1);
        let (theirs, others): (Vec<_>, Vec<_>) =
            self.pending.drain().partition(|Reverse(next)| next.request.peer == peer);
        self.pending = others.into();
        let mut theirs: Vec<_> = theirs.into_iter().map(|Reverse(next)| next).collect();
        theirs.sort_unstable();
        theirs.iter().for_each(|next| each(next.request.id));
    }

    /// When the next request is due; nothing happens by itself before.
    pub(crate) fn next_due(&self) -> Time {
        match self.pending.peek() {
            _ if !self.due.is_empty() || self.loss == Loss::Unreported => Time::ZERO,
            Some(Reverse(next)) => next.due.min(self.again),
            None => self.again,
        }
    }

    /// Which of so many ends to report next.
    pub(crate) fn pick(&mut self, ends: usize) -> usize {
        if self.link.reorder && ends > 1 { self.random.usize(..ends) } else { 0 }
    }

    /// Whether the device is lost: it takes and moves nothing any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.loss != Loss::No
    }

    /// Whether the device was lost; true once.
    pub(crate) fn reports_loss(&mut self) -> bool {
        let news = self.loss == Loss::Unreported;
        if news {
            self.loss = Loss::Reported;
        }
        news
    }

    /// How many of the requests that fit are taken.
    fn some_of(&mut self, fits: usize, now: Time) -> usize {
        if self.blocked.is_some_and(|until| now < until) {
            return 0;
        }
        // Otherwise one in one would take nothing for ever.
        let just_over = self.blocked.take().is_some();
        if self.one_in(self.link.burst_one_in) && !just_over {
            self.blocked = Some(now.after(self.up_to(self.link.burst)));
            return 0;
        }
        let mut some = fits;
        if self.one_in(self.link.half_one_in) {
            // One of one is taken: half of it would be none, for ever.
            some = fits.div_ceil(2);
        }
        if let Some(most) = self.link.accept_at_most {
            let taken = if self.random.u8(..8) == 0 { 0 } else { self.random.u32(1..=most.max(1)) };
            some = some.min(taken as usize);
        }
        some
    }

    fn one_in(&mut self, chances: Option<u32>) -> bool {
        chances.is_some_and(|chances| self.random.u32(..chances.max(1)) == 0)
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        Duration::from_nanos(self.random.u64(..=u64::try_from(most.as_nanos()).unwrap_or(u64::MAX)))
    }

    fn arrival(&mut self, len: u64, now: Time) -> Time {
        self.line = self.line.max(now).after(self.link.occupancy(len));
        let jitter = self.up_to(self.link.jitter);
        let mut due = self.line.max(now).after(self.link.latency).after(jitter);
        if !self.link.reorder {
            due = due.max(self.last);
            self.last = due;
        }
        due
    }

    fn collect(&mut self, now: Time) {
        while self.pending.peek().is_some_and(|Reverse(next)| next.due <= now) {
            self.due.extend(self.pending.pop().map(|Reverse(next)| next.request));
        }
    }
}
