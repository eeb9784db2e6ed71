//! The slot protocol of staging, which `backend-staging` and loopback's own staging share.
//!
//! The *initiator* posts a work request; the *target* owns the region. The initiator cuts the work request's bytes into
//! parts that fit a slot of a staging buffer ([`StagedWorkQueue`]), and asks the target by one [`SlotRequest`] for each
//! slot to copy between that slot and the region. The target answers each request with a result ([`encode_result`]).
//! Then the slot is free again.
//!
//! Each backend chooses its own slots, and its own way to hand a slot to the other process:
//!
//! - `backend-staging` writes requests and responses into the other process's memory by RDMA. Devices may reorder these
//!   writes, so its slots are independent of each other, and a request has a sequence number and a checksum.
//! - Loopback has one word of state for each slot in shared memory. Both processes use its slots in order.

mod work_queue;

pub use work_queue::{SlotContent, StagedWork, StagedWorkQueue, WorkFailure};

use crate::{Access, ErrorKind};

/// What the initiator asks the target to do with one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRequest {
    /// What the target does.
    pub kind: SlotRequestKind,
    /// The key of the target's region.
    pub key: u64,
    /// The offset of the first byte in that region.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// What the target does for a [`SlotRequest`]. Loopback uses `Write` and `Read` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotRequestKind {
    /// Copies the slot's bytes into the region.
    Write,
    /// Copies the region's bytes into the slot.
    Read,
    /// Only responds. The initiator writes this request over the slot's earlier one. A target that has not read the
    /// earlier one never serves it. A target that has read it ignores this one, and responds to the earlier one.
    Cancel,
    /// Reports an imm. There are no bytes.
    Imm,
}

impl SlotRequest {
    /// Words of an encoded request.
    pub const WORDS: usize = 4;

    /// Encodes the request. The first word is below 256, so a backend may store more in its upper bits.
    #[inline]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        let kind = match self.kind {
            SlotRequestKind::Write => 0,
            SlotRequestKind::Read => 1,
            SlotRequestKind::Cancel => 2,
            SlotRequestKind::Imm => 3,
        };
        [kind, self.key, self.offset, self.len]
    }

    /// Decodes a request of a peer. Returns `None` if the first word names no kind. The other words are not checked.
    #[inline]
    pub fn from_words([kind, key, offset, len]: [u64; Self::WORDS]) -> Option<Self> {
        let kind = match kind {
            0 => SlotRequestKind::Write,
            1 => SlotRequestKind::Read,
            2 => SlotRequestKind::Cancel,
            3 => SlotRequestKind::Imm,
            _ => return None,
        };
        Some(Self { kind, key, offset, len })
    }

    /// Whether a region of `region_len` bytes that allows `access` allows this request: the range is in bounds, and the
    /// access is among the allowed ones.
    #[inline]
    pub fn is_allowed(&self, access: Access, region_len: u64) -> bool {
        let is_in_bounds = self.offset.checked_add(self.len).is_some_and(|end| end <= region_len);
        is_in_bounds && self.kind.is_allowed(access)
    }
}

impl SlotRequestKind {
    /// The access that the region must allow. Returns `None` for a request that names no region.
    #[inline]
    pub fn needed_access(self) -> Option<Access> {
        match self {
            Self::Write => Some(Access::REMOTE_WRITE),
            Self::Read => Some(Access::REMOTE_READ),
            Self::Cancel | Self::Imm => None,
        }
    }

    /// Whether a region that allows `access` allows such a request.
    #[inline]
    pub fn is_allowed(self, access: Access) -> bool {
        self.needed_access().is_some_and(|needed| access.contains(needed))
    }

    /// The destination and the source of the target's copy between a byte of the slot and one of the region.
    #[inline(always)]
    pub fn copy_ends(self, slot: *mut u8, region: *mut u8) -> (*mut u8, *const u8) {
        match self {
            Self::Read => (slot, region.cast_const()),
            _ => (region, slot.cast_const()),
        }
    }
}

/// The results of a request. A response carries the index of one of them.
const RESULTS: [Result<(), ErrorKind>; 6] = [
    Ok(()),
    Err(ErrorKind::RemoteAccess),
    Err(ErrorKind::Revoked),
    Err(ErrorKind::DeviceLost),
    Err(ErrorKind::Exhausted),
    Err(ErrorKind::Io),
];

/// Encodes the result of a request, for the response. An error for which there is no code becomes `Io`.
#[inline]
pub fn encode_result(result: Result<(), ErrorKind>) -> u32 {
    RESULTS.iter().position(|known| *known == result).unwrap_or(RESULTS.len() - 1) as u32
}

/// Decodes the result in a peer's response. Returns `None` for a number that [`encode_result`] does not return.
#[inline]
pub fn decode_result(code: u32) -> Option<Result<(), ErrorKind>> {
    RESULTS.get(code as usize).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_is_decoded_as_it_was_encoded(kind in 0..4_u64, key: u64, offset: u64, len: u64, other: u64) {
            let words = [kind, key, offset, len];
            prop_assert_eq!(SlotRequest::from_words(words).map(SlotRequest::to_words), Some(words));
            prop_assert_eq!(SlotRequest::from_words([other, key, offset, len]).is_some(), other < 4);
        }
    }

    #[test]
    fn a_region_allows_requests_in_bounds_with_the_right_access() {
        let write = SlotRequest { kind: SlotRequestKind::Write, key: 7, offset: 96, len: 4 };
        let both = Access::REMOTE_WRITE | Access::REMOTE_READ;
        assert!(write.is_allowed(both, 100) && write.is_allowed(Access::REMOTE_WRITE, 100));
        assert!(!write.is_allowed(both, 99) && !write.is_allowed(Access::REMOTE_READ, 100));
        assert!(!SlotRequest { offset: u64::MAX - 3, ..write }.is_allowed(both, 100));
        assert!(!SlotRequest { kind: SlotRequestKind::Imm, ..write }.is_allowed(both, 100));
        let [mut slot, mut region] = [0, 1];
        let (slot, region): (*mut u8, *mut u8) = (&raw mut slot, &raw mut region);
        assert_eq!(write.kind.copy_ends(slot, region), (region, slot.cast_const()));
        let read = SlotRequest { kind: SlotRequestKind::Read, ..write };
        assert_eq!(read.kind.copy_ends(slot, region), (slot, region.cast_const()));
    }

    #[test]
    fn results_are_decoded_as_they_were_encoded() {
        for result in RESULTS {
            assert_eq!(decode_result(encode_result(result)), Some(result));
        }
        assert_eq!(decode_result(encode_result(Err(ErrorKind::Busy))), Some(Err(ErrorKind::Io)));
        assert_eq!(decode_result(77), None);
    }
}
