//! How a broken path comes back.
//!
//! A path is one rail of this side to one peer. Once nothing of what was posted over a broken path can arrive any more,
//! the path waits for a while. Then this side asks the peer to lift the fence, and probes the path: it posts writes
//! without bytes, one after another. After [`GOOD_PROBES`] good ones the path carries a small share of new operations,
//! and after a while its whole share. A path that breaks again and again waits longer each time.

use std::time::Duration;

use crate::Time;

/// The probes in a row that must succeed before a path is used again.
pub(crate) const GOOD_PROBES: u32 = 3;

/// After so many probes in a row that the endpoint did not take, the path waits again.
pub(crate) const MAX_REFUSED_PROBES: u32 = 64;

/// The first wait is this many round trips of the device, within [`SHORTEST_WAIT`] and [`LONGEST_WAIT`]. It doubles with
/// each break of the path.
const WAIT_ROUND_TRIPS: u32 = 64;
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The pause between two probes is this part of the wait.
const PROBES_PER_WAIT: u32 = 8;

/// A path that has carried requests this many times as long as it had waited counts as healed: its next wait is short
/// again.
const HEALED_AFTER_WAITS: u32 = 16;

/// A path that is back carries this part of its share at first.
pub(crate) const FIRST_SHARE: u32 = 8;

/// What a broken path waits for. The engine moves it on in `Engine::advance_comebacks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comeback {
    /// The requests that were posted over the path are not settled yet.
    Unsettled,
    /// The path stays broken: a device is lost, or the peer's backend cannot fence.
    Never,
    /// This side asks the peer then.
    Waiting { until: Time },
    /// This side has asked the peer to lift the fence.
    Asked,
    /// The peer has lifted the fence. The next probe is due at `next`, unless one is under way.
    /// `refused`: how often in a row the endpoint took no probe, because the peer has not joined the next connection.
    Probing { good: u32, refused: u32, next: Time, is_under_way: bool },
}

/// How often a path has broken, and since when it works.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PathHistory {
    /// Breaks without a long time of work between them.
    breaks: u32,
    /// How long the path waits before this side asks the peer to lift the fence.
    wait: Duration,
    /// When the path was used again. `None` if it has not broken yet, or is broken.
    back_since: Option<Time>,
}

impl PathHistory {
    /// Notes that the path is broken, or that a probe has failed. `round_trip` is that of the device; `random` spreads
    /// the waits of many paths, by up to a quarter. Returns how long the path waits.
    pub fn note_break(&mut self, now: Time, round_trip: Duration, random: u64) -> Duration {
        let is_healed =
            self.back_since.take().is_some_and(|since| now.since(since) >= self.wait * HEALED_AFTER_WAITS);
        self.breaks = if is_healed { 1 } else { self.breaks + 1 };
        let first = (round_trip * WAIT_ROUND_TRIPS).clamp(SHORTEST_WAIT, LONGEST_WAIT);
        let doubled = first.saturating_mul(1 << (self.breaks - 1).min(16)).min(LONGEST_WAIT);
        self.wait = doubled + doubled / 4 * (random % 1024) as u32 / 1024;
        self.wait
    }

    /// The pause between two probes.
    pub fn probe_pause(&self) -> Duration {
        self.wait / PROBES_PER_WAIT
    }

    /// Notes that the path is used again. Returns how long it carries [`FIRST_SHARE`] only.
    pub fn note_return(&mut self, now: Time) -> Duration {
        self.back_since = Some(now);
        self.wait
    }
}

/// The probes of paths that are under way. A probe is a request of the engine itself, without an operation.
#[derive(Debug, Default)]
pub(crate) struct PathProbes {
    next: u64,
    under_way: Vec<PathProbe>,
}

/// One of [`PathProbes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PathProbe {
    pub id: u64,
    pub rail: usize,
    pub link: u32,
    pub posted_at: Time,
    /// Whether the probe is about a broken path. Otherwise it finds out whether the peer answers over this path, while
    /// another one makes no progress.
    pub is_comeback: bool,
}

/// The ids of probes begin here. No request of an operation has such an id.
const FIRST_ID: u64 = 1 << 63;

impl PathProbes {
    /// Whether a request is a probe, perhaps one that the engine has forgotten.
    pub fn is_probe(id: u64) -> bool {
        id >= FIRST_ID
    }

    /// The id for the next probe. The ids of two probes are never neighbours.
    pub fn next_id(&mut self) -> u64 {
        self.next += 1;
        FIRST_ID + 2 * self.next
    }

    pub fn add(&mut self, probe: PathProbe) {
        self.under_way.push(probe);
    }

    /// Removes a probe that has ended. `None` if its path has broken since then.
    pub fn take(&mut self, id: u64) -> Option<PathProbe> {
        let at = self.under_way.iter().position(|probe| probe.id == id)?;
        Some(self.under_way.swap_remove(at))
    }

    /// Whether a probe is under way that was posted since then, to find out whether the peer of a link answers over a
    /// rail.
    pub fn is_checking(&self, rail: usize, link: u32, since: Time) -> bool {
        let mut checks = self.under_way.iter().filter(|probe| !probe.is_comeback);
        checks.any(|probe| (probe.rail, probe.link) == (rail, link) && probe.posted_at > since)
    }

    /// Forgets the probes of a path.
    pub fn forget_path(&mut self, rail: usize, link: u32) {
        self.under_way.retain(|probe| (probe.rail, probe.link) != (rail, link));
    }

    /// Forgets the probes to the peer of a link.
    pub fn forget_link(&mut self, link: u32) {
        self.under_way.retain(|probe| probe.link != link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_micros(30);

    #[test]
    fn a_path_that_flaps_waits_longer_and_one_that_has_worked_for_long_does_not() {
        let mut history = PathHistory::default();
        let first = ROUND_TRIP * WAIT_ROUND_TRIPS;
        assert_eq!(history.note_break(Time::ZERO, ROUND_TRIP, 0), first);
        let mut now = Time::ZERO.after(first);
        for times in [2, 4, 8] {
            history.note_return(now);
            now = now.after(first);
            assert_eq!(history.note_break(now, ROUND_TRIP, 0), first * times);
        }
        history.note_return(now);
        now = now.after(first * 8 * HEALED_AFTER_WAITS);
        assert_eq!(history.note_break(now, ROUND_TRIP, 0), first);
        for _ in 0..100 {
            history.note_break(now, ROUND_TRIP, 1023);
        }
        assert!((LONGEST_WAIT..LONGEST_WAIT * 5 / 4).contains(&history.wait), "{:?}", history.wait);
        assert!(history.probe_pause() < LONGEST_WAIT);
    }

    #[test]
    fn a_probe_is_found_by_its_id_until_its_path_breaks() {
        let mut probes = PathProbes::default();
        let mut add = |rail, is_comeback, at| {
            let id = probes.next_id();
            let probe = PathProbe { id, rail, link: 7, posted_at: Time::from_nanos(at), is_comeback };
            probes.add(probe);
            probe
        };
        let (first, second, third) = (add(0, true, 5), add(1, false, 6), add(1, true, 7));
        assert!(PathProbes::is_probe(first.id) && !PathProbes::is_probe(u64::from(u32::MAX)));
        let since = Time::from_nanos;
        assert!(probes.is_checking(1, 7, since(5)) && !probes.is_checking(1, 7, since(6)));
        assert!(!probes.is_checking(0, 7, since(0)) && !probes.is_checking(1, 8, since(0)));
        assert_eq!(probes.take(first.id), Some(first));
        assert_eq!(probes.take(first.id), None);
        probes.forget_path(1, 7);
        assert_eq!((probes.take(second.id), probes.take(third.id)), (None, None));
    }
}
