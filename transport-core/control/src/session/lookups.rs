//! Lookups: requests for the descriptor that the peer publishes under a name.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::frame::{Frame, printable};
use multirail_spi::{Error, ErrorKind, Result};

/// The most lookups that wait for the peer's answer at once; further lookups wait in a queue.
pub(crate) const MAX_OUTSTANDING: usize = 64;

/// Receives the answer to a lookup by name.
pub(crate) type AnswerSender = oneshot::Sender<Result<Vec<u8>>>;

/// A value that the session drops when a probe is over: the peer has answered, or the session has ended.
pub type ProbeGuard = Box<dyn Any + Send>;

/// The requester of a lookup.
pub(crate) enum Requester {
    /// A caller that waits for the descriptor.
    Caller(AnswerSender),
    /// A probe: any answer shows that the peer is alive.
    Probe(ProbeGuard),
}

impl Requester {
    fn is_cancelled(&self) -> bool {
        match self {
            Self::Caller(answer) => answer.is_closed(),
            Self::Probe(_) => false,
        }
    }

    fn complete(self, outcome: Result<Vec<u8>>) {
        match self {
            Self::Caller(answer) => drop(answer.send(outcome)),
            Self::Probe(guard) => drop(guard),
        }
    }
}

/// The lookups of one session.
pub(crate) struct Lookups {
    limit: Duration,
    next_id: u64,
    outstanding: HashMap<u64, Lookup>,
    queue: VecDeque<Lookup>,
}

struct Lookup {
    name: String,
    /// `None` if the deadline is beyond the range of `Instant`.
    deadline: Option<Instant>,
    /// `None` once the lookup has ended for its requester. A lookup that was sent stays in `outstanding`
    /// until the peer answers, so that the peer never has more than `MAX_OUTSTANDING` lookups to answer.
    requester: Option<Requester>,
}

impl Lookups {
    /// Each lookup ends within about `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, next_id: 0, outstanding: HashMap::new(), queue: VecDeque::new() }
    }

    /// Queues a lookup.
    pub fn add(&mut self, name: String, requester: Requester, now: Instant) {
        self.queue.push_back(Lookup {
            name,
            deadline: now.checked_add(self.limit),
            requester: Some(requester),
        });
    }

    /// The next lookup to send; `None` if the queue is empty or too many lookups are outstanding.
    pub fn next_request(&mut self) -> Option<Frame> {
        while self.outstanding.len() < MAX_OUTSTANDING {
            let lookup = self.queue.pop_front()?;
            if lookup.requester.as_ref().is_none_or(Requester::is_cancelled) {
                continue;
            }
            let (id, name) = (self.next_id, lookup.name.clone());
            self.next_id += 1;
            self.outstanding.insert(id, lookup);
            return Some(Frame::Lookup { id, name });
        }
        None
    }

    /// Completes the lookup `id` with the peer's answer. Returns an error if no such lookup is outstanding.
    pub fn found(&mut self, id: u64, descriptor: Option<Vec<u8>>) -> Result<()> {
        let Some(lookup) = self.outstanding.remove(&id) else {
            let why = format!("the peer answered lookup {id}, which is not outstanding");
            return Err(Error::new(ErrorKind::Protocol, "control", why));
        };
        let missing = || {
            let why = format!(
                "the peer publishes no region {:?}: publish it there first, or check the name",
                printable(&lookup.name)
            );
            Error::new(ErrorKind::NotFound, "region", why)
        };
        if let Some(requester) = lookup.requester {
            requester.complete(descriptor.ok_or_else(missing));
        }
        Ok(())
    }

    /// Ends the lookups whose deadline has passed.
    pub fn expire(&mut self, now: Instant) {
        let limit = self.limit.as_secs_f64();
        let is_late = |lookup: &&mut Lookup| lookup.deadline.is_some_and(|deadline| deadline <= now);
        for lookup in self.outstanding.values_mut().chain(&mut self.queue).filter(is_late) {
            if let Some(requester) = lookup.requester.take() {
                let why = format!(
                    "the peer did not answer about region {:?} within {limit:.1} s; try again",
                    lookup.name
                );
                requester.complete(Err(Error::new(ErrorKind::DeadlineExceeded, "region", why)));
            }
        }
        // Expired lookups that were not sent are removed: the peer will not answer them.
        self.queue.retain(|lookup| lookup.requester.is_some());
    }

    /// The earliest deadline of a lookup.
    pub fn next_deadline(&self) -> Option<Instant> {
        let open = |lookup: &&Lookup| lookup.requester.is_some();
        self.outstanding.values().chain(&self.queue).filter(open).filter_map(|lookup| lookup.deadline).min()
    }

    /// Ends all lookups with `error`.
    pub fn fail(&mut self, error: &Error) {
        let outstanding = self.outstanding.drain().map(|(_, lookup)| lookup);
        for requester in outstanding.chain(self.queue.drain(..)).filter_map(|lookup| lookup.requester) {
            requester.complete(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_64_lookups_are_outstanding_and_the_rest_follow() {
        let (mut lookups, now) = (Lookups::new(Duration::from_secs(5)), Instant::now());
        let mut answers = Vec::new();
        for i in 0..70 {
            let (answer, outcome) = oneshot::channel();
            lookups.add(format!("region {i}"), Requester::Caller(answer), now);
            answers.push(outcome);
        }
        // A lookup whose caller stopped waiting is not sent.
        drop(answers.remove(66));
        let outstanding = std::iter::from_fn(|| lookups.next_request()).count();
        assert_eq!(outstanding, MAX_OUTSTANDING);
        lookups.found(0, Some(vec![7])).unwrap();
        lookups.found(1, None).unwrap();
        assert_eq!(answers[0].try_recv().unwrap().unwrap(), [7]);
        let error = answers[1].try_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.context().contains("\"region 1\""), "{error}");
        assert_eq!(std::iter::from_fn(|| lookups.next_request()).count(), 2);
        assert_eq!(lookups.found(1, None).unwrap_err().kind(), ErrorKind::Protocol);
        // If the peer answers no more, expired lookups do not pile up in the queue.
        assert_eq!(lookups.queue.len(), 4);
        lookups.expire(now + Duration::from_secs(5));
        assert_eq!((lookups.queue.len(), lookups.outstanding.len()), (0, MAX_OUTSTANDING));
        assert_eq!(answers[68].try_recv().unwrap().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    }

    #[test]
    fn every_lookup_ends() {
        let (mut lookups, now) = (Lookups::new(Duration::from_secs(5)), Instant::now());
        let (answer, mut late) = oneshot::channel();
        lookups.add("late".into(), Requester::Caller(answer), now);
        assert!(lookups.next_request().is_some());
        assert_eq!(lookups.next_deadline(), Some(now + Duration::from_secs(5)));
        lookups.expire(now + Duration::from_secs(5));
        assert_eq!(late.try_recv().unwrap().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        assert_eq!(lookups.next_deadline(), None);
        // A late answer is not a protocol violation.
        lookups.found(0, None).unwrap();
        let (answer, mut failed) = oneshot::channel();
        lookups.add("failed".into(), Requester::Caller(answer), now);
        lookups.fail(&Error::new(ErrorKind::PeerDied, "control", ""));
        assert_eq!(failed.try_recv().unwrap().unwrap_err().kind(), ErrorKind::PeerDied);
    }
}
