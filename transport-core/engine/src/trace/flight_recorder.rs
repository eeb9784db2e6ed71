//! The flight recorder: a ring of the last records of one engine.
//!
//! The engine's thread writes; any thread reads without stopping it. Each slot of the ring is a seqlock over plain
//! atomics. The slot's `number` is 0 while the engine writes the record. A reader that finds the number it wants both
//! before and after it reads the words has the whole record; otherwise it skips the slot.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::Record;
use super::record::RecordWords;
use crate::sync::{AtomicU64, fence};

struct RecordSlot {
    /// The record's sequence number plus one; 0 while the record is being written.
    number: AtomicU64,
    words: [AtomicU64; 4],
}

/// A ring of records. One thread at a time writes.
pub struct FlightRecorder {
    slots: Box<[RecordSlot]>,
    /// The number of records written so far.
    next: AtomicU64,
}

/// The next larger ring would take more than a gigabyte.
const MAX_RECORDS: usize = 1 << 24;

impl FlightRecorder {
    /// A ring for at least `records` records; 0 turns the recorder off.
    pub fn new(records: usize) -> Self {
        let slots = if records == 0 { 0 } else { records.min(MAX_RECORDS).next_power_of_two() };
        let slot =
            |_| RecordSlot { number: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        Self { slots: (0..slots).map(slot).collect(), next: AtomicU64::new(0) }
    }

    /// Whether the recorder is off.
    #[inline]
    pub fn is_off(&self) -> bool {
        self.slots.is_empty()
    }

    /// Writes a record over the oldest one. Only the thread that drives the engine calls this.
    #[inline]
    pub fn write(&self, words: RecordWords) {
        let sequence = self.next.load(Relaxed);
        let last = self.slots.len().wrapping_sub(1);
        let Some(slot) = self.slots.get(sequence as usize & last) else { return };
        slot.number.store(0, Relaxed);
        // Pairs with the fence in `read_slot`: a reader that sees one of the words stored below also sees the 0.
        fence(Release);
        for (word, value) in slot.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
        slot.number.store(sequence + 1, Release);
        self.next.store(sequence + 1, Release);
    }

    /// The number of records written so far.
    pub fn written(&self) -> u64 {
        self.next.load(Acquire)
    }

    /// The records in the ring, oldest first. Leaves out those that are overwritten during the call.
    pub fn read(&self) -> Vec<Record> {
        let end = self.written();
        let start = end.saturating_sub(self.slots.len() as u64);
        (start..end).filter_map(|sequence| Record::unpack(sequence, self.read_slot(sequence)?)).collect()
    }

    fn read_slot(&self, sequence: u64) -> Option<RecordWords> {
        let slot = &self.slots[sequence as usize & (self.slots.len() - 1)];
        if slot.number.load(Acquire) != sequence + 1 {
            return None;
        }
        let words = std::array::from_fn(|index| slot.words[index].load(Relaxed));
        fence(Acquire);
        (slot.number.load(Relaxed) == sequence + 1).then_some(words)
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests {
    use super::*;
    use crate::Time;
    use crate::trace::TraceEvent;

    fn write(recorder: &FlightRecorder, imm: u32) {
        recorder.write(TraceEvent::Imm { rail: 0, peer: 1, imm }.pack(Time::from_nanos(imm.into())));
    }

    fn imms(recorder: &FlightRecorder) -> Vec<u32> {
        let imm = |record: &Record| match record.event {
            TraceEvent::Imm { imm, .. } => imm,
            other => panic!("{other:?}"),
        };
        recorder.read().iter().map(imm).collect()
    }

    #[test]
    fn the_ring_keeps_the_last_records_and_numbers_them() {
        let recorder = FlightRecorder::new(5);
        assert!(recorder.read().is_empty());
        (0..3).for_each(|imm| write(&recorder, imm));
        assert_eq!(imms(&recorder), [0, 1, 2]);
        (3..30).for_each(|imm| write(&recorder, imm));
        // Rounded up to 8 slots.
        assert_eq!(imms(&recorder), (22..30).collect::<Vec<_>>());
        let sequences: Vec<_> = recorder.read().iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, (22..30).collect::<Vec<_>>());
        assert_eq!(recorder.written(), 30);
    }

    #[test]
    fn off_is_off() {
        let recorder = FlightRecorder::new(0);
        write(&recorder, 1);
        assert!(recorder.is_off() && recorder.read().is_empty() && recorder.written() == 0);
    }

    #[test]
    fn a_reader_never_sees_half_a_record() {
        let recorder = FlightRecorder::new(4);
        let most = if cfg!(miri) { 50 } else { 200_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..most).for_each(|imm| write(&recorder, imm)));
            while recorder.written() < u64::from(most) {
                for record in recorder.read() {
                    assert_eq!(record.time.as_nanos(), record.sequence);
                    assert!(
                        matches!(record.event, TraceEvent::Imm { imm, .. } if u64::from(imm) == record.sequence)
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

    /// A ring of one slot: each write overwrites the record that is being read.
    #[test]
    fn records_are_whole_exhaustively() {
        loom::model(|| {
            let recorder = Arc::new(FlightRecorder::new(1));
            let writer = Arc::clone(&recorder);
            let thread = loom::thread::spawn(move || {
                for value in 1..=2 {
                    writer.write([value; 4]);
                }
            });
            for sequence in 0..2 {
                if let Some(words) = recorder.read_slot(sequence) {
                    assert_eq!(words, [sequence + 1; 4]);
                }
            }
            thread.join().unwrap();
            assert_eq!(recorder.read_slot(1), Some([2; 4]));
        });
    }
}
