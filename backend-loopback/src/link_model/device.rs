//! A device with a link model: which requests it accepts, and when they arrive.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use multirail_spi::{Batch, PeerSlot, PostResult, Time, WorkRequest};

use super::LinkModel;
use crate::status::status;

/// The least time after which the engine posts again, when the device has refused at random.
const RETRY_AFTER: Duration = Duration::from_micros(1);

/// What the endpoint does with a request that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DueAction {
    Run,
    Fail,
    /// The path to the peer is broken.
    PathBroken,
    DeviceLost,
}

/// The state of a modelled device.
pub(crate) struct DeviceModel {
    link: LinkModel,
    random: fastrand::Rng,
    /// Requests that are not due, by the time when they are due, then by the order of posting.
    pending: BinaryHeap<Reverse<PendingRequest>>,
    posted: u64,
    due: VecDeque<WorkRequest>,
    /// Requests that are due, and whose path is broken.
    held: Vec<HeldRequest>,
    /// The time from which on the line is free.
    line: Time,
    /// No request of an ordered link is due before this.
    last: Time,
    /// Requests that were run or failed.
    processed: u64,
    loss: Loss,
    /// The device accepts nothing before this time. It accepts the first post after it.
    blocked: Option<Time>,
    /// The time when the engine should post again, after the device has refused at random.
    retry_at: Time,
}

struct PendingRequest {
    due: Time,
    sequence: u64,
    request: WorkRequest,
}

/// A request over a broken path.
struct HeldRequest {
    request: WorkRequest,
    /// When the path works again.
    until: Time,
    /// When the device reports that the request has failed.
    fails_at: Time,
}

impl Ord for PendingRequest {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.sequence).cmp(&(other.due, other.sequence))
    }
}

impl PartialOrd for PendingRequest {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PendingRequest {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for PendingRequest {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    No,
    Unreported,
    Reported,
}

impl DeviceModel {
    /// Device `number` of a fabric with that seed.
    pub(crate) fn new(link: LinkModel, seed: u64, number: u32) -> Self {
        // Each device of a fabric needs random numbers of its own.
        let seed = seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self {
            link: link.of_device(number),
            random: fastrand::Rng::with_seed(seed),
            pending: BinaryHeap::new(),
            posted: 0,
            due: VecDeque::new(),
            held: Vec::new(),
            line: Time::ZERO,
            last: Time::ZERO,
            processed: 0,
            loss: Loss::No,
            blocked: None,
            retry_at: Time::NEVER,
        }
    }

    /// Accepts the requests that fit. `room` is the endpoint's depth less its requests that are completed and not
    /// polled.
    pub(crate) fn accept(&mut self, batch: &Batch, now: Time, room: usize) -> PostResult {
        if self.is_lost() {
            let lost = status(multirail_spi::ErrorKind::DeviceLost);
            return PostResult { accepted: 0, error: Some(lost) };
        }
        let fits =
            batch.len().min(room.saturating_sub(self.pending.len() + self.due.len() + self.held.len()));
        let accepted = self.number_accepted(fits, now);
        let retry_at = self.blocked.map_or(now.after(RETRY_AFTER), |until| until.max(now.after(RETRY_AFTER)));
        self.retry_at = if accepted < fits { retry_at } else { Time::NEVER };
        for request in batch.requests().take(accepted) {
            let due = self.arrival(request.len, now);
            self.posted += 1;
            self.pending.push(Reverse(PendingRequest { due, sequence: self.posted, request }));
        }
        PostResult { accepted, error: None }
    }

    /// Takes the next request that is due, and says what to do with it. Skips peers whose message rings are `full`.
    pub(crate) fn next(&mut self, now: Time, full: &[PeerSlot]) -> Option<(WorkRequest, DueAction)> {
        self.collect(now);
        if self.retry_at <= now {
            self.retry_at = Time::NEVER;
        }
        if self.is_lost() {
            let next = self.due.pop_front().or_else(|| self.held.pop().map(|held| held.request));
            let request = next.or_else(|| self.pending.pop().map(|Reverse(next)| next.request))?;
            return Some((request, DueAction::DeviceLost));
        }
        if let Some(failed) = self.held.iter().position(|held| held.fails_at <= now) {
            return Some((self.held.remove(failed).request, DueAction::PathBroken));
        }
        let able = if full.is_empty() {
            self.due.len()
        } else {
            self.due.iter().filter(|request| !full.contains(&request.peer)).count()
        };
        let chosen = if self.link.reorder && able > 0 { self.random.usize(..able) } else { 0 };
        let at = if full.is_empty() {
            chosen
        } else {
            (0..self.due.len()).filter(|at| !full.contains(&self.due[*at].peer)).nth(chosen)?
        };
        let request = self.due.remove(at)?;
        if self.link.lose_device_after.is_some_and(|after| self.processed >= after) {
            self.loss = Loss::Unreported;
            return Some((request, DueAction::DeviceLost));
        }
        self.processed += 1;
        let fails = self.link.fail_every.is_some_and(|every| self.processed.is_multiple_of(every.max(1)));
        Some((request, if fails { DueAction::Fail } else { DueAction::Run }))
    }

    /// Puts back a request for which the peer had no room. It is the first of the requests that are due.
    pub(crate) fn put_back(&mut self, request: WorkRequest) {
        self.processed -= 1;
        self.due.push_front(request);
    }

    /// Drops the requests to `peer`, and calls `each` with them.
    pub(crate) fn abort(&mut self, peer: PeerSlot, mut each: impl FnMut(&WorkRequest)) {
        self.due.retain(|request| request.peer != peer || (each(request), false).1);
        self.held.retain(|held| held.request.peer != peer || (each(&held.request), false).1);
        let (of_peer, others): (Vec<_>, Vec<_>) =
            self.pending.drain().partition(|Reverse(next)| next.request.peer == peer);
        self.pending = others.into();
        let mut of_peer: Vec<_> = of_peer.into_iter().map(|Reverse(next)| next).collect();
        of_peer.sort_unstable();
        of_peer.iter().for_each(|next| each(&next.request));
    }

    /// Whether the path to a peer is broken.
    pub(crate) fn is_path_broken(&self, peer: PeerSlot, now: Time) -> bool {
        self.link.broken_until(peer, now).is_some()
    }

    /// The time when the next request is due. The endpoint has nothing to do before.
    pub(crate) fn next_due(&self) -> Time {
        match self.pending.peek() {
            _ if !self.due.is_empty() || self.loss == Loss::Unreported => Time::ZERO,
            next => {
                let due = next.map_or(Time::NEVER, |Reverse(next)| next.due);
                let held = self.held.iter().map(|held| held.until.min(held.fails_at));
                held.fold(due.min(self.retry_at).min(self.lost_at()), Time::min)
            }
        }
    }

    /// When the device will be lost, as far as that is a matter of time.
    fn lost_at(&self) -> Time {
        let times = self.link.lose_devices_at.iter().map(|(_, at)| *at);
        if self.is_lost() { Time::NEVER } else { times.fold(Time::NEVER, Time::min) }
    }

    /// A random time within [`LinkModel::late_after`] from `now` on, or from the time on when the path to the peer works
    /// again. `None` if nothing arrives late.
    pub(crate) fn late_arrival(&mut self, peer: PeerSlot, now: Time) -> Option<Time> {
        let late_after = self.link.late_after;
        if late_after.is_zero() {
            return None;
        }
        let from = match self.link.broken_until(peer, now) {
            Some(until) if self.random.bool() => until,
            _ => now,
        };
        Some(from.after(self.up_to(late_after)))
    }

    /// Chooses which of `count` completions the endpoint reports next.
    pub(crate) fn pick(&mut self, count: usize) -> usize {
        if self.link.reorder && count > 1 { self.random.usize(..count) } else { 0 }
    }

    /// Returns true if the device is lost: it accepts no request and moves no byte any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.loss != Loss::No
    }

    /// Returns true once, after the device was lost.
    pub(crate) fn reports_loss(&mut self) -> bool {
        let is_new = self.loss == Loss::Unreported;
        if is_new {
            self.loss = Loss::Reported;
        }
        is_new
    }

    /// The number of requests that the device accepts of those that fit.
    fn number_accepted(&mut self, fits: usize, now: Time) -> usize {
        if self.blocked.is_some_and(|until| now < until) {
            return 0;
        }
        // The post after a burst is accepted. Otherwise a model with a burst at every post would never accept one.
        let burst_is_over = self.blocked.take().is_some();
        if self.one_in(self.link.burst_one_in) && !burst_is_over {
            self.blocked = Some(now.after(self.up_to(self.link.burst)));
            return 0;
        }
        let mut accepted = fits;
        if self.one_in(self.link.half_one_in) {
            // Rounded up: half of one request would be none, at every post.
            accepted = fits.div_ceil(2);
        }
        if let Some(most) = self.link.accept_at_most {
            let limit = if self.random.u8(..8) == 0 { 0 } else { self.random.u32(1..=most.max(1)) };
            accepted = accepted.min(limit as usize);
        }
        accepted
    }

    fn one_in(&mut self, count: Option<u32>) -> bool {
        count.is_some_and(|count| self.random.u32(..count.max(1)) == 0)
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
        if self.lost_at() <= now {
            self.loss = Loss::Unreported;
        }
        while let Some(Reverse(next)) = self.pending.peek().filter(|Reverse(next)| next.due <= now) {
            let (request, due) = (next.request, next.due);
            self.pending.pop();
            match self.link.broken_until(request.peer, now) {
                None => self.due.push_back(request),
                Some(until) => {
                    let fails_at = self.link.path_errors_after.map_or(Time::NEVER, |after| due.after(after));
                    self.held.push(HeldRequest { request, until, fails_at });
                }
            }
        }
        let works_again = self.held.extract_if(.., |held| held.until <= now && held.fails_at > now);
        self.due.extend(works_again.map(|held| held.request));
    }
}
