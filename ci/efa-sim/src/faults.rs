//! Faults that a user asks for: `die=3@1000,path=1@300+50,status=7@50,full=100,rollback=10,rnr=100,freeze,cut`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::name::ProcessId;
use crate::p5::CARDS;
use crate::status::CompletionStatus;

/// Faults of a process.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// A card, and the number of requests after which it is dead.
    die: Option<(usize, u64)>,
    path: Option<PathFault>,
    /// A status, and the interval of the requests that end with it.
    status: Option<(CompletionStatus, u64)>,
    /// The interval of the posts that find the queue full.
    full: Option<u64>,
    /// The interval of the batches of several requests that are refused when they are closed.
    rollback: Option<u64>,
    /// The number of messages of this process after which no further message finds a receive, as long as its target
    /// lives.
    rnr: Option<u64>,
    /// True if a stopped process looks like a host that does not answer.
    pub(crate) freeze: bool,
    /// True if no host reaches another while the file `cut` is in the folder of the simulation.
    pub(crate) cut: bool,
    posts: AtomicU64,
    batches: AtomicU64,
    requests: AtomicU64,
    messages: AtomicU64,
}

/// The requests of one card to one peer are lost for a time: they end as if the peer had stopped responding.
#[derive(Debug)]
struct PathFault {
    card: usize,
    /// The number of the card's requests before the first one that is lost. The peer of that one is the peer.
    after: u64,
    /// How long requests are lost, from the first one on.
    length: Duration,
    begun: OnceLock<(ProcessId, Instant)>,
}

impl PathFault {
    /// Parses `CARD@REQUESTS+MILLISECONDS`.
    fn parse(value: &str) -> Option<Self> {
        let (card, rest) = value.split_once('@')?;
        let (after, length) = rest.split_once('+')?;
        Some(Self {
            card: card.parse().ok().filter(|card| *card < CARDS)?,
            after: after.parse().ok()?,
            length: Duration::from_millis(length.parse().ok()?),
            begun: OnceLock::new(),
        })
    }

    fn loses(&self, card: usize, requests: u64, peer: ProcessId, now: Instant) -> bool {
        if card != self.card || requests < self.after {
            return false;
        }
        let (lost, since) = *self.begun.get_or_init(|| (peer, now));
        lost == peer && now.duration_since(since) < self.length
    }
}

/// Counts a call. Returns true at every `every`-th call.
fn is_due(every: Option<u64>, counter: &AtomicU64) -> bool {
    every.is_some_and(|every| (counter.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(every))
}

impl Faults {
    /// Parses a list of faults.
    pub(crate) fn parse(list: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for fault in list.split(',').filter(|fault| !fault.is_empty()) {
            let usage = || {
                format!(
                    "{fault} is no fault; there are die=CARD@REQUESTS, path=CARD@REQUESTS+MILLISECONDS, \
                     status=CODE@EVERY, full=EVERY, rollback=EVERY, rnr=AFTER, freeze and cut"
                )
            };
            let (what, value) = match fault {
                "freeze" => {
                    faults.freeze = true;
                    continue;
                }
                "cut" => {
                    faults.cut = true;
                    continue;
                }
                _ => fault.split_once('=').ok_or_else(usage)?,
            };
            let pair = || -> Option<(u64, u64)> {
                let (first, second) = value.split_once('@')?;
                Some((first.parse().ok()?, second.parse().ok()?))
            };
            let every = || value.parse().ok().filter(|every| *every > 0);
            match what {
                "die" => {
                    let (card, after) = pair().filter(|(card, _)| *card < CARDS as u64).ok_or_else(usage)?;
                    faults.die = Some((card as usize, after));
                }
                "path" => faults.path = Some(PathFault::parse(value).ok_or_else(usage)?),
                "status" => {
                    let (code, every) = pair().filter(|(_, every)| *every > 0).ok_or_else(usage)?;
                    faults.status = Some((CompletionStatus::of_code(code).ok_or_else(usage)?, every));
                }
                "full" => faults.full = Some(every().ok_or_else(usage)?),
                "rnr" => faults.rnr = Some(value.parse().map_err(|_| usage())?),
                "rollback" => faults.rollback = Some(every().ok_or_else(usage)?),
                _ => return Err(usage()),
            }
        }
        Ok(faults)
    }

    /// Whether this post finds the queue full.
    pub(crate) fn is_full(&self) -> bool {
        is_due(self.full, &self.posts)
    }

    /// Whether this batch is refused as a whole.
    pub(crate) fn is_rolled_back(&self, requests: usize) -> bool {
        requests > 1 && is_due(self.rollback, &self.batches)
    }

    /// The status that this request ends with instead of being executed.
    pub(crate) fn status(&self) -> Option<CompletionStatus> {
        let (status, every) = self.status?;
        is_due(Some(every), &self.requests).then_some(status)
    }

    /// Whether this message finds no receive.
    pub(crate) fn finds_no_receive(&self) -> bool {
        self.rnr.is_some_and(|after| self.messages.fetch_add(1, Ordering::Relaxed) >= after)
    }

    /// Whether a request of `card` to `peer` is lost, after this number of requests of the card.
    pub(crate) fn loses(&self, card: usize, requests: u64, peer: ProcessId) -> bool {
        self.path.as_ref().is_some_and(|path| path.loses(card, requests, peer, Instant::now()))
    }

    /// Whether `card` dies after this number of requests.
    pub(crate) fn kills(&self, card: usize, requests: u64) -> bool {
        self.die.is_some_and(|(dies, after)| dies == card && requests >= after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_come_when_they_are_due() {
        let faults = Faults::parse("die=3@10,full=2,rollback=1").unwrap();
        assert_eq!([faults.is_full(), faults.is_full(), faults.is_full()], [false, true, false]);
        assert!(faults.kills(3, 10) && !faults.kills(3, 9) && !faults.kills(2, 10));
        assert!(!faults.freeze && Faults::parse("full=3,freeze").unwrap().freeze);
        assert!(!faults.cut && Faults::parse("cut").unwrap().cut);
        let faults_of_messages = Faults::parse("rnr=1").unwrap();
        assert_eq!(
            [
                faults_of_messages.finds_no_receive(),
                faults_of_messages.finds_no_receive(),
                faults.finds_no_receive()
            ],
            [false, true, false]
        );
        assert!(faults.is_rolled_back(2) && !faults.is_rolled_back(1) && faults.status().is_none());
    }

    #[test]
    fn a_path_is_lost_for_a_time_and_to_one_peer() {
        let path = PathFault::parse("1@10+50").unwrap();
        let now = Instant::now();
        let peer = |pid| ProcessId::of_folder(&format!("{pid}-1")).unwrap();
        assert!(!path.loses(1, 9, peer(7), now) && !path.loses(2, 10, peer(7), now));
        assert!(path.loses(1, 10, peer(7), now) && !path.loses(1, 11, peer(8), now));
        let ms = |ms| now + Duration::from_millis(ms);
        assert!(path.loses(1, 12, peer(7), ms(49)) && !path.loses(1, 13, peer(7), ms(50)));
    }

    #[test]
    fn nonsense_is_refused_with_a_list_of_the_faults() {
        for list in [
            "die",
            "die=32@1",
            "die=1",
            "path=1@2",
            "path=32@1+1",
            "full=0",
            "status=99@1",
            "status=7@0",
            "x=1",
            "freeze=1",
            "rnr",
        ] {
            assert!(Faults::parse(list).is_err_and(|why| why.contains("die=CARD@REQUESTS")), "{list}");
        }
    }
}
