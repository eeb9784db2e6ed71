//! The fabric's [`Clock`]. Timers, records and the deadlines of operations take their time from it. Only idle workers,
//! the control plane, and the limits of blocking calls use the system's clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A moment, in nanoseconds since the clock began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Time(u64);

impl Time {
    /// The moment at which the clock began.
    pub const ZERO: Self = Self(0);

    /// Later than everything: a deadline that never passes.
    pub const NEVER: Self = Self(u64::MAX);

    /// The moment `nanos` nanoseconds after the clock began.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The nanoseconds since the clock began.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The moment `span` after this one; [`Time::NEVER`] at most.
    pub fn after(self, span: Duration) -> Self {
        let nanos = span.as_secs().saturating_mul(1_000_000_000);
        Self(self.0.saturating_add(nanos).saturating_add(span.subsec_nanos().into()))
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// The current time.
    fn now(&self) -> Time;
}

/// The system's monotonic clock (`CLOCK_MONOTONIC`), from the moment this value was made.
///
/// Each operation reads it, and [`Instant`](std::time::Instant) takes twice the instructions: it checks that time does
/// not go back, and counts seconds and nanoseconds apart.
#[derive(Debug)]
pub struct SystemClock {
    /// What the system's clock showed then, in nanoseconds.
    began: u64,
}

impl SystemClock {
    /// The nanoseconds that the system's clock shows.
    #[inline]
    fn read() -> u64 {
        let mut shown = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // rustix asks the kernel's own page, which valgrind does not map.
        // SAFETY: `shown` is valid for writes. The call fails for a bad pointer or an unknown clock only.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut shown) };
        // The system's clock shows neither a negative time nor 584 years.
        (shown.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(shown.tv_nsec as u64)
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { began: Self::read() }
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Time {
        Time(Self::read().saturating_sub(self.began))
    }
}

/// A clock that moves only when it is told to: for tests and simulation.
#[derive(Debug, Clone, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    /// Moves the clock forward, to [`Time::NEVER`] at most.
    pub fn advance(&self, span: Duration) {
        let later = |now| Time(now).after(span).0;
        self.0.update(Ordering::AcqRel, Ordering::Acquire, later);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        Time(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Time::NEVER.after(Duration::from_secs(1)), Time::NEVER);
        assert_eq!(Time::ZERO.since(Time::NEVER), Duration::ZERO);
        let clock = VirtualClock::default();
        clock.advance(Duration::from_micros(3));
        assert_eq!(clock.now().since(Time::ZERO), Duration::from_micros(3));
        clock.advance(Duration::MAX);
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), Time::NEVER);
    }
}
