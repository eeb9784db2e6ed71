//! The two messages that the processes of a connection write into each other's staging buffer: the initiator's
//! [`NumberedRequest`], and the target's response to it.
//!
//! If both devices can wake their workers by an imm, each of these RDMA writes carries [`WAKE_IMM`]. The endpoint drops
//! this imm: the user never sees it. If the user writes an imm of the same value, the initiator sends it inside a
//! request ([`SlotRequestKind::Imm`](multirail_spi::staging::SlotRequestKind::Imm)), so that the peer can tell the two
//! apart.

use multirail_spi::ErrorKind;
use multirail_spi::staging::{SlotRequest, decode_result, encode_result};

/// The *wake imm*: slot requests and responses carry it to wake the other process's worker. Any value would do.
pub(crate) const WAKE_IMM: u32 = 0x6b6e_6f63;

/// A slot request, as the initiator sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NumberedRequest {
    /// The sequence number, never 0. Each new slot request of a slot has another number than the one before. A
    /// repetition or a
    /// `Cancel` has the number of the request that it is about: of all requests with one number, the target serves only the
    /// first that it sees.
    pub sequence: u32,
    pub request: SlotRequest,
    /// The imm that the target reports once the bytes are in its region. `None` for a read.
    pub imm: Option<u32>,
}

/// Words of a slot request on the wire: one cache line. The last word is a checksum of the others, because the target
/// may poll the line while the device is still writing it.
pub(crate) const REQUEST_WORDS: usize = 8;

impl NumberedRequest {
    /// The first word has the sequence number in bits 0 to 31, the kind in bits 32 to 39, and in bit 40 whether there
    /// is an imm.
    pub(crate) fn to_words(self) -> [u64; REQUEST_WORDS] {
        let [kind, key, offset, len] = self.request.to_words();
        let first = u64::from(self.sequence) | kind << 32 | u64::from(self.imm.is_some()) << 40;
        let imm = u64::from(self.imm.unwrap_or_default());
        let mut words = [first, key, offset, len, imm, 0, 0, 0];
        words[REQUEST_WORDS - 1] = checksum(&words);
        words
    }

    /// Decodes a slot request. Returns `None` if the words are incomplete or invalid.
    pub(crate) fn from_words(words: &[u64; REQUEST_WORDS]) -> Option<Self> {
        if words[REQUEST_WORDS - 1] != checksum(words) {
            return None;
        }
        let [first, key, offset, len, imm, ..] = *words;
        let request = SlotRequest::from_words([first >> 32 & 0xff, key, offset, len])?;
        let imm = (first >> 40 & 1 != 0).then_some(imm as u32);
        let sequence = first as u32;
        (sequence != 0).then_some(Self { sequence, request, imm })
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

/// Encodes the response to the slot request with this sequence number.
pub(crate) fn encode_response(sequence: u32, result: Result<(), ErrorKind>) -> u64 {
    u64::from(sequence) | u64::from(encode_result(result)) << 32
}

/// Decodes a response. Returns `None` if it belongs to a slot request with another sequence number, and a `Protocol`
/// error if its result is unknown.
pub(crate) fn decode_response(word: u64, sequence: u32) -> Option<Result<(), ErrorKind>> {
    let result = decode_result((word >> 32) as u32).unwrap_or(Err(ErrorKind::Protocol));
    (word as u32 == sequence).then_some(result)
}

#[cfg(test)]
mod tests {
    use multirail_spi::staging::SlotRequestKind;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_is_decoded_whole_or_not_at_all(
            sequence in 1_u32.., kind in 0..4_usize, key: u64, offset: u64, len: u64, imm: Option<u32>,
            torn in prop::collection::vec(any::<bool>(), REQUEST_WORDS), before: [u64; REQUEST_WORDS],
        ) {
            use SlotRequestKind::{Cancel, Imm, Read, Write};
            let kind = [Write, Read, Cancel, Imm][kind];
            let numbered = NumberedRequest { sequence, request: SlotRequest { kind, key, offset, len }, imm };
            let words = numbered.to_words();
            prop_assert_eq!(NumberedRequest::from_words(&words), Some(numbered));
            // A partly written line still has some words of the previous request.
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(NumberedRequest::from_words(&seen).is_none() || seen == words);
        }

        #[test]
        fn a_response_belongs_to_one_sequence_number(
            sequence: u32, other: u32, code in 0..6_u32, word: u64,
        ) {
            let result = decode_result(code).unwrap();
            let response = encode_response(sequence, result);
            prop_assert_eq!(decode_response(response, sequence), Some(result));
            prop_assert!(other == sequence || decode_response(response, other).is_none());
            // No word makes the decoder panic.
            let _ = decode_response(word, sequence);
        }
    }

    #[test]
    fn zeroed_memory_holds_no_request() {
        assert_eq!(NumberedRequest::from_words(&[0; REQUEST_WORDS]), None);
        let request = SlotRequest { kind: SlotRequestKind::Write, key: 1, offset: 2, len: 3 };
        let unnumbered = NumberedRequest { sequence: 0, request, imm: None };
        assert_eq!(NumberedRequest::from_words(&unnumbered.to_words()), None);
        assert_eq!(decode_response(encode_response(1, Err(ErrorKind::Busy)), 1), Some(Err(ErrorKind::Io)));
        assert_eq!(decode_response(1 | 77 << 32, 1), Some(Err(ErrorKind::Protocol)));
    }
}
