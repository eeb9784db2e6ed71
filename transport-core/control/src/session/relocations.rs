//! Relocations: endpoints that have a new address. The peer announces relocations of its endpoints and answers ours.
//!
//! A backend may have to create queue pairs for each relocation. The session therefore handles relocations on a helper
//! thread, one after another, and goes on meanwhile. It handles them in the order of arrival, because a later
//! relocation may supersede an earlier one. A caller-driven fabric whose `control_on` runtime has one thread has no
//! helper (`Spawner::blocking`): its other sessions wait meanwhile.

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use crate::frame::Frame;
use crate::host::SessionPeer;
use crate::runtime::Spawner;
use crate::session::close::CloseReason;
use multirail_spi::{ErrorKind, Result};

/// The most relocation messages that may wait. A peer whose backend waits for each answer has at most two offers per
/// pair of rails in flight. Other backends send a new offer each time their endpoint is replaced.
const MAX_WAITING: usize = 1024;
/// The helper thread time that a peer may use in one burst.
const BURST: Duration = Duration::from_secs(1);
/// After the burst, a peer may use one part in this many of a helper thread's time.
const TIME_SHARE: u32 = 4;
/// The longest time for which a peer's relocations are delayed.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A relocation message of the peer.
enum RelocationMessage {
    /// The peer's endpoint of a pair has a new address, described by `offer`.
    Relocated { transport: String, pair: u16, offer: Vec<u8> },
    /// The peer uses the new address of our endpoint, and answers.
    Followed { transport: String, pair: u16, answer: Vec<u8> },
}

/// The frame to send, if any, and how long the helper thread worked.
type Handled = (Result<Option<Frame>>, Duration);

/// The relocation messages of one session.
pub(crate) struct Relocations {
    waiting: VecDeque<RelocationMessage>,
    /// The message that is handled now. The session owns this future, so a caller may cancel its wait.
    running: Option<Pin<Box<dyn Future<Output = Result<Handled>> + Send>>>,
    /// The number of our offers that the peer has not answered.
    unanswered: u32,
    budget: TimeBudget,
}

impl Relocations {
    pub fn new(now: Instant) -> Self {
        Self { waiting: VecDeque::new(), running: None, unanswered: 0, budget: TimeBudget::new(now) }
    }

    /// Notes that this side has sent an offer, which the peer must answer.
    pub fn note_offer_sent(&mut self) {
        self.unanswered += 1;
    }

    /// Queues the peer's offer for its relocated endpoint.
    pub fn push_offer(
        &mut self,
        transport: String,
        pair: u16,
        offer: Vec<u8>,
    ) -> std::result::Result<(), CloseReason> {
        if self.waiting.len() >= MAX_WAITING {
            return Err(CloseReason::protocol_violation(
                "the peer's rails move faster than this side can follow",
            ));
        }
        self.waiting.push_back(RelocationMessage::Relocated { transport, pair, offer });
        Ok(())
    }

    /// Queues the peer's answer to an offer of ours.
    pub fn push_answer(
        &mut self,
        transport: String,
        pair: u16,
        answer: Vec<u8>,
    ) -> std::result::Result<(), CloseReason> {
        let unannounced = || {
            CloseReason::protocol_violation("the peer answers a relocation that this side did not announce")
        };
        self.unanswered = self.unanswered.checked_sub(1).ok_or_else(unannounced)?;
        self.waiting.push_back(RelocationMessage::Followed { transport, pair, answer });
        Ok(())
    }

    /// Handles the next message and returns the frame to send, if any. An offer first waits until the peer's time
    /// budget allows it; an answer does not. Never returns while no message waits. Cancel-safe.
    pub async fn next_frame<P: SessionPeer>(&mut self, peer: &P, spawner: &Spawner) -> Result<Option<Frame>> {
        loop {
            if let Some(running) = &mut self.running {
                let ended = running.as_mut().await;
                self.running = None;
                let (result, took) = ended?;
                self.budget.spend(took, Instant::now());
                return result;
            }
            if let Some(RelocationMessage::Relocated { .. }) = self.waiting.front()
                && let Some(later) = self.budget.available_at(Instant::now())
            {
                sleep_until(later.into()).await;
                continue;
            }
            let Some(message) = self.waiting.pop_front() else { return pending().await };
            let (peer, spawner) = (peer.clone(), spawner.clone());
            self.running =
                Some(Box::pin(async move { spawner.blocking(move || message.handle(&peer)).await }));
        }
    }
}

impl RelocationMessage {
    fn handle<P: SessionPeer>(self, peer: &P) -> Handled {
        let begun = Instant::now();
        let result = match self {
            Self::Relocated { transport, pair, offer } => peer
                .note_relocation(&transport, pair, &offer)
                .map(|answer| Some(Frame::Followed { transport, pair, answer })),
            Self::Followed { transport, pair, answer } => {
                peer.note_followed(&transport, pair, &answer).map(|()| None)
            }
        };
        // A lost device has no new address and takes none. That is no fault of the peer.
        let result = match result {
            Err(error) if error.kind() == ErrorKind::DeviceLost => {
                tracing::debug!(%error, "a lost device does not follow the peer's");
                Ok(None)
            }
            result => result,
        };
        (result, begun.elapsed())
    }
}

/// Limits the helper thread time that a peer uses.
struct TimeBudget {
    /// The time that was used and is not refilled yet.
    used: Duration,
    /// The moment at which `used` was computed.
    as_of: Instant,
}

impl TimeBudget {
    fn new(now: Instant) -> Self {
        Self { used: Duration::ZERO, as_of: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.as_of);
        (self.used, self.as_of) = (self.used.saturating_sub(passed / TIME_SHARE), now);
    }

    fn spend(&mut self, time: Duration, now: Instant) {
        self.refill(now);
        // However long one message took, the next one is handled after at most `MAX_PAUSE`.
        self.used = self.used.saturating_add(time).min(BURST + MAX_PAUSE / TIME_SHARE);
    }

    /// When the budget allows the next message; `None` if it does now.
    fn available_at(&mut self, now: Instant) -> Option<Instant> {
        self.refill(now);
        let over = self.used.saturating_sub(BURST);
        (!over.is_zero()).then(|| now + over.saturating_mul(TIME_SHARE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_peer_gets_a_quarter_of_a_thread_after_the_first_second() {
        let start = Instant::now();
        let (mut budget, mut now, mut count) = (TimeBudget::new(start), start, 0);
        // Each message takes 20 ms, and the next one arrives at once.
        while now < start + 20_000 * MS {
            match budget.available_at(now) {
                Some(later) => now = later,
                None => {
                    now += 20 * MS;
                    budget.spend(20 * MS, now);
                    count += 1;
                }
            }
        }
        let taken = count * 20 * MS;
        assert!((5900 * MS..=6200 * MS).contains(&taken), "{taken:?} of 20 s");
    }

    #[test]
    fn a_long_message_delays_the_next_by_a_minute_at_most() {
        let now = Instant::now();
        let mut budget = TimeBudget::new(now);
        budget.spend(Duration::MAX, now);
        assert_eq!(budget.available_at(now), Some(now + 60_000 * MS));
        assert_eq!(budget.available_at(now + 60_000 * MS), None, "asked again");
        budget = TimeBudget::new(now);
        budget.spend(900 * MS, now);
        assert_eq!(budget.available_at(now), None);
    }
}
