//! What travels beside the bytes: completion data, which says who sent it and the user's imm.
//!
//! Completion data is 8 bytes on most providers: the upper half names the sender, by the
//! slot that the target reserved for it, the lower half is the imm. With 4 bytes (EFA) it is
//! the imm alone, and the provider says who sent it (`FI_SOURCE`).

/// Set in the upper half where a message has an imm.
const ANNOUNCED: u64 = 1 << 63;

/// Who sent something, and its imm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The target's slot for the sender, 31 bits; `None` where it did not travel.
    pub slot: Option<u32>,
    pub imm: Option<u32>,
}

impl Tag {
    /// The most slots that can be told apart.
    pub(crate) const SLOTS: u32 = (1 << 31) - 1;

    /// As completion data of `bytes` bytes.
    pub(crate) fn to_data(self, bytes: usize) -> u64 {
        let imm = u64::from(self.imm.unwrap_or_default());
        if bytes < 8 {
            return imm;
        }
        let announced = if self.imm.is_some() { ANNOUNCED } else { 0 };
        announced | u64::from(self.slot.unwrap_or_default()) << 32 | imm
    }

    /// Of completion data of `bytes` bytes that arrived; a write has it only for an imm.
    pub(crate) fn from_data(data: u64, bytes: usize) -> Self {
        if bytes < 8 {
            return Self { slot: None, imm: Some(data as u32) };
        }
        let imm = (data & ANNOUNCED != 0).then_some(data as u32);
        Self { slot: Some((data >> 32) as u32 & Self::SLOTS), imm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_as_it_went() {
        for slot in [0, 5, Tag::SLOTS] {
            for imm in [None, Some(0), Some(u32::MAX)] {
                let tag = Tag { slot: Some(slot), imm };
                assert_eq!(Tag::from_data(tag.to_data(8), 8), tag);
            }
            let tag = Tag { slot: Some(slot), imm: Some(7) };
            assert_eq!(Tag::from_data(tag.to_data(4), 4), Tag { slot: None, imm: Some(7) });
        }
    }
}
