//! What has ended and waits to be polled: events in order, neighbours joined.

use std::collections::VecDeque;

use multirail_spi::{Event, Status};

/// Events that may change places: enough for any order to come up, and bounded work per event.
const CHOICES: usize = 64;

/// Filed events. Requests done one after the other share an event.
#[derive(Default)]
pub(crate) struct Ended {
    events: VecDeque<Event>,
    /// The run of ids that the next one done may join; after all `events`.
    first: u64,
    count: u32,
    /// Requests in `events`; the run's come on top.
    requests: usize,
}

impl Ended {
    /// `count` requests from `id` on are done.
    #[inline]
    pub(crate) fn done(&mut self, id: u64, count: u32) {
        if count > 0 && id != self.first.wrapping_add(u64::from(self.count)) {
            self.close_run();
            self.first = id;
        }
        self.count += count;
    }

    /// A request ended with `outcome`.
    pub(crate) fn request(&mut self, id: u64, outcome: Result<(), Status>) {
        match outcome {
            Ok(()) => self.done(id, 1),
            Err(status) => {
                self.event(Event::Failed { id, status });
                self.requests += 1;
            }
        }
    }

    /// Anything that is not the end of a request.
    pub(crate) fn event(&mut self, event: Event) {
        self.close_run();
        self.events.push_back(event);
    }

    /// The oldest event.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            self.close_run();
        }
        let event = self.events.pop_front()?;
        self.uncount(event);
        Some(event)
    }

    /// The event that `pick` says, of so many that may change places: ends of requests do,
    /// but none overtakes the end of a peer or device, nor is overtaken by it.
    pub(crate) fn pop_one_of(&mut self, pick: impl FnOnce(usize) -> usize) -> Option<Event> {
        if self.events.is_empty() {
            self.close_run();
        }
        let ends = |event: &&Event| matches!(event, Event::Done { .. } | Event::Failed { .. });
        let event = self.events.remove(pick(self.events.iter().take(CHOICES).take_while(ends).count()))?;
        self.uncount(event);
        Some(event)
    }

    /// Requests that have ended and were not polled.
    pub(crate) fn requests(&self) -> usize {
        self.requests + self.count as usize
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.count == 0
    }

    #[inline]
    fn uncount(&mut self, event: Event) {
        self.requests -= match event {
            Event::Done { count, .. } => count as usize,
            Event::Failed { .. } => 1,
            _ => 0,
        };
    }

    #[cold]
    fn close_run(&mut self) {
        if self.count > 0 {
            self.events.push_back(Event::Done { first: self.first, count: self.count });
            self.requests += self.count as usize;
            self.count = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::ErrorKind;

    use super::*;
    use crate::status::status;

    #[test]
    fn neighbours_join_and_order_stays() {
        let mut ended = Ended::default();
        [7, 8, 9, 20, u64::MAX, 0].into_iter().for_each(|id| ended.done(id, 1));
        ended.request(1, Err(status(ErrorKind::Io)));
        ended.done(2, 1);
        assert_eq!(ended.requests(), 8);
        let done = |first, count| Event::Done { first, count };
        let failed = Event::Failed { id: 1, status: status(ErrorKind::Io) };
        let expected = [done(7, 3), done(20, 1), done(u64::MAX, 2), failed, done(2, 1)];
        assert_eq!(std::iter::from_fn(|| ended.pop()).collect::<Vec<_>>(), expected);
        assert!(ended.is_empty() && ended.requests() == 0);
        ended.done(3, 1);
        assert_eq!(ended.pop(), Some(done(3, 1)));
    }

    #[test]
    fn ends_change_places_among_themselves() {
        let mut ended = Ended::default();
        let last = |choices: usize| choices.saturating_sub(1);
        [7, 9, 11].into_iter().for_each(|id| ended.done(id, 1));
        let gone = Event::PeerGone { peer: multirail_spi::PeerSlot(1) };
        ended.event(gone);
        ended.done(20, 1);
        let order: Vec<_> = std::iter::from_fn(|| ended.pop_one_of(last)).collect();
        let done = |first| Event::Done { first, count: 1 };
        assert_eq!(order, [done(11), done(9), done(7), gone, done(20)]);
    }
}
