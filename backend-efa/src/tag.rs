//! Completion data: the sender and the user's imm, which travel beside the bytes.
//!
//! Completion data has 8 bytes on most providers. The upper half names the sender, by the peer tag that the target has
//! reserved for it; the lower half is the imm. With 4 bytes (EFA), it is the imm alone, and the provider names the
//! sender's address (`FI_SOURCE`).

/// A slot and a count of the peers that have had it, so that a late arrival of one peer is not taken for one of the next
/// peer in the same slot. Of its 31 bits the lower 20 are the slot, and the upper 11 count the peers, modulo 2048. Only the
/// side that has made a tag reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerTag(u32);

impl PeerTag {
    /// The most slots.
    pub(crate) const SLOTS: u32 = 1 << 20;
    const MOST: u32 = (1 << 31) - 1;

    /// The first tag of a slot below `SLOTS`.
    pub(crate) fn first(slot: u32) -> Self {
        Self(slot)
    }

    /// The slot's next tag.
    pub(crate) fn next(self) -> Self {
        Self((self.0 + Self::SLOTS) & Self::MOST)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 % Self::SLOTS
    }

    /// The tag as it travels.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// The tag of that number; `None` if no tag has it.
    pub(crate) fn of(number: u32) -> Option<Self> {
        (number <= Self::MOST).then_some(Self(number))
    }
}

/// Set in the upper half where a message has an imm.
const ANNOUNCED: u64 = 1 << 63;

/// The sender and the imm of an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The sender's tag at the target; `None` where it does not travel.
    pub peer_tag: Option<PeerTag>,
    pub imm: Option<u32>,
}

impl Tag {
    /// Encodes it as completion data of `bytes` bytes.
    pub(crate) fn to_data(self, bytes: usize) -> u64 {
        let imm = u64::from(self.imm.unwrap_or_default());
        if bytes < 8 {
            return imm;
        }
        let announced = if self.imm.is_some() { ANNOUNCED } else { 0 };
        announced | u64::from(self.peer_tag.map_or(0, PeerTag::number)) << 32 | imm
    }

    /// Decodes completion data of `bytes` bytes. A write has completion data only for an imm.
    pub(crate) fn from_data(data: u64, bytes: usize) -> Self {
        if bytes < 8 {
            return Self { peer_tag: None, imm: Some(data as u32) };
        }
        let imm = (data & ANNOUNCED != 0).then_some(data as u32);
        Self { peer_tag: Some(PeerTag((data >> 32) as u32 & PeerTag::MOST)), imm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_as_it_went() {
        for peer_tag in [0, 5, PeerTag::MOST].map(PeerTag) {
            for imm in [None, Some(0), Some(u32::MAX)] {
                let tag = Tag { peer_tag: Some(peer_tag), imm };
                assert_eq!(Tag::from_data(tag.to_data(8), 8), tag);
            }
            let tag = Tag { peer_tag: Some(peer_tag), imm: Some(7) };
            assert_eq!(Tag::from_data(tag.to_data(4), 4), Tag { peer_tag: None, imm: Some(7) });
        }
    }

    #[test]
    fn who_follows_has_another_seat() {
        for slot in [0, 5, PeerTag::SLOTS - 1] {
            let (first, mut peer_tag) = (PeerTag::first(slot), PeerTag::first(slot));
            for _ in 1..1 << 11 {
                peer_tag = peer_tag.next();
                assert!(
                    peer_tag != first
                        && peer_tag.slot() == slot
                        && PeerTag::of(peer_tag.number()) == Some(peer_tag)
                );
            }
            assert_eq!(peer_tag.next(), first);
        }
        assert_eq!(PeerTag::of(1 << 31), None);
    }
}
