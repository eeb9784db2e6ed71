//! The two messages that the processes of a connection write into each other's staging buffer: the initiator's
//! [`SlotRequest`], and the target's response to it.
//!
//! If both devices can wake their workers by an imm, each of these RDMA writes carries [`WAKE_IMM`]. The endpoint drops
//! this imm: the user never sees it. If the user writes an imm of the same value, the initiator sends it inside a
//! request ([`RequestKind::Imm`]), so that the peer can tell the two apart.

use multirail_spi::ErrorKind;

/// The imm of writes into a staging buffer. Any value would do.
pub(crate) const WAKE_IMM: u32 = 0x6b6e_6f63;

/// What the initiator asks the target to do with one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotRequest {
    /// The sequence number of the request: never 0, and different from the slot's previous request.
    pub sequence: u32,
    pub kind: RequestKind,
    /// The key of the target's region.
    pub key: u64,
    /// The offset of the first byte in that region.
    pub offset: u64,
    pub len: u64,
    /// The imm that the target reports once the bytes are in its region. `None` for `Read`.
    pub imm: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// Copy the slot's bytes into the region.
    Write,
    /// Send the region's bytes to the initiator's slot.
    Read,
    /// Report the imm. There are no bytes.
    Imm,
    /// Do nothing but respond. It replaces the earlier request with the same sequence number, if the target has not
    /// seen that one.
    Cancel,
}

/// Words of a request on the wire: one cache line. The last word is a checksum of the others, because the target may
/// poll the line while the device is still writing it.
pub(crate) const REQUEST_WORDS: usize = 8;

impl SlotRequest {
    pub(crate) fn to_words(self) -> [u64; REQUEST_WORDS] {
        let kind = match self.kind {
            RequestKind::Write => 0,
            RequestKind::Read => 1,
            RequestKind::Cancel => 2,
            RequestKind::Imm => 3,
        };
        let first = u64::from(self.sequence) | kind << 32 | u64::from(self.imm.is_some()) << 40;
        let imm = u64::from(self.imm.unwrap_or_default());
        let mut words = [first, self.key, self.offset, self.len, imm, 0, 0, 0];
        words[REQUEST_WORDS - 1] = checksum(&words);
        words
    }

    /// Decodes a request. Returns `None` if the words are incomplete or invalid.
    pub(crate) fn from_words(words: &[u64; REQUEST_WORDS]) -> Option<Self> {
        if words[REQUEST_WORDS - 1] != checksum(words) {
            return None;
        }
        let kind = match words[0] >> 32 & 0xff {
            0 => RequestKind::Write,
            1 => RequestKind::Read,
            2 => RequestKind::Cancel,
            3 => RequestKind::Imm,
            _ => return None,
        };
        let imm = (words[0] >> 40 & 1 != 0).then_some(words[4] as u32);
        let sequence = words[0] as u32;
        let request = Self { sequence, kind, key: words[1], offset: words[2], len: words[3], imm };
        (sequence != 0).then_some(request)
    }
}

/// A checksum of all words but the last. It detects a partly written line. It does not protect against a malicious
/// peer, who may write any request anyway. Each word is mixed in as by splitmix64 (Steele, Lea, Flood 2014).
fn checksum(words: &[u64; REQUEST_WORDS]) -> u64 {
    words[..REQUEST_WORDS - 1].iter().fold(0x5a_1e_d0_5e_a1, |sum, word| {
        let mut mixed = (sum ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    })
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

/// Encodes the response to the request with this sequence number. An error that is not in [`RESULTS`] becomes `Io`.
pub(crate) fn encode_response(sequence: u32, result: Result<(), ErrorKind>) -> u64 {
    let index = RESULTS.iter().position(|known| *known == result).unwrap_or(RESULTS.len() - 1);
    u64::from(sequence) | (index as u64) << 32
}

/// Decodes a response. Returns `None` if it belongs to a request with another sequence number, and a `Protocol` error
/// if its result is unknown.
pub(crate) fn decode_response(word: u64, sequence: u32) -> Option<Result<(), ErrorKind>> {
    let result = RESULTS.get((word >> 32) as usize).copied().unwrap_or(Err(ErrorKind::Protocol));
    (word as u32 == sequence).then_some(result)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_is_decoded_whole_or_not_at_all(
            sequence in 1_u32.., kind in 0..4_usize, key: u64, offset: u64, len: u64, imm: Option<u32>,
            torn in prop::collection::vec(any::<bool>(), REQUEST_WORDS), before: [u64; REQUEST_WORDS],
        ) {
            let kind = [RequestKind::Write, RequestKind::Read, RequestKind::Cancel, RequestKind::Imm][kind];
            let request = SlotRequest { sequence, kind, key, offset, len, imm };
            let words = request.to_words();
            prop_assert_eq!(SlotRequest::from_words(&words), Some(request));
            // A partly written line still has some words of the previous request.
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(SlotRequest::from_words(&seen).is_none() || seen == words);
        }

        #[test]
        fn a_response_belongs_to_one_sequence_number(
            sequence: u32, other: u32, index in 0..RESULTS.len(), word: u64,
        ) {
            let response = encode_response(sequence, RESULTS[index]);
            prop_assert_eq!(decode_response(response, sequence), Some(RESULTS[index]));
            prop_assert!(other == sequence || decode_response(response, other).is_none());
            // No word makes the decoder panic.
            let _ = decode_response(word, sequence);
        }
    }

    #[test]
    fn zeroed_memory_holds_no_request() {
        assert_eq!(SlotRequest::from_words(&[0; REQUEST_WORDS]), None);
        let unnumbered =
            SlotRequest { sequence: 0, kind: RequestKind::Write, key: 1, offset: 2, len: 3, imm: None };
        assert_eq!(SlotRequest::from_words(&unnumbered.to_words()), None);
        assert_eq!(decode_response(encode_response(1, Err(ErrorKind::Busy)), 1), Some(Err(ErrorKind::Io)));
        assert_eq!(decode_response(1 | 77 << 32, 1), Some(Err(ErrorKind::Protocol)));
    }
}
