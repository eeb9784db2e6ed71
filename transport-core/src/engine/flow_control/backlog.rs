//! The operations that one engine has not ended for one peer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::Work;

/// The bytes that weigh as much as one work request.
const REQUEST_WEIGHT: u64 = 4096;

/// The greatest weight of one operation, so that the sum over a full op table fits into 32 bits.
const MAX_OPERATION_WEIGHT: u64 = 1 << 12;

/// How many operations were handed to an engine for one peer and have not ended, and their weight. Both are in one
/// atomic: the low half is the number, the high half the weight.
///
/// An operation that waits for its trigger does not count: later operations need not queue behind it.
#[derive(Default)]
pub(crate) struct Backlog(AtomicU64);

impl Backlog {
    /// Adds an operation. Returns true if the backlog was empty before.
    #[inline]
    pub fn add(&self, work: &Work) -> bool {
        self.0.fetch_add(packed(work), Ordering::Relaxed) == 0
    }

    /// Removes an operation that has ended.
    pub fn remove(&self, work: &Work) {
        self.0.fetch_sub(packed(work), Ordering::Release);
    }

    /// Whether the engine has no operation for the peer. Then a request may run in the calling thread.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// The number of operations.
    pub fn operations(&self) -> u32 {
        self.0.load(Ordering::Relaxed) as u32
    }

    /// The weight of all operations in bytes. An operation weighs its bytes, or 4096 for each of its requests if that
    /// is more, and at most 16 MiB.
    pub fn weight(&self) -> u64 {
        (self.0.load(Ordering::Relaxed) >> 32) * REQUEST_WEIGHT
    }
}

/// One operation as the atomic counts it.
fn packed(work: &Work) -> u64 {
    let weight = (work.bytes() / REQUEST_WEIGHT).max(work.pieces.len().into()).min(MAX_OPERATION_WEIGHT);
    weight << 32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Shape;
    use crate::spi::WorkKind;

    fn work(bytes: u64, chunk: u64) -> Work {
        Work::of(WorkKind::Write, Shape::Range { local: 0, remote: 0, len: bytes, chunk })
    }

    #[test]
    fn weighs_bytes_or_requests_and_ends_empty() {
        let backlog = Backlog::default();
        let all = [
            work(0, 1),
            work(100 * REQUEST_WEIGHT, 100 * REQUEST_WEIGHT),
            work(1000, 1),
            work(u64::MAX, u64::MAX),
        ];
        let weights = [1, 101, 1101, 1101 + MAX_OPERATION_WEIGHT];
        for (work, (count, weight)) in all.iter().zip((1..).zip(weights)) {
            assert_eq!(backlog.add(work), count == 1);
            assert_eq!((backlog.operations(), backlog.weight()), (count, weight * REQUEST_WEIGHT));
        }
        all.iter().for_each(|work| backlog.remove(work));
        assert!(backlog.is_empty());
        assert_eq!(backlog.weight(), 0);
    }
}
