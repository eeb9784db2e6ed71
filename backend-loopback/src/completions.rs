//! The completions and other events of an endpoint that wait to be polled.

use std::collections::VecDeque;

use multirail_spi::{Event, Status};

/// Completions that a link model may reorder: enough for any order to occur, with bounded work per event.
const REORDER_WINDOW: usize = 64;

/// Events in order. Requests with consecutive ids that are done one after the other share an event.
#[derive(Default)]
pub(crate) struct CompletionQueue {
    events: VecDeque<Event>,
    /// The run of ids that the next request done may join. It comes after all `events`.
    first: u64,
    count: u32,
    /// Requests in `events`. Those of the run are not among them.
    requests: usize,
}

impl CompletionQueue {
    /// Adds that `count` requests from `id` on are done.
    #[inline]
    pub(crate) fn done(&mut self, id: u64, count: u32) {
        if count > 0 && id != self.first.wrapping_add(u64::from(self.count)) {
            self.close_run();
            self.first = id;
        }
        self.count += count;
    }

    /// Adds the outcome of a request.
    pub(crate) fn request(&mut self, id: u64, outcome: Result<(), Status>) {
        match outcome {
            Ok(()) => self.done(id, 1),
            Err(status) => {
                self.event(Event::Failed { id, status });
                self.requests += 1;
            }
        }
    }

    /// Adds an event that is not the completion of a request.
    pub(crate) fn event(&mut self, event: Event) {
        self.close_run();
        self.events.push_back(event);
    }

    /// Takes the oldest event.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            self.close_run();
        }
        let event = self.events.pop_front()?;
        self.uncount(event);
        Some(event)
    }

    /// Takes the event that `pick` chooses. `pick` gets the number of events that may be reordered: completions of
    /// requests change places with each other, but not with the end of a peer or device.
    pub(crate) fn pop_one_of(&mut self, pick: impl FnOnce(usize) -> usize) -> Option<Event> {
        if self.events.is_empty() {
            self.close_run();
        }
        let is_completion = |event: &&Event| matches!(event, Event::Done { .. } | Event::Failed { .. });
        let event = self
            .events
            .remove(pick(self.events.iter().take(REORDER_WINDOW).take_while(is_completion).count()))?;
        self.uncount(event);
        Some(event)
    }

    /// Requests that are completed and not polled.
    pub(crate) fn requests(&self) -> usize {
        self.requests + self.count as usize
    }

    /// Returns true if no event waits.
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
    fn consecutive_ids_share_an_event_in_order() {
        let mut completions = CompletionQueue::default();
        [7, 8, 9, 20, u64::MAX, 0].into_iter().for_each(|id| completions.done(id, 1));
        completions.request(1, Err(status(ErrorKind::Io)));
        completions.done(2, 1);
        assert_eq!(completions.requests(), 8);
        let done = |first, count| Event::Done { first, count };
        let failed = Event::Failed { id: 1, status: status(ErrorKind::Io) };
        let expected = [done(7, 3), done(20, 1), done(u64::MAX, 2), failed, done(2, 1)];
        assert_eq!(std::iter::from_fn(|| completions.pop()).collect::<Vec<_>>(), expected);
        assert!(completions.is_empty() && completions.requests() == 0);
        completions.done(3, 1);
        assert_eq!(completions.pop(), Some(done(3, 1)));
    }

    #[test]
    fn completions_change_places_among_themselves() {
        let mut completions = CompletionQueue::default();
        let last = |choices: usize| choices.saturating_sub(1);
        [7, 9, 11].into_iter().for_each(|id| completions.done(id, 1));
        let gone = Event::PeerGone { peer: multirail_spi::PeerSlot(1) };
        completions.event(gone);
        completions.done(20, 1);
        let order: Vec<_> = std::iter::from_fn(|| completions.pop_one_of(last)).collect();
        let done = |first| Event::Done { first, count: 1 };
        assert_eq!(order, [done(11), done(9), done(7), gone, done(20)]);
    }
}
