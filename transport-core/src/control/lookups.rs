//! Questions to the peer: which descriptor is published under a name?

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::frame::{Frame, printable};
use crate::engine::PeerProbe;
use crate::{Error, ErrorKind, Result};

/// Lookups that may wait for the peer's answer at once; others wait for their turn.
pub(crate) const OUTSTANDING: usize = 64;

/// Where the answer goes.
pub(crate) type Answer = oneshot::Sender<Result<Vec<u8>>>;

/// Who asks.
pub(crate) enum Asker {
    /// Somebody who wants the descriptor of that name.
    Name(Answer),
    /// An engine that wants any answer.
    Life(PeerProbe),
}

impl Asker {
    fn has_left(&self) -> bool {
        match self {
            Self::Name(answer) => answer.is_closed(),
            Self::Life(_) => false,
        }
    }

    fn tell(self, outcome: Result<Vec<u8>>) {
        match self {
            Self::Name(answer) => drop(answer.send(outcome)),
            // It says by itself that it is over.
            Self::Life(question) => drop(question),
        }
    }
}

/// The lookups of one session.
pub(crate) struct Lookups {
    limit: Duration,
    next_id: u64,
    asked: HashMap<u64, Lookup>,
    queue: VecDeque<Lookup>,
}

struct Lookup {
    name: String,
    /// `None` where the limit ends beyond all clocks.
    deadline: Option<Instant>,
    /// `None` once it has ended; an asked lookup keeps its place until the peer
    /// answers, so that the peer never holds more than it agreed to.
    asker: Option<Asker>,
}

impl Lookups {
    /// Each lookup ends within about `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, next_id: 0, asked: HashMap::new(), queue: VecDeque::new() }
    }

    /// A new question.
    pub fn add(&mut self, name: String, asker: Asker, now: Instant) {
        self.queue.push_back(Lookup { name, deadline: now.checked_add(self.limit), asker: Some(asker) });
    }

    /// The next question to send, if the peer has room for it.
    pub fn next_question(&mut self) -> Option<Frame> {
        while self.asked.len() < OUTSTANDING {
            let lookup = self.queue.pop_front()?;
            if lookup.asker.as_ref().is_none_or(Asker::has_left) {
                continue;
            }
            let (id, name) = (self.next_id, lookup.name.clone());
            self.next_id += 1;
            self.asked.insert(id, lookup);
            return Some(Frame::Lookup { id, name });
        }
        None
    }

    /// The peer answered; an error if it was not asked.
    pub fn found(&mut self, id: u64, descriptor: Option<Vec<u8>>) -> Result<()> {
        let Some(lookup) = self.asked.remove(&id) else {
            let why = format!("an answer to lookup {id}, which was not asked");
            return Err(Error::new(ErrorKind::Protocol, "control", why));
        };
        let missing = || {
            let why = format!(
                "the peer publishes no region {:?}: publish it there first, or check the name",
                printable(&lookup.name)
            );
            Error::new(ErrorKind::NotFound, "region", why)
        };
        if let Some(asker) = lookup.asker {
            asker.tell(descriptor.ok_or_else(missing));
        }
        Ok(())
    }

    /// Ends what waited too long.
    pub fn expire(&mut self, now: Instant) {
        let limit = self.limit.as_secs_f64();
        let is_late = |lookup: &&mut Lookup| lookup.deadline.is_some_and(|deadline| deadline <= now);
        for lookup in self.asked.values_mut().chain(&mut self.queue).filter(is_late) {
            if let Some(asker) = lookup.asker.take() {
                let why = format!("no answer about region {:?} within {limit:.1} s; try again", lookup.name);
                asker.tell(Err(Error::new(ErrorKind::DeadlineExceeded, "region", why)));
            }
        }
        // What the peer was not asked needs no place.
        self.queue.retain(|lookup| lookup.asker.is_some());
    }

    /// When the first lookup expires.
    pub fn next_deadline(&self) -> Option<Instant> {
        let open = |lookup: &&Lookup| lookup.asker.is_some();
        self.asked.values().chain(&self.queue).filter(open).filter_map(|lookup| lookup.deadline).min()
    }

    /// Ends all with `error`.
    pub fn fail(&mut self, error: &Error) {
        let asked = self.asked.drain().map(|(_, lookup)| lookup);
        for asker in asked.chain(self.queue.drain(..)).filter_map(|lookup| lookup.asker) {
            asker.tell(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_64_are_asked_and_the_rest_follow() {
        let (mut lookups, now) = (Lookups::new(Duration::from_secs(5)), Instant::now());
        let mut answers = Vec::new();
        for i in 0..70 {
            let (answer, outcome) = oneshot::channel();
            lookups.add(format!("region {i}"), Asker::Name(answer), now);
            answers.push(outcome);
        }
        // Who stopped waiting is not asked for.
        drop(answers.remove(66));
        let asked = std::iter::from_fn(|| lookups.next_question()).count();
        assert_eq!(asked, OUTSTANDING);
        lookups.found(0, Some(vec![7])).unwrap();
        lookups.found(1, None).unwrap();
        assert_eq!(answers[0].try_recv().unwrap().unwrap(), [7]);
        let error = answers[1].try_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.context().contains("\"region 1\""), "{error}");
        assert_eq!(std::iter::from_fn(|| lookups.next_question()).count(), 2);
        assert_eq!(lookups.found(1, None).unwrap_err().kind(), ErrorKind::Protocol);
        // A peer that answers nothing more gathers none that nobody waits for.
        assert_eq!(lookups.queue.len(), 4);
        lookups.expire(now + Duration::from_secs(5));
        assert_eq!((lookups.queue.len(), lookups.asked.len()), (0, OUTSTANDING));
        assert_eq!(answers[68].try_recv().unwrap().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    }

    #[test]
    fn all_end() {
        let (mut lookups, now) = (Lookups::new(Duration::from_secs(5)), Instant::now());
        let (answer, mut late) = oneshot::channel();
        lookups.add("late".into(), Asker::Name(answer), now);
        assert!(lookups.next_question().is_some());
        assert_eq!(lookups.next_deadline(), Some(now + Duration::from_secs(5)));
        lookups.expire(now + Duration::from_secs(5));
        assert_eq!(late.try_recv().unwrap().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        assert_eq!(lookups.next_deadline(), None);
        // The answer may still come, and is no breach.
        lookups.found(0, None).unwrap();
        let (answer, mut failed) = oneshot::channel();
        lookups.add("failed".into(), Asker::Name(answer), now);
        lookups.fail(&Error::new(ErrorKind::PeerDied, "control", ""));
        assert_eq!(failed.try_recv().unwrap().unwrap_err().kind(), ErrorKind::PeerDied);
    }
}
