//! What one worker still has to do for one peer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::Work;

/// Bytes that weigh as much as a work request.
const UNIT: u64 = 4096;

/// The most that one operation weighs, so that as many as an op table holds can be added.
const HEAVIEST: u64 = 1 << 12;

/// Operations handed to a worker and not ended, and their weight: both in one word, its
/// low half counts them. One that waits for its trigger is none yet: others need not go behind it.
#[derive(Default)]
pub(crate) struct Backlog(AtomicU64);

impl Backlog {
    /// An operation is handed to the worker. Whether it comes alone: nothing else is under way.
    #[inline]
    pub fn begins(&self, work: &Work) -> bool {
        self.0.fetch_add(word(work), Ordering::Relaxed) == 0
    }

    /// The worker is done with it.
    pub fn ended(&self, work: &Work) {
        self.0.fetch_sub(word(work), Ordering::Release);
    }

    /// The worker has nothing of the peer's to do, so a request may run ahead of it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// How many operations.
    pub fn operations(&self) -> u32 {
        self.0.load(Ordering::Relaxed) as u32
    }

    /// Their weight as bytes: of each the bytes, or [`UNIT`] for each of its requests if
    /// that is more.
    pub fn weight(&self) -> u64 {
        (self.0.load(Ordering::Relaxed) >> 32) * UNIT
    }
}

fn word(work: &Work) -> u64 {
    let weight = (work.bytes() / UNIT).max(work.items.len().into()).min(HEAVIEST);
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
    fn weighs_bytes_or_requests_and_ends_at_nothing() {
        let backlog = Backlog::default();
        let all = [work(0, 1), work(100 * UNIT, 100 * UNIT), work(1000, 1), work(u64::MAX, u64::MAX)];
        let weights = [1, 101, 1101, 1101 + HEAVIEST];
        for (work, (count, weight)) in all.iter().zip((1..).zip(weights)) {
            assert_eq!(backlog.begins(work), count == 1);
            assert_eq!((backlog.operations(), backlog.weight()), (count, weight * UNIT));
        }
        all.iter().for_each(|work| backlog.ended(work));
        assert!(backlog.is_empty());
        assert_eq!(backlog.weight(), 0);
    }
}
