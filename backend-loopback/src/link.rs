//! The link model: a device that is slow, unordered, small or doomed, from one seed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use transport_core::Time;
use transport_core::spi::{Batch, PeerSlot, PostResult, WorkRequest};

use crate::status::status;

/// How an impersonated device behaves. The default is a perfect one that works in `poll`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkModel {
    /// Requests that may be outstanding; `None` takes loopback's own limit.
    pub send_depth: Option<u32>,
    /// Each post takes a random number of requests up to this one, sometimes none.
    pub accept_at_most: Option<u32>,
    /// Requests that are due run in random order.
    pub reorder: bool,
    /// Time from posting to arrival, at least.
    pub latency: Duration,
    /// Random time on top, up to this.
    pub jitter: Duration,
    /// Payload bits per second; requests queue for the line.
    pub bits_per_s: Option<u64>,
    /// Requests per second, whatever their size; more queue for the device.
    pub ops_per_s: Option<u64>,
    /// Arrivals that the completion queue holds until they are polled. Loopback states it
    /// and loses none; null devices behind a [`Switch`](crate::Switch) lose what is too much.
    pub cq_depth: Option<u32>,
    /// The device is lost once so many requests have run.
    pub lose_device_after: Option<u64>,
    /// Every so many-th request fails and moves no byte.
    pub fail_every: Option<u64>,
}

impl LinkModel {
    /// One EFA card of a p5.48xlarge: 97.433 Gbps of payload (Perplexity's published
    /// figure of one card), 0.81 million requests a second (`fi_rma_bw` on a p5, 1.24 µs
    /// each), a send queue of 4096 and a receive queue of 8192 (`fi_info` there), delivery out of
    /// order (SRD). The
    /// latency of 15 µs one way is a round figure for EFA, not measured by this project.
    pub fn p5() -> Self {
        Self {
            send_depth: Some(4096),
            reorder: true,
            latency: Duration::from_micros(15),
            jitter: Duration::from_micros(2),
            bits_per_s: Some(97_433_000_000),
            ops_per_s: Some(810_000),
            cq_depth: Some(8192),
            ..Self::default()
        }
    }

    /// How long one request of `len` bytes keeps the device busy.
    fn occupancy(&self, len: u64) -> Duration {
        let device = self.ops_per_s.map_or(0, |rate| per_second(1, rate));
        self.line_time(len).max(Duration::from_nanos(device))
    }

    /// How long `len` bytes take on the line.
    pub(crate) fn line_time(&self, len: u64) -> Duration {
        Duration::from_nanos(self.bits_per_s.map_or(0, |rate| per_second(u128::from(len) * 8, rate)))
    }

    /// From posting a small request on an idle line to its completion, at most.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latency + self.jitter
    }
}

/// Nanoseconds that `amount` takes at `rate` a second.
fn per_second(amount: u128, rate: u64) -> u64 {
    u64::try_from(amount * 1_000_000_000 / u128::from(rate.max(1))).unwrap_or(u64::MAX)
}

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
        }
    }

    /// Takes what fits; `room` counts the requests of this endpoint not yet reported.
    pub(crate) fn accept(&mut self, batch: &Batch, now: Time, room: usize) -> PostResult {
        if self.is_lost() {
            let lost = status(transport_core::ErrorKind::DeviceLost);
            return PostResult { accepted: 0, error: Some(lost) };
        }
        let mut accepted = batch.len().min(room.saturating_sub(self.pending.len() + self.due.len()));
        if let Some(most) = self.link.accept_at_most {
            let some = if self.random.u8(..8) == 0 { 0 } else { self.random.u32(1..=most.max(1)) };
            accepted = accepted.min(some as usize);
        }
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
            Some(Reverse(next)) => next.due,
            None => Time::NEVER,
        }
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

    fn arrival(&mut self, len: u64, now: Time) -> Time {
        self.line = self.line.max(now).after(self.link.occupancy(len));
        let jitter = u64::try_from(self.link.jitter.as_nanos()).unwrap_or(u64::MAX);
        let jitter = Duration::from_nanos(self.random.u64(..=jitter));
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
