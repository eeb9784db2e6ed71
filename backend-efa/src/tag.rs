//! Completion data: the sender and the user's imm, which libfabric delivers beside the bytes.
//!
//! Most providers have 8 bytes of completion data. The upper half is the peer tag, by which the target knows the
//! sender; the lower half is the imm. EFA has 4 bytes: only the imm. The target then knows the sender by its address,
//! which the provider reports (`FI_SOURCE`).

/// A number that the target gives each peer, and that the peer sends back with all its requests. It contains the peer's
/// slot, and counts the peers that have had this slot. So the target does not mistake a late arrival of a former peer
/// for one of the slot's present peer.
///
/// A peer tag has 31 bits: the lower 20 are the slot, the upper 11 the count, modulo 2048. Only the side that has made
/// it reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerTag(u32);

impl PeerTag {
    /// The most slots.
    pub(crate) const SLOTS: u32 = 1 << 20;
    const MAX: u32 = (1 << 31) - 1;

    /// The first peer tag of a slot below `SLOTS`.
    pub(crate) fn first(slot: u32) -> Self {
        Self(slot)
    }

    /// The slot's next peer tag.
    pub(crate) fn next(self) -> Self {
        Self((self.0 + Self::SLOTS) & Self::MAX)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 % Self::SLOTS
    }

    /// The peer tag as a number, for completion data.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// The peer tag with this number; `None` if there is none.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        (number <= Self::MAX).then_some(Self(number))
    }
}

/// The bit of the upper half that says that there is an imm.
const HAS_IMM: u64 = 1 << 63;

/// The sender and the imm of an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The peer tag that the target gave the sender; `None` if completion data has no room for it.
    pub peer_tag: Option<PeerTag>,
    pub imm: Option<u32>,
}

impl Tag {
    /// Encodes the tag as completion data of `bytes` bytes.
    pub(crate) fn to_data(self, bytes: usize) -> u64 {
        let imm = u64::from(self.imm.unwrap_or_default());
        if bytes < 8 {
            return imm;
        }
        let has_imm = if self.imm.is_some() { HAS_IMM } else { 0 };
        has_imm | u64::from(self.peer_tag.map_or(0, PeerTag::number)) << 32 | imm
    }

    /// Decodes completion data of `bytes` bytes. With less than 8 bytes, only requests with an imm have completion
    /// data.
    pub(crate) fn from_data(data: u64, bytes: usize) -> Self {
        if bytes < 8 {
            return Self { peer_tag: None, imm: Some(data as u32) };
        }
        let imm = (data & HAS_IMM != 0).then_some(data as u32);
        Self { peer_tag: Some(PeerTag((data >> 32) as u32 & PeerTag::MAX)), imm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_loses_nothing() {
        for peer_tag in [0, 5, PeerTag::MAX].map(PeerTag) {
            for imm in [None, Some(0), Some(u32::MAX)] {
                let tag = Tag { peer_tag: Some(peer_tag), imm };
                assert_eq!(Tag::from_data(tag.to_data(8), 8), tag);
            }
            let tag = Tag { peer_tag: Some(peer_tag), imm: Some(7) };
            assert_eq!(Tag::from_data(tag.to_data(4), 4), Tag { peer_tag: None, imm: Some(7) });
        }
    }

    #[test]
    fn the_next_peer_of_a_slot_has_another_tag() {
        for slot in [0, 5, PeerTag::SLOTS - 1] {
            let (first, mut peer_tag) = (PeerTag::first(slot), PeerTag::first(slot));
            for _ in 1..1 << 11 {
                peer_tag = peer_tag.next();
                assert!(
                    peer_tag != first
                        && peer_tag.slot() == slot
                        && PeerTag::from_number(peer_tag.number()) == Some(peer_tag)
                );
            }
            assert_eq!(peer_tag.next(), first);
        }
        assert_eq!(PeerTag::from_number(1 << 31), None);
    }
}
