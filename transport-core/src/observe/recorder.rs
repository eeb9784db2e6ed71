//! The flight recorder: a ring of the last records of one engine.
//!
//! The engine's thread writes, any thread reads without stopping it: each place is
//! a seqlock over plain atomics. The number of the record in it is 0 while it is
//! being written; a reader that sees the number it wants before and after it read
//! the words has that record, and skips the place otherwise.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::Record;
use super::record::Words;
use crate::sync::{AtomicU64, fence};

struct Place {
    /// One more than the record's sequence number; 0 while it is written.
    number: AtomicU64,
    words: [AtomicU64; 4],
}

/// A ring of records. One thread writes.
pub(crate) struct Recorder {
    places: Box<[Place]>,
    /// Records written so far.
    next: AtomicU64,
}

/// More would take over a gigabyte.
const MOST: usize = 1 << 24;

impl Recorder {
    /// Room for at least `records`; 0 records nothing.
    pub fn new(records: usize) -> Self {
        let places = if records == 0 { 0 } else { records.min(MOST).next_power_of_two() };
        let place =
            |_| Place { number: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        Self { places: (0..places).map(place).collect(), next: AtomicU64::new(0) }
    }

    /// Whether nothing is recorded.
    #[inline]
    pub fn is_off(&self) -> bool {
        self.places.is_empty()
    }

    /// Appends a record over the oldest. Only the engine's thread calls this.
    #[inline]
    pub fn write(&self, words: Words) {
        let sequence = self.next.load(Relaxed);
        let last = self.places.len().wrapping_sub(1);
        let Some(place) = self.places.get(sequence as usize & last) else { return };
        place.number.store(0, Relaxed);
        // Pairs with the fence in `place`: who reads one of the words below sees the 0.
        fence(Release);
        for (word, value) in place.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
        place.number.store(sequence + 1, Release);
        self.next.store(sequence + 1, Release);
    }

    /// Records written since the beginning.
    pub fn written(&self) -> u64 {
        self.next.load(Acquire)
    }

    /// What the ring holds, oldest first. What is overwritten meanwhile is left out.
    pub fn read(&self) -> Vec<Record> {
        let end = self.written();
        let start = end.saturating_sub(self.places.len() as u64);
        (start..end).filter_map(|sequence| Record::unpack(sequence, self.place(sequence)?)).collect()
    }

    fn place(&self, sequence: u64) -> Option<Words> {
        let place = &self.places[sequence as usize & (self.places.len() - 1)];
        if place.number.load(Acquire) != sequence + 1 {
            return None;
        }
        let words = std::array::from_fn(|at| place.words[at].load(Relaxed));
        fence(Acquire);
        (place.number.load(Relaxed) == sequence + 1).then_some(words)
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests {
    use super::*;
    use crate::Time;
    use crate::observe::What;

    fn write(recorder: &Recorder, imm: u32) {
        recorder.write(What::Imm { rail: 0, peer: 1, imm }.pack(Time::from_nanos(imm.into())));
    }

    fn imms(recorder: &Recorder) -> Vec<u32> {
        let imm = |record: &Record| match record.what {
            What::Imm { imm, .. } => imm,
            other => panic!("{other:?}"),
        };
        recorder.read().iter().map(imm).collect()
    }

    #[test]
    fn the_ring_keeps_the_last_and_numbers_them() {
        let recorder = Recorder::new(5);
        assert!(recorder.read().is_empty());
        (0..3).for_each(|imm| write(&recorder, imm));
        assert_eq!(imms(&recorder), [0, 1, 2]);
        (3..30).for_each(|imm| write(&recorder, imm));
        // Rounded up to 8 places.
        assert_eq!(imms(&recorder), (22..30).collect::<Vec<_>>());
        let sequences: Vec<_> = recorder.read().iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, (22..30).collect::<Vec<_>>());
        assert_eq!(recorder.written(), 30);
    }

    #[test]
    fn off_is_off() {
        let recorder = Recorder::new(0);
        write(&recorder, 1);
        assert!(recorder.is_off() && recorder.read().is_empty() && recorder.written() == 0);
    }

    #[test]
    fn a_reader_never_sees_half_a_record() {
        let recorder = Recorder::new(4);
        let most = if cfg!(miri) { 50 } else { 200_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..most).for_each(|imm| write(&recorder, imm)));
            while recorder.written() < u64::from(most) {
                for record in recorder.read() {
                    assert_eq!(record.time.as_nanos(), record.sequence);
                    assert!(
                        matches!(record.what, What::Imm { imm, .. } if u64::from(imm) == record.sequence)
                    );
                }
            }
        });
        assert_eq!(recorder.read().len(), 4);
    }
}

#[cfg(all(test, multirail_loom))]
mod loom_tests {
    use loom::sync::Arc;

    use super::*;

    /// A ring of one place, so that every write is over the one being read.
    #[test]
    fn records_are_whole_exhaustively() {
        loom::model(|| {
            let recorder = Arc::new(Recorder::new(1));
            let writer = Arc::clone(&recorder);
            let thread = loom::thread::spawn(move || {
                for value in 1..=2 {
                    writer.write([value; 4]);
                }
            });
            for sequence in 0..2 {
                if let Some(words) = recorder.place(sequence) {
                    assert_eq!(words, [sequence + 1; 4]);
                }
            }
            thread.join().unwrap();
            assert_eq!(recorder.place(1), Some([2; 4]));
        });
    }
}
