//! The operations that one engine has not ended for one peer.

use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes that weigh as much as one work request.
const REQUEST_WEIGHT: u64 = 4096;

/// The greatest weight of one operation, so that the sum over a full op table fits into 32 bits.
const MAX_OPERATION_WEIGHT: u64 = 1 << 12;

/// The weight of one operation in a [`Backlog`]: its bytes, or 4096 for each of its requests if that is more, and at
/// most 16 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight(u64);

impl Weight {
    /// The weight of `requests` work requests that move `bytes` bytes.
    #[inline]
    pub fn of(bytes: u64, requests: u32) -> Self {
        Self((bytes / REQUEST_WEIGHT).max(requests.into()).min(MAX_OPERATION_WEIGHT))
    }

    /// One operation as the atomic counts it.
    #[inline]
    fn packed(self) -> u64 {
        self.0 << 32 | 1
    }
}

/// How many operations were handed to an engine for one peer and have not ended, and their weight. Both are in one
/// atomic: the low half is the number, the high half the weight.
///
/// An operation that waits for its trigger does not count: later operations need not queue behind it.
#[derive(Default)]
pub struct Backlog(AtomicU64);

impl Backlog {
    /// Adds an operation. Returns true if the backlog was empty before.
    #[inline]
    pub fn add(&self, operation: Weight) -> bool {
        self.0.fetch_add(operation.packed(), Ordering::Relaxed) == 0
    }

    /// Removes an operation that has ended.
    #[inline]
    pub fn remove(&self, operation: Weight) {
        self.0.fetch_sub(operation.packed(), Ordering::Release);
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

    /// The weight of all operations in bytes.
    pub fn weight(&self) -> u64 {
        (self.0.load(Ordering::Relaxed) >> 32) * REQUEST_WEIGHT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weighs_bytes_or_requests_and_ends_empty() {
        let backlog = Backlog::default();
        let all = [
            Weight::of(0, 1),
            Weight::of(100 * REQUEST_WEIGHT, 1),
            Weight::of(1000, 1000),
            Weight::of(u64::MAX, 1),
        ];
        let weights = [1, 101, 1101, 1101 + MAX_OPERATION_WEIGHT];
        for (operation, (count, weight)) in all.iter().zip((1..).zip(weights)) {
            assert_eq!(backlog.add(*operation), count == 1);
            assert_eq!((backlog.operations(), backlog.weight()), (count, weight * REQUEST_WEIGHT));
        }
        all.iter().for_each(|operation| backlog.remove(*operation));
        assert!(backlog.is_empty());
        assert_eq!(backlog.weight(), 0);
    }
}
