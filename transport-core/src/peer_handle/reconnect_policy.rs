//! When a handle connects again.

use std::time::Duration;

/// The shortest delay: a refused attempt costs less time than that, so without it a handle would use up a core.
const MIN_DELAY: Duration = Duration::from_millis(1);

/// When a [`PeerHandle`](crate::PeerHandle) connects again after its connection was lost. Default: never.
///
/// The handle waits before each attempt: first for [`first_delay`](Self::first_delay), then each time twice as long,
/// up to [`longest_delay`](Self::longest_delay). It gives up at the limit. Each loss of the connection begins anew,
/// with the first delay and the whole limit. All times are real time, as everywhere in the control plane.
///
/// ```
/// use std::time::Duration;
/// use multirail_core::ReconnectPolicy;
///
/// let patient = ReconnectPolicy::within(Duration::from_secs(600)).longest_delay(Duration::from_secs(5));
/// let brief = ReconnectPolicy::attempts(3).first_delay(Duration::from_millis(20));
/// assert!(patient.is_on() && brief.is_on() && !ReconnectPolicy::default().is_on());
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReconnectPolicy {
    limit: ReconnectLimit,
    first_delay: Duration,
    longest_delay: Duration,
    jitter: f64,
}

/// When a handle gives up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ReconnectLimit {
    /// The handle never connects again.
    Off,
    Attempts(u32),
    Time(Duration),
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self::OFF
    }
}

impl ReconnectPolicy {
    /// Never connects again.
    pub const OFF: Self = Self::new(ReconnectLimit::Off);

    const fn new(limit: ReconnectLimit) -> Self {
        Self {
            limit,
            first_delay: Duration::from_millis(100),
            longest_delay: Duration::from_secs(10),
            jitter: 0.5,
        }
    }

    /// Gives up after so many failed attempts. 0 is [`OFF`](Self::OFF).
    ///
    /// An attempt takes as long as the bootstrap and the handshake may take: some milliseconds if the address refuses,
    /// up to 5 s over TCP if nothing answers.
    pub const fn attempts(attempts: u32) -> Self {
        match attempts {
            0 => Self::OFF,
            attempts => Self::new(ReconnectLimit::Attempts(attempts)),
        }
    }

    /// Gives up so long after the loss of the connection, also in the middle of an attempt. `Duration::MAX` never gives
    /// up.
    pub const fn within(span: Duration) -> Self {
        Self::new(ReconnectLimit::Time(span))
    }

    /// The delay before the first attempt, at least 1 ms. Default 100 ms.
    pub const fn first_delay(mut self, delay: Duration) -> Self {
        self.first_delay = delay;
        self
    }

    /// The longest delay between two attempts. Default 10 s.
    pub const fn longest_delay(mut self, delay: Duration) -> Self {
        self.longest_delay = delay;
        self
    }

    /// The share of each delay, 0 to 1, that the handle may leave out: with 0.5 it waits for half of the delay or
    /// longer. The share is random, so that the peers of a restarted process do not all connect at the same moment. The
    /// random numbers follow from the fabric's seed ([`FabricBuilder::seed`](crate::FabricBuilder::seed)). Default 0.5.
    pub const fn jitter(mut self, share: f64) -> Self {
        self.jitter = share;
        self
    }

    /// Whether a handle with this policy connects again.
    pub fn is_on(&self) -> bool {
        self.limit != ReconnectLimit::Off
    }

    pub(super) fn limit(&self) -> ReconnectLimit {
        self.limit
    }

    /// The delays after a loss. The random numbers come from `random`.
    pub(super) fn delays<'a>(&self, random: &'a mut fastrand::Rng) -> Delays<'a> {
        let longest = self.longest_delay.max(MIN_DELAY);
        let next = self.first_delay.clamp(MIN_DELAY, longest);
        Delays { next, longest, jitter: self.jitter.clamp(0.0, 1.0), random }
    }
}

/// The delays before the attempts to connect again.
pub(super) struct Delays<'a> {
    next: Duration,
    longest: Duration,
    jitter: f64,
    random: &'a mut fastrand::Rng,
}

impl Delays<'_> {
    /// The delay before the next attempt.
    pub fn next(&mut self) -> Duration {
        let whole = self.next;
        self.next = whole.saturating_mul(2).min(self.longest);
        let seconds = whole.as_secs_f64() * (1.0 - self.jitter * self.random.f64());
        Duration::try_from_secs_f64(seconds).unwrap_or(whole).max(MIN_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(policy: ReconnectPolicy, seed: u64) -> Vec<Duration> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut delays = policy.delays(&mut random);
        (0..8).map(|_| delays.next()).collect()
    }

    #[test]
    fn delays_double_up_to_the_longest() {
        let policy = ReconnectPolicy::attempts(9).first_delay(Duration::from_millis(100)).jitter(0.0);
        let policy = policy.longest_delay(Duration::from_secs(1));
        let millis = [100, 200, 400, 800, 1000, 1000, 1000, 1000].map(Duration::from_millis);
        assert_eq!(delays(policy, 1), millis);
        for seed in 0..100 {
            for (delay, whole) in delays(policy.jitter(0.3), seed).into_iter().zip(millis) {
                assert!(delay <= whole && delay >= whole.mul_f64(0.699), "{delay:?} of {whole:?}");
            }
        }
    }

    #[test]
    fn one_seed_gives_the_same_delays_and_another_gives_others() {
        let policy = ReconnectPolicy::within(Duration::MAX);
        assert_eq!(delays(policy, 7), delays(policy, 7));
        assert_ne!(delays(policy, 7), delays(policy, 8));
    }

    #[test]
    fn no_setting_breaks_the_delays() {
        for policy in [
            ReconnectPolicy::attempts(1).first_delay(Duration::ZERO).longest_delay(Duration::ZERO),
            ReconnectPolicy::attempts(1).first_delay(Duration::MAX).longest_delay(Duration::MAX),
            ReconnectPolicy::attempts(1).first_delay(Duration::from_secs(9)).longest_delay(MIN_DELAY),
            ReconnectPolicy::attempts(1).jitter(f64::NAN),
            ReconnectPolicy::attempts(1).jitter(-5.0),
            ReconnectPolicy::attempts(1).jitter(5.0),
        ] {
            assert!(delays(policy, 1).iter().all(|delay| *delay >= MIN_DELAY), "{policy:?}");
        }
        assert_eq!(ReconnectPolicy::attempts(0), ReconnectPolicy::OFF);
    }
}
