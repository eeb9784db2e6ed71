//! How many regions were registered, and how long that took.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The live counts of a fabric.
#[derive(Debug, Default)]
pub(super) struct RegistrationCounts {
    regions: AtomicU64,
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// The regions that a fabric has registered since it was opened, those that are dropped by now too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistrationCounters {
    /// The number of regions.
    pub regions: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How long their registration took, on all rails together.
    pub time: Duration,
}

impl RegistrationCounts {
    pub fn add(&self, bytes: usize, time: Duration) {
        self.regions.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.nanos.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub fn read(&self) -> RegistrationCounters {
        let [regions, bytes, nanos] =
            [&self.regions, &self.bytes, &self.nanos].map(|count| count.load(Relaxed));
        RegistrationCounters { regions, bytes, time: Duration::from_nanos(nanos) }
    }
}
