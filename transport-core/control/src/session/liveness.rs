//! When to be heard, and when a silent peer is dead. Plain arithmetic on time.

use std::time::{Duration, Instant};

/// Heartbeats are never closer than this, whatever a peer asks for.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// Heartbeats are never further apart than this, which every clock can add to itself.
const MAX_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Heartbeats within the peer's limit of silence: two may be lost or late.
const BEATS_PER_TIMEOUT: u32 = 3;

/// Keeps the times of one session.
pub(crate) struct Liveness {
    interval: Duration,
    timeout: Duration,
    heard: Instant,
    next_beat: Instant,
    /// Which send was under way at the last heartbeats, and at how many of them.
    sending: (Option<u64>, u32),
}

/// What is to be done at a moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tick {
    /// A heartbeat is due.
    pub beat: bool,
    /// The peer was silent for too long.
    pub dead: bool,
}

impl Liveness {
    /// `heartbeat` and `timeout` are ours, `their_timeout` is the silence the peer bears.
    pub fn new(now: Instant, heartbeat: Duration, timeout: Duration, their_timeout: Duration) -> Self {
        let interval = heartbeat.min(their_timeout / BEATS_PER_TIMEOUT).clamp(MIN_INTERVAL, MAX_INTERVAL);
        Self { interval, timeout, heard: now, next_beat: now + interval, sending: (None, 0) }
    }

    /// Something came from the peer.
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// When to call [`Liveness::tick`] next.
    pub fn wake(&self) -> Instant {
        // A timeout that no clock reaches is none.
        self.heard.checked_add(self.timeout).map_or(self.next_beat, |death| self.next_beat.min(death))
    }

    /// The silence after which the peer is dead.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What is due now.
    ///
    /// Being late ourselves (a stopped process, a starved thread) is not the
    /// peer's silence: nobody was there to listen. That time is not counted, and
    /// after more than a whole timeout of it the peer gets a fresh one.
    pub fn tick(&mut self, now: Instant) -> Tick {
        let late = now.saturating_duration_since(self.wake());
        self.heard = if late > self.timeout { now } else { (self.heard + late).min(now) };
        let beat = now >= self.next_beat;
        if beat {
            self.next_beat = now + self.interval;
        }
        Tick { beat, dead: now.saturating_duration_since(self.heard) >= self.timeout }
    }

    /// Whether the send of that number has been under way for longer than the
    /// timeout: the peer may be heard and yet read nothing. Asked at each
    /// heartbeat, and counted in heartbeats, so that our absence does not count.
    pub fn stuck(&mut self, sending: Option<u64>) -> bool {
        let same = sending.is_some() && sending == self.sending.0;
        self.sending = (sending, if same { self.sending.1 + 1 } else { 0 });
        self.interval.saturating_mul(self.sending.1) > self.timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const BEAT: Tick = Tick { beat: true, dead: false };

    fn liveness(start: Instant) -> Liveness {
        Liveness::new(start, 500 * MS, 3000 * MS, 3000 * MS)
    }

    /// Ticks on time until death; the time it took.
    fn time_of_death(liveness: &mut Liveness, start: Instant) -> Duration {
        for _ in 0..1000 {
            let now = liveness.wake();
            if liveness.tick(now).dead {
                return now - start;
            }
        }
        panic!("never dead");
    }

    #[test]
    fn silence_kills_on_time_and_life_delays_it() {
        let start = Instant::now();
        assert_eq!(time_of_death(&mut liveness(start), start), 3000 * MS);
        let mut heard = liveness(start);
        assert_eq!((heard.tick(start + 500 * MS), heard.tick(start + 1000 * MS)), (BEAT, BEAT));
        heard.heard(start + 1234 * MS);
        assert_eq!(time_of_death(&mut heard, start), 4234 * MS);
    }

    #[test]
    fn our_own_absence_is_not_the_peers_silence() {
        let start = Instant::now();
        let mut stopped = liveness(start);
        let back = start + 60_000 * MS;
        assert_eq!(stopped.tick(back), BEAT);
        assert_eq!(time_of_death(&mut stopped, back), 3000 * MS);
        // Shorter absences extend the wait by as much, so constant lateness still ends.
        let mut starved = liveness(start);
        assert!(!starved.tick(start + 3100 * MS).dead);
        assert_eq!(time_of_death(&mut starved, start), (3000 + 2600) * MS);
    }

    #[test]
    fn an_endless_timeout_never_ends_and_its_heartbeats_are_heard() {
        let start = Instant::now();
        let mut endless = Liveness::new(start, 500 * MS, Duration::MAX, Duration::MAX);
        for beat in 1..100 {
            assert_eq!(endless.wake(), start + beat * 500 * MS);
            assert_eq!(endless.tick(endless.wake()), BEAT);
        }
    }

    #[test]
    fn a_send_that_never_ends_is_stuck() {
        let mut liveness = liveness(Instant::now());
        assert!((0..100).all(|_| !liveness.stuck(None)));
        assert!((0..100).all(|sent| !liveness.stuck(Some(sent))));
        assert_eq!((0..100).position(|_| liveness.stuck(Some(100))), Some(7));
    }

    #[test]
    fn an_impatient_peer_is_served_and_an_absurd_one_bounded() {
        let start = Instant::now();
        let impatient = Liveness::new(start, 500 * MS, 3000 * MS, 300 * MS);
        assert_eq!(impatient.wake() - start, 100 * MS);
        let absurd = Liveness::new(start, 500 * MS, 3000 * MS, Duration::ZERO);
        assert_eq!(absurd.wake() - start, MIN_INTERVAL);
    }
}
