//! What travels beside the bytes: completion data, which says who sent it and the user's imm.
//!
//! Completion data is 8 bytes on most providers: the upper half names the sender, by the
//! seat that the target reserved for it, the lower half is the imm. With 4 bytes (EFA) it is
//! the imm alone, and the provider says who sent it (`FI_SOURCE`).

/// A peer's slot while it is that peer's: the next one has another seat in it, so that what comes late from one,
/// or was left unread, is not taken for the other's. 31 bits, to which only who gave it attaches a meaning: the lower
/// 20 are the slot, the upper 11 count those who have had it, and begin anew after 2048.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat(u32);

impl Seat {
    /// There are so many slots at most.
    pub(crate) const SLOTS: u32 = 1 << 20;
    const MOST: u32 = (1 << 31) - 1;

    /// The first one of a slot below `SLOTS`.
    pub(crate) fn first(slot: u32) -> Self {
        Self(slot)
    }

    /// The slot's next one.
    pub(crate) fn next(self) -> Self {
        Self((self.0 + Self::SLOTS) & Self::MOST)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 % Self::SLOTS
    }

    /// As it travels.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// One with that number, if that can be.
    pub(crate) fn of(number: u32) -> Option<Self> {
        (number <= Self::MOST).then_some(Self(number))
    }
}

/// Set in the upper half where a message has an imm.
const ANNOUNCED: u64 = 1 << 63;

/// Who sent something, and its imm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The sender's with the target; `None` where it did not travel.
    pub seat: Option<Seat>,
    pub imm: Option<u32>,
}

impl Tag {
    /// As completion data of `bytes` bytes.
    pub(crate) fn to_data(self, bytes: usize) -> u64 {
        let imm = u64::from(self.imm.unwrap_or_default());
        if bytes < 8 {
            return imm;
        }
        let announced = if self.imm.is_some() { ANNOUNCED } else { 0 };
        announced | u64::from(self.seat.map_or(0, Seat::number)) << 32 | imm
    }

    /// Of completion data of `bytes` bytes that arrived; a write has it only for an imm.
    pub(crate) fn from_data(data: u64, bytes: usize) -> Self {
        if bytes < 8 {
            return Self { seat: None, imm: Some(data as u32) };
        }
        let imm = (data & ANNOUNCED != 0).then_some(data as u32);
        Self { seat: Some(Seat((data >> 32) as u32 & Seat::MOST)), imm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_as_it_went() {
        for seat in [0, 5, Seat::MOST].map(Seat) {
            for imm in [None, Some(0), Some(u32::MAX)] {
                let tag = Tag { seat: Some(seat), imm };
                assert_eq!(Tag::from_data(tag.to_data(8), 8), tag);
            }
            let tag = Tag { seat: Some(seat), imm: Some(7) };
            assert_eq!(Tag::from_data(tag.to_data(4), 4), Tag { seat: None, imm: Some(7) });
        }
    }

    #[test]
    fn who_follows_has_another_seat() {
        for slot in [0, 5, Seat::SLOTS - 1] {
            let (first, mut seat) = (Seat::first(slot), Seat::first(slot));
            for _ in 1..1 << 11 {
                seat = seat.next();
                assert!(seat != first && seat.slot() == slot && Seat::of(seat.number()) == Some(seat));
            }
            assert_eq!(seat.next(), first);
        }
        assert_eq!(Seat::of(1 << 31), None);
    }
}
