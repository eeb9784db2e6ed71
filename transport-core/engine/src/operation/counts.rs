//! How long operations took, and how they failed: the live counts of an engine, and their snapshot.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::ErrorKind;
use crate::single_writer::add;
use crate::spi::Paths;

/// Size classes: up to 4 KiB, 64 KiB, 1 MiB, 16 MiB, and more. Each is 16 times as large as the one before.
const SIZES: usize = 5;
/// The most bytes of the first class, as a power of two.
const FIRST_SIZE: u32 = 12;
/// Latency buckets. Each ends at twice the latency of the one before; the last one, at no latency.
const BUCKETS: usize = 25;
/// The nanoseconds at which the first bucket ends, as a power of two: 1.024 µs.
const FIRST_BUCKET: u32 = 10;

/// Counts of the operations that an engine has ended. Only the engine's thread adds to them; any thread may read them.
#[derive(Debug, Default)]
pub struct OperationCounts {
    sizes: [SizeCounts; SIZES],
    errors: [AtomicU64; ErrorKind::ALL.len()],
    staged_bytes: AtomicU64,
    coalesced_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct SizeCounts {
    buckets: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

/// A snapshot of the operations that one transport has ended since the fabric was opened: writes, reads, sends. An
/// operation that the submitting thread carried out itself is not among them, nor is a receive. An operation that several
/// rail groups share counts once for each of them, with the bytes of its part.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationCounters {
    /// The transport's label.
    pub transport: String,
    /// The operations that succeeded, by size class, the smallest first.
    pub sizes: Vec<SizeCounters>,
    /// The operations that failed, for each kind of error.
    pub errors: Vec<(ErrorKind, u64)>,
    /// Bytes of the operations that succeeded whose bytes went through staging buffers.
    pub staged_bytes: u64,
    /// Bytes of the operations that succeeded whose pages shared work requests.
    pub coalesced_bytes: u64,
}

/// The successful operations of one size class.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SizeCounters {
    /// The most bytes of an operation of this class; `u64::MAX` for the last class.
    pub max_bytes: u64,
    /// The sum of the latencies, from the submission to the end.
    pub time: Duration,
    /// The operations by latency: the longest latency of a bucket, [`Duration::MAX`] for the last one, and the operations
    /// that took no longer, but longer than those of the bucket before.
    pub latencies: Vec<(Duration, u64)>,
}

impl OperationCounts {
    /// Counts an operation of `bytes` bytes that succeeded, and took `nanos` nanoseconds and these paths.
    #[inline]
    pub fn succeeded(&self, bytes: u64, nanos: u64, paths: Paths) {
        if paths.intersects(Paths::STAGED | Paths::COALESCED) {
            self.count_paths(bytes, paths);
        }
        let size = &self.sizes[size_class(bytes)];
        add(&size.buckets[bucket(nanos)], 1);
        add(&size.nanos, nanos);
    }

    #[cold]
    fn count_paths(&self, bytes: u64, paths: Paths) {
        if paths.contains(Paths::STAGED) {
            add(&self.staged_bytes, bytes);
        }
        if paths.contains(Paths::COALESCED) {
            add(&self.coalesced_bytes, bytes);
        }
    }

    /// Counts an operation that failed.
    #[cold]
    pub fn failed(&self, kind: ErrorKind) {
        add(&self.errors[usize::from(kind.code())], 1);
    }

    /// Adds these counts to those of other engines of the same transport.
    pub fn add_to(&self, counters: &mut OperationCounters) {
        for (counts, sum) in self.sizes.iter().zip(&mut counters.sizes) {
            sum.time += Duration::from_nanos(counts.nanos.load(Relaxed));
            let buckets = counts.buckets.iter().zip(&mut sum.latencies);
            buckets.for_each(|(count, (_, sum))| *sum += count.load(Relaxed));
        }
        let errors = self.errors.iter().zip(&mut counters.errors);
        errors.for_each(|(count, (_, sum))| *sum += count.load(Relaxed));
        counters.staged_bytes += self.staged_bytes.load(Relaxed);
        counters.coalesced_bytes += self.coalesced_bytes.load(Relaxed);
    }
}

impl OperationCounters {
    /// Those of a transport that has ended nothing.
    #[doc(hidden)]
    pub fn new(transport: &str) -> Self {
        let end = |bucket: usize| match bucket {
            _ if bucket == BUCKETS - 1 => Duration::MAX,
            _ => Duration::from_nanos(1 << (FIRST_BUCKET as usize + bucket)),
        };
        let size = |class: usize| SizeCounters {
            max_bytes: if class == SIZES - 1 { u64::MAX } else { 1 << (FIRST_SIZE as usize + 4 * class) },
            time: Duration::ZERO,
            latencies: (0..BUCKETS).map(|bucket| (end(bucket), 0)).collect(),
        };
        Self {
            transport: transport.into(),
            sizes: (0..SIZES).map(size).collect(),
            errors: ErrorKind::ALL.map(|kind| (kind, 0)).to_vec(),
            staged_bytes: 0,
            coalesced_bytes: 0,
        }
    }
}

impl SizeCounters {
    /// The name of the class in metrics: the most bytes of an operation, or `more`.
    pub fn name(&self) -> &'static str {
        const NAMES: [&str; SIZES] = ["4KiB", "64KiB", "1MiB", "16MiB", "more"];
        NAMES[size_class(self.max_bytes)]
    }

    /// The number of operations.
    pub fn count(&self) -> u64 {
        self.latencies.iter().map(|(_, count)| count).sum()
    }
}

#[inline]
fn size_class(bytes: u64) -> usize {
    let above = u64::BITS - (bytes.saturating_sub(1) >> FIRST_SIZE).leading_zeros();
    (above.div_ceil(4) as usize).min(SIZES - 1)
}

#[inline]
fn bucket(nanos: u64) -> usize {
    let above = u64::BITS - (nanos.saturating_sub(1) >> FIRST_BUCKET).leading_zeros();
    (above as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// An operation is counted once, in the class and the bucket whose bounds enclose it.
        #[test]
        fn an_operation_is_counted_where_the_bounds_say(bytes in 0..1_u64 << 40, nanos in 0..1_u64 << 36, shift in 0_u32..36) {
            let (bytes, nanos) = (bytes >> shift, nanos >> shift);
            let counts = OperationCounts::default();
            counts.succeeded(bytes, nanos, Paths::STAGED);
            let mut counters = OperationCounters::new("a");
            counts.add_to(&mut counters);
            prop_assert_eq!((counters.staged_bytes, counters.coalesced_bytes), (bytes, 0));
            let class = counters.sizes.iter().position(|size| bytes <= size.max_bytes).unwrap();
            let found: Vec<_> = counters.sizes.iter().map(SizeCounters::count).collect();
            let expected: Vec<_> = (0..SIZES).map(|at| u64::from(at == class)).collect();
            prop_assert_eq!(found, expected);
            let size = &counters.sizes[class];
            prop_assert_eq!(size.time, Duration::from_nanos(nanos));
            let bucket = size.latencies.iter().position(|(end, _)| Duration::from_nanos(nanos) <= *end).unwrap();
            prop_assert_eq!(size.latencies[bucket].1, 1);
        }
    }

    #[test]
    fn errors_are_counted_by_kind() {
        let (one, other) = (OperationCounts::default(), OperationCounts::default());
        one.failed(ErrorKind::Cancelled);
        one.failed(ErrorKind::Io);
        other.failed(ErrorKind::Io);
        let mut counters = OperationCounters::new("a");
        [one, other].iter().for_each(|counts| counts.add_to(&mut counters));
        counters.errors.retain(|(_, count)| *count > 0);
        assert_eq!(counters.errors, [(ErrorKind::Cancelled, 1), (ErrorKind::Io, 2)]);
    }
}
