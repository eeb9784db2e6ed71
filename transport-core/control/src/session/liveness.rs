//! Computes when to send heartbeats and when a silent peer is dead. The code does arithmetic on times only.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// The shortest time between two heartbeats, whatever timeout the peer asks for.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// The longest time between two heartbeats. It is short enough that adding it to any `Instant` cannot overflow.
const MAX_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Heartbeats within the peer's timeout: two of them may be lost or late.
const HEARTBEATS_PER_TIMEOUT: u32 = 3;

/// The moments at which sessions of this process send heartbeats, in one interval. With many peers, a thread then wakes
/// this often, and not once for each peer. Heartbeats do not come all at once, so that other tasks need not wait long.
const BEATS_PER_INTERVAL: u32 = 8;

/// Sessions count the moments from here.
static FIRST_BEAT: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The liveness state of one session.
pub(crate) struct Liveness {
    interval: Duration,
    timeout: Duration,
    last_heard: Instant,
    next_heartbeat: Instant,
    /// The send that was in progress at the last heartbeat, and at how many heartbeats since then it was the same.
    send_in_progress: (Option<u64>, u32),
}

/// The result of [`Liveness::tick`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tick {
    /// A heartbeat must be sent.
    pub heartbeat: bool,
    /// The peer was silent for longer than the timeout.
    pub dead: bool,
}

impl Liveness {
    /// `heartbeat` and `timeout` are the settings of this side; `their_timeout` is the peer's timeout for this side.
    pub fn new(now: Instant, heartbeat: Duration, timeout: Duration, their_timeout: Duration) -> Self {
        let interval =
            heartbeat.min(their_timeout / HEARTBEATS_PER_TIMEOUT).clamp(MIN_INTERVAL, MAX_INTERVAL);
        Self {
            interval,
            timeout,
            last_heard: now,
            next_heartbeat: next_heartbeat(now, interval),
            send_in_progress: (None, 0),
        }
    }

    /// Notes that a frame of the peer has arrived.
    pub fn note_heard(&mut self, now: Instant) {
        self.last_heard = now;
    }

    /// When to call [`Liveness::tick`] next.
    pub fn next_tick(&self) -> Instant {
        // A timeout beyond the range of `Instant` never expires.
        self.last_heard
            .checked_add(self.timeout)
            .map_or(self.next_heartbeat, |dead_at| self.next_heartbeat.min(dead_at))
    }

    /// The silence after which this side takes the peer for dead.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Computes what is due at `now`.
    ///
    /// This call may come late because this process was stopped or its thread got no CPU time. The
    /// delay does not count as the peer's silence, because this side could not receive meanwhile. After
    /// a delay of more than a whole timeout, the peer's timeout starts anew.
    pub fn tick(&mut self, now: Instant) -> Tick {
        let late = now.saturating_duration_since(self.next_tick());
        self.last_heard = if late > self.timeout { now } else { (self.last_heard + late).min(now) };
        let heartbeat = now >= self.next_heartbeat;
        if heartbeat {
            self.next_heartbeat = next_heartbeat(now, self.interval);
        }
        Tick { heartbeat, dead: now.saturating_duration_since(self.last_heard) >= self.timeout }
    }

    /// Whether the send with this number has been in progress for longer than the timeout. A peer
    /// may send heartbeats and yet read nothing. The session calls this at each heartbeat. The time
    /// is counted in heartbeats, so that delays of this side do not count.
    pub fn is_send_stuck(&mut self, sending: Option<u64>) -> bool {
        let same = sending.is_some() && sending == self.send_in_progress.0;
        self.send_in_progress = (sending, if same { self.send_in_progress.1 + 1 } else { 0 });
        self.interval.saturating_mul(self.send_in_progress.1) > self.timeout
    }
}

/// The last of the moments at which heartbeats are sent that is at most `interval` after `now`.
fn next_heartbeat(now: Instant, interval: Duration) -> Instant {
    let spacing = interval.as_nanos() / u128::from(BEATS_PER_INTERVAL);
    let latest = now + interval;
    let since = latest.saturating_duration_since(*FIRST_BEAT).as_nanos();
    latest - Duration::from_nanos((since % spacing) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const HEARTBEAT: Tick = Tick { heartbeat: true, dead: false };

    fn liveness(start: Instant) -> Liveness {
        Liveness::new(start, 500 * MS, 3000 * MS, 3000 * MS)
    }

    /// Ticks on time until the peer is dead, and returns how long that took.
    fn time_until_dead(liveness: &mut Liveness, start: Instant) -> Duration {
        for _ in 0..1000 {
            let now = liveness.next_tick();
            if liveness.tick(now).dead {
                return now - start;
            }
        }
        panic!("never dead");
    }

    #[test]
    fn a_silent_peer_is_dead_on_time_and_a_frame_postpones_it() {
        let start = *FIRST_BEAT;
        assert_eq!(time_until_dead(&mut liveness(start), start), 3000 * MS);
        let mut heard = liveness(start);
        assert_eq!((heard.tick(start + 500 * MS), heard.tick(start + 1000 * MS)), (HEARTBEAT, HEARTBEAT));
        heard.note_heard(start + 1234 * MS);
        assert_eq!(time_until_dead(&mut heard, start), 4234 * MS);
    }

    #[test]
    fn a_delay_of_this_side_is_not_the_peers_silence() {
        let start = *FIRST_BEAT;
        let mut stopped = liveness(start);
        let back = start + 60_000 * MS;
        assert_eq!(stopped.tick(back), HEARTBEAT);
        assert_eq!(time_until_dead(&mut stopped, back), 3000 * MS);
        // A shorter delay extends the wait by its own length, so a side that is always late still detects the dead
        // peer.
        let mut starved = liveness(start);
        assert!(!starved.tick(start + 3100 * MS).dead);
        assert_eq!(time_until_dead(&mut starved, start), (3000 + 2600) * MS);
    }

    #[test]
    fn heartbeats_of_all_sessions_fall_on_few_moments() {
        let start = *FIRST_BEAT;
        let mut sessions: Vec<_> =
            (0..1000).map(|number| (start + number * MS, liveness(start + number * MS))).collect();
        let mut moments = std::collections::BTreeMap::new();
        for (last, session) in &mut sessions {
            while *last < start + 5000 * MS {
                let next = session.next_tick();
                assert!(next - *last <= 500 * MS && next - *last > 400 * MS, "{:?}", next - *last);
                assert!(session.tick(next).heartbeat);
                session.note_heard(next);
                *last = next;
                *moments.entry(next).or_insert(0) += 1;
            }
        }
        // Eight in half a second, and about as many heartbeats at each.
        assert!(moments.len() <= 8 * 11, "{moments:?}");
        assert!(moments.values().all(|count| *count <= 250), "{moments:?}");
    }

    #[test]
    fn an_endless_timeout_never_expires_and_heartbeats_go_on() {
        let start = *FIRST_BEAT;
        let mut endless = Liveness::new(start, 500 * MS, Duration::MAX, Duration::MAX);
        for beat in 1..100 {
            assert_eq!(endless.next_tick(), start + beat * 500 * MS);
            assert_eq!(endless.tick(endless.next_tick()), HEARTBEAT);
        }
    }

    #[test]
    fn a_send_that_never_ends_is_stuck() {
        let mut liveness = liveness(*FIRST_BEAT);
        assert!((0..100).all(|_| !liveness.is_send_stuck(None)));
        assert!((0..100).all(|sent| !liveness.is_send_stuck(Some(sent))));
        assert_eq!((0..100).position(|_| liveness.is_send_stuck(Some(100))), Some(7));
    }

    #[test]
    fn a_short_peer_timeout_is_honoured_and_a_zero_one_bounded() {
        let start = *FIRST_BEAT;
        let impatient = Liveness::new(start, 500 * MS, 3000 * MS, 300 * MS);
        assert_eq!(impatient.next_tick() - start, 100 * MS);
        let absurd = Liveness::new(start, 500 * MS, 3000 * MS, Duration::ZERO);
        assert_eq!(absurd.next_tick() - start, MIN_INTERVAL);
    }
}
