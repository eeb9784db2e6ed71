//! The sender's side of the order of fragments to one peer.

use std::collections::VecDeque;

/// The numbers of the fragments to one peer, and which of them have ended.
#[derive(Debug, Default)]
pub(crate) struct SendSequence {
    /// All fragments with smaller numbers have ended.
    floor: u64,
    /// Whether each fragment from `floor` on has ended.
    ended: VecDeque<bool>,
    /// Whether a fragment has failed since the peer was last told `floor`: the peer may wait for it.
    has_gap: bool,
}

impl SendSequence {
    /// Takes the next numbers for so many fragments. Returns the first one, and the floor to tell with them.
    pub fn begin(&mut self, fragments: usize) -> (u64, u64) {
        let first = self.floor + self.ended.len() as u64;
        self.ended.extend(std::iter::repeat_n(false, fragments));
        (first, self.floor)
    }

    /// Notes that a fragment has ended, and whether it has arrived.
    pub fn end(&mut self, number: u64, has_arrived: bool) {
        if let Some(ended) = number.checked_sub(self.floor).and_then(|at| self.ended.get_mut(at as usize)) {
            *ended = true;
            self.has_gap |= !has_arrived;
        }
        while self.ended.front() == Some(&true) {
            self.ended.pop_front();
            self.floor += 1;
        }
    }

    /// The floor to tell the peer now, if it may wait for a fragment that has failed.
    pub fn gap(&self) -> Option<u64> {
        self.has_gap.then_some(self.floor)
    }

    /// Notes that the peer is told about `floor`. A fragment at or above it may still have failed.
    pub fn note_told(&mut self, floor: u64) {
        self.has_gap &= floor < self.floor || self.ended.contains(&true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_passes_only_what_has_ended() {
        let mut sequence = SendSequence::default();
        assert_eq!(sequence.begin(3), (0, 0));
        sequence.end(1, true);
        assert_eq!((sequence.begin(1), sequence.gap()), ((3, 0), None));
        sequence.end(0, false);
        assert_eq!((sequence.gap(), sequence.begin(1)), (Some(2), (4, 2)));
        sequence.note_told(2);
        assert_eq!(sequence.gap(), None);
        sequence.end(0, false);
        assert_eq!(sequence.gap(), None, "it had ended before");
        sequence.end(3, false);
        sequence.note_told(2);
        assert_eq!(sequence.gap(), Some(2), "fragment 3 has failed above the floor");
        sequence.end(2, true);
        assert_eq!(sequence.gap(), Some(4));
        sequence.note_told(4);
        assert_eq!(sequence.gap(), None);
    }
}
