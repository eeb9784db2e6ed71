//! Moved rails: what the peer says of its own, and its answers about ours.
//!
//! A backend may have to make queue pairs for each: the session hands them to a helper thread, one after
//! another, and goes on. They are acted on in the order in which they came, as one may supersede another. A
//! caller-driven fabric whose `control_on` has a runtime of one thread has no helper (`Spawner::blocking`): its other
//! sessions wait meanwhile.

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use crate::frame::Frame;
use crate::host::SessionPeer;
use crate::runtime::Spawner;
use crate::session::close::CloseReason;
use multirail_spi::Result;

/// News that may wait. A peer has two offers per pair of rails on their way at most, where its backend
/// offers anew only what was answered; others offer anew whenever their endpoint is another one.
const MOST_WAITING: usize = 1024;
/// A peer may have a helper thread for this long at once,
const AT_ONCE: Duration = Duration::from_secs(1);
/// and for one part of so many of the time after that.
const SHARE: u32 = 4;
/// For so long a peer is not heard at most.
const SILENCE: Duration = Duration::from_secs(60);

/// What a peer says of moved rails.
enum News {
    /// The peer's end of a pair has moved: its new offer.
    Moved { transport: String, pair: u16, offer: Vec<u8> },
    /// The peer has followed ours: its answer.
    Followed { transport: String, pair: u16, answer: Vec<u8> },
}

/// What is to be sent, if anything, and how long the helper thread was taken.
type Acted = (Result<Option<Frame>>, Duration);

/// The news of one session.
pub(crate) struct Relocations {
    waiting: VecDeque<News>,
    /// Kept here, not by whoever waits, so that waiting may be cancelled.
    running: Option<Pin<Box<dyn Future<Output = Result<Acted>> + Send>>>,
    /// Offers of ours that the peer has not answered.
    unanswered: u32,
    allowance: Allowance,
}

impl Relocations {
    pub fn new(now: Instant) -> Self {
        Self { waiting: VecDeque::new(), running: None, unanswered: 0, allowance: Allowance::new(now) }
    }

    /// The peer was told of a rail of ours that has moved: it is to answer.
    pub fn told(&mut self) {
        self.unanswered += 1;
    }

    /// The peer says that its end of a pair has moved.
    pub fn moved(
        &mut self,
        transport: String,
        pair: u16,
        offer: Vec<u8>,
    ) -> std::result::Result<(), CloseReason> {
        if self.waiting.len() >= MOST_WAITING {
            return Err(CloseReason::breach("its rails move faster than anyone can follow"));
        }
        self.waiting.push_back(News::Moved { transport, pair, offer });
        Ok(())
    }

    /// The peer answers an offer of ours.
    pub fn followed(
        &mut self,
        transport: String,
        pair: u16,
        answer: Vec<u8>,
    ) -> std::result::Result<(), CloseReason> {
        let unasked = || CloseReason::breach("it follows a move that it was not told of");
        self.unanswered = self.unanswered.checked_sub(1).ok_or_else(unasked)?;
        self.waiting.push_back(News::Followed { transport, pair, answer });
        Ok(())
    }

    /// Acts on the next news, once the peer's allowance has room: what is to be sent then. Waits for ever
    /// where there are none. Cancel-safe.
    pub async fn act<P: SessionPeer>(&mut self, peer: &P, spawner: &Spawner) -> Result<Option<Frame>> {
        loop {
            if let Some(running) = &mut self.running {
                let ended = running.as_mut().await;
                self.running = None;
                let (result, took) = ended?;
                self.allowance.spend(took, Instant::now());
                return result;
            }
            if let Some(News::Moved { .. }) = self.waiting.front()
                && let Some(later) = self.allowance.room_at(Instant::now())
            {
                sleep_until(later.into()).await;
                continue;
            }
            let Some(news) = self.waiting.pop_front() else { return pending().await };
            let (peer, spawner) = (peer.clone(), spawner.clone());
            self.running = Some(Box::pin(async move { spawner.blocking(move || news.act(&peer)).await }));
        }
    }
}

impl News {
    fn act<P: SessionPeer>(self, peer: &P) -> Acted {
        let begun = Instant::now();
        let result = match self {
            Self::Moved { transport, pair, offer } => peer
                .note_relocation(&transport, pair, &offer)
                .map(|answer| Some(Frame::Followed { transport, pair, answer })),
            Self::Followed { transport, pair, answer } => {
                peer.note_followed(&transport, pair, &answer).map(|()| None)
            }
        };
        (result, begun.elapsed())
    }
}

/// How much of a helper thread's time a peer may still take.
struct Allowance {
    /// What it has taken and not earned back.
    taken: Duration,
    /// As of then.
    at: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { taken: Duration::ZERO, at: now }
    }

    fn earn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        (self.taken, self.at) = (self.taken.saturating_sub(passed / SHARE), now);
    }

    fn spend(&mut self, time: Duration, now: Instant) {
        self.earn(now);
        // However long one took, the peer is heard again within a minute.
        self.taken = self.taken.saturating_add(time).min(AT_ONCE + SILENCE / SHARE);
    }

    /// When there is room again; `None` if there is now.
    fn room_at(&mut self, now: Instant) -> Option<Instant> {
        self.earn(now);
        let over = self.taken.saturating_sub(AT_ONCE);
        (!over.is_zero()).then(|| now + over.saturating_mul(SHARE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_peer_gets_a_quarter_of_a_thread_after_the_first_second() {
        let start = Instant::now();
        let (mut allowance, mut now, mut count) = (Allowance::new(start), start, 0);
        // Each takes 20 ms, and the next one is there at once.
        while now < start + 20_000 * MS {
            match allowance.room_at(now) {
                Some(later) => now = later,
                None => {
                    now += 20 * MS;
                    allowance.spend(20 * MS, now);
                    count += 1;
                }
            }
        }
        let taken = count * 20 * MS;
        assert!((5900 * MS..=6200 * MS).contains(&taken), "{taken:?} of 20 s");
    }

    #[test]
    fn a_long_one_does_not_end_the_rest() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        allowance.spend(Duration::MAX, now);
        assert_eq!(allowance.room_at(now), Some(now + 60_000 * MS));
        assert_eq!(allowance.room_at(now + 60_000 * MS), None, "asked again");
        allowance = Allowance::new(now);
        allowance.spend(900 * MS, now);
        assert_eq!(allowance.room_at(now), None);
    }
}
