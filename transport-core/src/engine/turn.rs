//! One turn of an engine, and when the next one is due.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Engine;
use crate::Time;

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

impl Engine {
    /// One turn. Never blocks.
    pub fn step(&mut self) -> Progress {
        self.time = None;
        let mut events = self.take_commands();
        let (posted, turns_left) = self.post();
        events += posted + turns_left + self.reap();
        let has_errands = self.has_errands();
        if has_errands {
            events += self.run_errands();
        }
        // With nothing under way, the clock is not even read.
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
        // Commands alone add errands, and those were taken before.
        let outstanding = if has_errands { self.outstanding() } else { self.running };
        Progress { events, posted, outstanding }
    }

    /// Operations that have not ended, posted receives apart.
    pub fn outstanding(&self) -> usize {
        self.running + self.awaited_revokes() + self.draining.len()
    }

    /// How long a worker may sleep although nothing happens: to the next
    /// deadline, and briefly while a backend cannot wake it: an eighth of its idle time.
    pub fn nap(&self, can_be_woken: bool, idle: Duration) -> Option<Duration> {
        let longest = self.rails.iter().map(|rail| rail.domain.capabilities().idle_backoff).min();
        let backoff = longest.map(|it| (idle / 8).min(it * (self.rails.len() as u32 + 15) / 16));
        // Nothing tells when a peer leaves a region that is being revoked. A region that nobody waits for is only used
        // by this side: the last use's end wakes the worker.
        let look_again = if can_be_woken && self.awaited_revokes() == 0 { None } else { backoff };
        let due = self.due();
        let due = (due != Time::NEVER).then(|| due.since(self.clock.now()));
        look_again.into_iter().chain(self.trigger_nap(idle)).chain(due).min()
    }

    /// When something is due by itself: a deadline, a look for stalls, or something of a rail's.
    pub fn due(&self) -> Time {
        let rails = (0..self.rails.len()).map(|rail| self.due_on(rail));
        rails.fold(self.next_deadline.min(self.next_look), Time::min)
    }

    /// Looks at an operation of now again at its deadline, and when it may have stalled.
    #[inline]
    pub(super) fn watch_until(&mut self, now: Time, deadline: Time) {
        self.next_deadline = self.next_deadline.min(deadline);
        self.next_look = self.next_look.min(now.after(self.handle.watch.after));
    }

    /// Nothing of any operation is left: what was due for them is not, any more.
    #[inline]
    pub(super) fn watches_nothing(&mut self) {
        if self.awaited_revokes() == 0 && self.draining.is_empty() {
            (self.next_deadline, self.next_look) = (self.next_alarm, Time::NEVER);
        }
    }

    /// The time in this turn: read once, and only if somebody asks.
    #[inline]
    pub(super) fn now(&mut self) -> Time {
        *self.time.get_or_insert_with(|| self.clock.now())
    }
}
