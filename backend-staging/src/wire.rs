//! The two messages that the processes of a connection write into each other's staging buffer: the initiator's
//! [`NumberedRequest`], and the target's response to it.
//!
//! If both devices can wake their workers by an imm, each of these RDMA writes carries [`WAKE_IMM`]. The endpoint drops
//! this imm: the user never sees it. If the user writes an imm of the same value, the initiator sends it inside a
//! request ([`SlotRequestKind::Imm`](multirail_spi::staging::SlotRequestKind::Imm)), so that the peer can tell the two
//! apart.

use multirail_spi::ErrorKind;
use multirail_spi::staging::{SlotRequest, decode_result, encode_result};

use crate::page_table::MAX_PAGES;

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
    /// The number of pages whose table is in the target's slot ([`page_table`](crate::page_table)). Then the key and
    /// the offset of `request` mean nothing, and its length is that of all pages. 0 if `request` names the only range.
    pub pages: u16,
}

/// Words of a slot request on the wire: one cache line. The last word is a checksum of the others, because the target
/// may poll the line while the device is still writing it.
pub(crate) const REQUEST_WORDS: usize = 8;

impl NumberedRequest {
    /// The first word has the sequence number in bits 0 to 31, the kind in bits 32 to 39, in bit 40 whether there is an
    /// imm, and the number of pages in bits 48 to 63.
    pub(crate) fn to_words(self) -> [u64; REQUEST_WORDS] {
        let [kind, key, offset, len] = self.request.to_words();
        let first = u64::from(self.sequence)
            | kind << 32
            | u64::from(self.imm.is_some()) << 40
            | u64::from(self.pages) << 48;
        let imm = u64::from(self.imm.unwrap_or_default());
        let mut words = [first, key, offset, len, imm, 0, 0, 0];
        words[REQUEST_WORDS - 1] = checksum(&words[..REQUEST_WORDS - 1]);
        words
    }

    /// Any words, with the checksum that belongs to them.
    #[cfg(fuzzing)]
    pub(crate) fn seal(mut words: [u64; REQUEST_WORDS]) -> [u64; REQUEST_WORDS] {
        words[REQUEST_WORDS - 1] = checksum(&words[..REQUEST_WORDS - 1]);
        words
    }

    /// Decodes a slot request. Returns `None` if the words are incomplete or invalid.
    pub(crate) fn from_words(words: &[u64; REQUEST_WORDS]) -> Option<Self> {
        if words[REQUEST_WORDS - 1] != checksum(&words[..REQUEST_WORDS - 1]) {
            return None;
        }
        let [first, key, offset, len, imm, ..] = *words;
        let request = SlotRequest::from_words([first >> 32 & 0xff, key, offset, len])?;
        let imm = (first >> 40 & 1 != 0).then_some(imm as u32);
        let sequence = first as u32;
        (sequence != 0).then_some(Self { sequence, request, imm, pages: (first >> 48) as u16 })
    }
}

/// A checksum of words. It detects a partly written record. It does not protect against a malicious peer, who may write
/// any record anyway. Each word is mixed in as by splitmix64 (Steele, Lea, Flood 2014).
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0x5a_1e_d0_5e_a1, |sum, word| {
        let mut mixed = (sum ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    })
}

/// Words of a response on the wire: the sequence number and the common result, the results of the pages, and a checksum
/// of both. Without results of pages, only the first word is sent.
pub(crate) const RESPONSE_WORDS: usize = 2 + RESULT_WORDS;
const RESULT_WORDS: usize = MAX_PAGES / RESULTS_PER_WORD;
/// A page's result takes four bits.
const RESULTS_PER_WORD: usize = 16;
/// The common result of a response whose pages have different results.
const MIXED: u32 = 0xff;

/// The target's response to a slot request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Response {
    /// All pages have this result.
    Common(Result<(), ErrorKind>),
    /// The results of the pages, in the order of the page table.
    Mixed(Vec<Result<(), ErrorKind>>),
}

/// Encodes the response to the slot request with this sequence number. Returns the words, and how many of them are sent.
pub(crate) fn encode_response(
    sequence: u32,
    results: impl ExactSizeIterator<Item = Result<(), ErrorKind>> + Clone,
) -> ([u64; RESPONSE_WORDS], usize) {
    let mut words = [0; RESPONSE_WORDS];
    let first = results.clone().next().unwrap_or(Ok(()));
    let is_common = results.clone().all(|result| result == first);
    let common = if is_common { encode_result(first) } else { MIXED };
    words[0] = u64::from(sequence) | u64::from(common) << 32;
    if is_common {
        return (words, 1);
    }
    for (index, result) in results.take(MAX_PAGES).enumerate() {
        let shift = index % RESULTS_PER_WORD * 4;
        words[1 + index / RESULTS_PER_WORD] |= u64::from(encode_result(result)) << shift;
    }
    words[RESPONSE_WORDS - 1] = checksum(&words[..RESPONSE_WORDS - 1]);
    (words, RESPONSE_WORDS)
}

/// Decodes the response to a slot request with `pages` pages; `word` reads a word of the record. Returns `None` if the
/// response belongs to a slot request with another sequence number, or is incomplete. An unknown result becomes a
/// `Protocol` error.
pub(crate) fn decode_response(sequence: u32, pages: usize, word: impl Fn(usize) -> u64) -> Option<Response> {
    let decode = |code: u32| decode_result(code).unwrap_or(Err(ErrorKind::Protocol));
    let first = word(0);
    if first as u32 != sequence {
        return None;
    }
    let common = (first >> 32) as u32;
    if common != MIXED {
        return Some(Response::Common(decode(common)));
    }
    let words: [u64; RESPONSE_WORDS] =
        std::array::from_fn(|index| if index == 0 { first } else { word(index) });
    let is_complete = words[RESPONSE_WORDS - 1] == checksum(&words[..RESPONSE_WORDS - 1]);
    let result_of = |page: usize| {
        decode((words[1 + page / RESULTS_PER_WORD] >> (page % RESULTS_PER_WORD * 4)) as u32 & 0xf)
    };
    is_complete.then(|| Response::Mixed((0..pages.min(MAX_PAGES)).map(result_of).collect()))
}

#[cfg(test)]
mod tests {
    use multirail_spi::staging::SlotRequestKind;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_is_decoded_whole_or_not_at_all(
            sequence in 1_u32.., kind in 0..4_usize, key: u64, offset: u64, len: u64, imm: Option<u32>, pages: u16,
            torn in prop::collection::vec(any::<bool>(), REQUEST_WORDS), before: [u64; REQUEST_WORDS],
        ) {
            use SlotRequestKind::{Cancel, Imm, Read, Write};
            let kind = [Write, Read, Cancel, Imm][kind];
            let numbered = NumberedRequest { sequence, request: SlotRequest { kind, key, offset, len }, imm, pages };
            let words = numbered.to_words();
            prop_assert_eq!(NumberedRequest::from_words(&words), Some(numbered));
            // A partly written line still has some words of the previous request.
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(NumberedRequest::from_words(&seen).is_none() || seen == words);
        }

        #[test]
        fn a_response_belongs_to_one_sequence_number(
            sequence: u32, other: u32, codes in prop::collection::vec(0..6_u32, 1..=MAX_PAGES),
            torn in prop::collection::vec(any::<bool>(), RESPONSE_WORDS),
            before: [u64; RESPONSE_WORDS],
        ) {
            let results: Vec<_> = codes.iter().map(|code| decode_result(*code).unwrap()).collect();
            let (words, sent) = encode_response(sequence, results.iter().copied());
            let decode = |sequence, words: &[u64]| decode_response(sequence, results.len(), |index| words[index]);
            let expected = match sent {
                1 => Response::Common(results[0]),
                _ => Response::Mixed(results.clone()),
            };
            prop_assert_eq!(decode(sequence, &words), Some(expected.clone()));
            prop_assert!(other == sequence || decode(other, &words).is_none());
            // No words make the decoder panic, and a partly written response is not taken.
            let _ = decode(before[0] as u32, &before);
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(decode(sequence, &seen).is_none_or(|response| response == expected));
        }
    }

    #[test]
    fn zeroed_memory_holds_no_request() {
        assert_eq!(NumberedRequest::from_words(&[0; REQUEST_WORDS]), None);
        let request = SlotRequest { kind: SlotRequestKind::Write, key: 1, offset: 2, len: 3 };
        let unnumbered = NumberedRequest { sequence: 0, request, imm: None, pages: 0 };
        assert_eq!(NumberedRequest::from_words(&unnumbered.to_words()), None);
        let decode = |words: [u64; RESPONSE_WORDS]| decode_response(1, 2, |index| words[index]);
        let common = |result| Some(Response::Common(Err(result)));
        assert_eq!(decode(encode_response(1, [Err(ErrorKind::Busy)].into_iter()).0), common(ErrorKind::Io));
        let mut unknown = [0; RESPONSE_WORDS];
        unknown[0] = 1 | 77 << 32;
        assert_eq!(decode(unknown), common(ErrorKind::Protocol));
    }
}
