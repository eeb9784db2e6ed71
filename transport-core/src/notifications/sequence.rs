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
    /// The floor that the peer was last told, unless a fragment has failed since.
    told: u64,
    /// Whether a message that tells the floor is under way.
    is_telling: bool,
}

impl SendSequence {
    /// Takes the next numbers for so many fragments. Returns the first one, and the floor to tell with them.
    pub fn begin(&mut self, fragments: usize) -> (u64, u64) {
        let first = self.floor + self.ended.len() as u64;
        self.ended.extend(std::iter::repeat_n(false, fragments));
        (first, self.floor)
    }

    /// Takes back the number that was taken last: nothing was sent under it.
    pub fn take_back(&mut self) {
        self.ended.pop_back();
    }

    /// Notes that a fragment has ended, and whether it has arrived.
    pub fn end(&mut self, number: u64, has_arrived: bool) {
        if let Some(ended) = number.checked_sub(self.floor).and_then(|at| self.ended.get_mut(at as usize)) {
            *ended = true;
            if !has_arrived {
                // A message that told the floor may be the one that has failed.
                (self.has_gap, self.told) = (true, 0);
            }
        }
        while self.ended.front() == Some(&true) {
            self.ended.pop_front();
            self.floor += 1;
        }
    }

    /// How many numbers are under way: from the first fragment that has not ended on.
    pub fn under_way(&self) -> usize {
        self.ended.len()
    }

    /// The floor to tell the peer now by a message of its own, if it may wait for a fragment that has failed. Then the
    /// caller sends that message, and calls [`end_telling`](Self::end_telling) when it has ended.
    pub fn begin_telling(&mut self) -> Option<u64> {
        if !self.has_gap || self.is_telling || self.floor <= self.told {
            return None;
        }
        self.is_telling = true;
        self.note_told(self.floor);
        Some(self.floor)
    }

    /// Notes that a message which tells the floor has ended, and whether it has arrived.
    pub fn end_telling(&mut self, has_arrived: bool) {
        self.is_telling = false;
        if !has_arrived {
            (self.has_gap, self.told) = (true, 0);
        }
    }

    /// Notes that the peer is told about `floor`. A fragment at or above it may still have failed.
    pub fn note_told(&mut self, floor: u64) {
        self.told = self.told.max(floor);
        if self.has_gap && floor == self.floor {
            self.has_gap = self.ended.contains(&true);
        }
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
        assert_eq!((sequence.begin(1), sequence.begin_telling()), ((3, 0), None));
        sequence.end(0, false);
        assert_eq!((sequence.begin_telling(), sequence.begin(1)), (Some(2), (4, 2)));
        assert_eq!((sequence.begin_telling(), sequence.under_way()), (None, 3));
        sequence.end(0, false);
        sequence.end_telling(true);
        assert_eq!(sequence.begin_telling(), None, "it had ended before");
        sequence.end(3, false);
        assert_eq!(sequence.begin_telling(), Some(2), "the message that told it may have been number 3");
        sequence.end_telling(true);
        assert_eq!(sequence.begin_telling(), None, "the floor is where it was");
        sequence.end(2, true);
        assert_eq!(sequence.begin_telling(), Some(4), "fragment 3 has failed");
        sequence.end_telling(false);
        assert_eq!(sequence.begin_telling(), Some(4), "the message has failed, too");
        sequence.end_telling(true);
        assert_eq!(sequence.begin_telling(), None);
    }
}
