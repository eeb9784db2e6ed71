//! The two messages that the processes of a connection write into each other's staging buffer: the initiator's
//! [`NumberedRequest`], and the target's response to it.
//!
//! If both devices have imms, the imm of a write arrives after the bytes of that write. So one write can carry the
//! bytes of a slot together with the message about them, and a [`SlotImm`] tells that both have arrived. If imms wake
//! the peer's worker, all other messages carry [`WAKE_IMM`], which tells nothing. The endpoint takes these imms: the
//! user never sees them. If the user writes an imm of [that range](is_reserved), the initiator sends it inside a
//! request ([`SlotRequestKind::Imm`](multirail_spi::staging::SlotRequestKind::Imm)), so that the peer can tell the two
//! apart.

use multirail_spi::ErrorKind;
use multirail_spi::staging::{SlotRequest, decode_result, encode_result};

use crate::page_table::{MAX_PAGES, MAX_TABLE_WORDS};

/// The *wake imm*: slot requests and responses carry it to wake the other process's worker. Any value would do.
pub(crate) const WAKE_IMM: u32 = 0x6b6e_6f63;
/// The upper bits of all slot imms. Any value would do, but that of [`WAKE_IMM`].
const SLOT_IMMS: u32 = 0x35a;
/// The bits of a slot imm below those of [`SLOT_IMMS`]: from the lowest bit, four of the slot, one of the kind, then those of
/// the tag, then those of the sequence number.
const SLOT_IMM_BITS: u32 = SEQUENCE_SHIFT + SEQUENCE_BITS;
/// The bits below those of the sequence number.
const SEQUENCE_SHIFT: u32 = 5 + TAG_BITS;
const TAG_BITS: u32 = 7;
const SEQUENCE_BITS: u32 = 9;
/// The number of [tags](ImmTag).
pub(crate) const IMM_TAGS: usize = 1 << TAG_BITS;

/// Whether an imm means something to the endpoints of a connection with imms.
#[inline]
pub(crate) fn is_reserved(imm: u32) -> bool {
    imm == WAKE_IMM || imm >> SLOT_IMM_BITS == SLOT_IMMS
}

/// A number by which the receiver of slot imms finds their connection: a device may know the sender of an imm only by its
/// endpoint, which has several connections ([`Connector::is_same_sender`](multirail_spi::Connector::is_same_sender)). Each
/// side chooses the tag of the imms that come to it, and sends it in its [offer](crate::offer). No two connections of a
/// domain have the same tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ImmTag(u8);

impl ImmTag {
    /// The tag with this number. `None` if there are fewer tags.
    pub(crate) fn new(number: usize) -> Option<Self> {
        u8::try_from(number).ok().filter(|_| number < IMM_TAGS).map(Self)
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// Whether the tag is one that [`new`](Self::new) makes: the peer's offer may have any number.
    pub(crate) fn is_valid(self) -> bool {
        self.index() < IMM_TAGS
    }
}

/// A *slot imm*: it arrives after the bytes that it announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotImm {
    pub kind: SlotImmKind,
    /// The index of the slot.
    pub slot: usize,
    /// The tag that the receiver has chosen for the connection.
    pub tag: ImmTag,
    pub sequence: ImmSequence,
}

/// What a slot imm announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotImmKind {
    /// A slot request that [carries](NumberedRequest::carries_bytes) bytes, and those bytes.
    Request,
    /// The bytes of a read. They stand for the response: all pages were read.
    Data,
}

/// The part of a slot's sequence number that a slot imm has. An imm that comes late is not taken for that of a later slot
/// request: 512 slot requests of one slot come between two that have the same part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImmSequence(u32);

impl ImmSequence {
    /// The part of a sequence number.
    pub(crate) fn of(sequence: u32) -> Self {
        Self(sequence & ((1 << SEQUENCE_BITS) - 1))
    }

    #[cfg(test)]
    pub(crate) fn next(self) -> Self {
        Self::of(self.0 + 1)
    }

    /// Whether this belongs to a later slot request than `other`. The two are less than 256 slot requests apart.
    pub(crate) fn is_after(self, other: Self) -> bool {
        (1..1 << (SEQUENCE_BITS - 1)).contains(&Self::of(self.0.wrapping_sub(other.0)).0)
    }
}

impl SlotImm {
    pub(crate) fn new(kind: SlotImmKind, slot: usize, tag: ImmTag, sequence: u32) -> Self {
        Self { kind, slot, tag, sequence: ImmSequence::of(sequence) }
    }

    pub(crate) fn encode(self) -> u32 {
        let numbers = self.sequence.0 << SEQUENCE_SHIFT | u32::from(self.tag.0) << 5;
        SLOT_IMMS << SLOT_IMM_BITS | numbers | (self.kind as u32) << 4 | self.slot as u32
    }

    /// Decodes an imm. `None` if it is no slot imm.
    pub(crate) fn decode(imm: u32) -> Option<Self> {
        let kind = if imm >> 4 & 1 == 0 { SlotImmKind::Request } else { SlotImmKind::Data };
        let tag = ImmTag((imm >> 5) as u8 & (IMM_TAGS as u8 - 1));
        let sequence = ImmSequence::of(imm >> SEQUENCE_SHIFT);
        let decoded = Self { kind, slot: (imm & 0xf) as usize, tag, sequence };
        (imm >> SLOT_IMM_BITS == SLOT_IMMS).then_some(decoded)
    }
}

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
    /// The number of pages whose table is in the target's slot ([`page_table`](crate::page_table)). Then the key of
    /// `request` means nothing, its offset is the number of the table's words, and its length is that of all pages. 0
    /// if `request` names the only range.
    pub pages: u16,
    /// Whether the RDMA write of the slot request also carries the page table, or bytes, or both. The target then takes
    /// the request only once the [`SlotImm`] of that write has come: the words may arrive before the bytes.
    pub carries_bytes: bool,
}

/// Words of a slot request on the wire: one cache line. The last word is a checksum of the others, because the target
/// may poll the line while the device is still writing it.
pub(crate) const REQUEST_WORDS: usize = 8;

impl NumberedRequest {
    /// The first word has the sequence number in bits 0 to 31, the kind in bits 32 to 39, in bit 40 whether there is an
    /// imm, in bit 41 whether it carries bytes, and the number of pages in bits 48 to 63.
    pub(crate) fn to_words(self) -> [u64; REQUEST_WORDS] {
        let [kind, key, offset, len] = self.request.to_words();
        let first = u64::from(self.sequence)
            | kind << 32
            | u64::from(self.imm.is_some()) << 40
            | u64::from(self.carries_bytes) << 41
            | u64::from(self.pages) << 48;
        let imm = u64::from(self.imm.unwrap_or_default());
        let mut words = [first, key, offset, len, imm, 0, 0, 0];
        words[REQUEST_WORDS - 1] = checksum(&words[..REQUEST_WORDS - 1]);
        words
    }

    /// Words of the page table. 0 if there is none.
    pub(crate) fn table_words(&self) -> usize {
        if self.pages == 0 { 0 } else { self.request.offset.min(MAX_TABLE_WORDS as u64) as usize }
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
        let (pages, carries_bytes) = ((first >> 48) as u16, first >> 41 & 1 != 0);
        (sequence != 0).then_some(Self { sequence, request, imm, pages, carries_bytes })
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
/// The common result of a response that is no result: [`Response::AskAgain`].
const ASK_AGAIN: u32 = 0xfe;

/// The target's response to a slot request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Response {
    /// All pages have this result.
    Common(Result<(), ErrorKind>),
    /// The results of the pages, in the order of the page table.
    Mixed(Vec<Result<(), ErrorKind>>),
    /// The bytes of a read may have arrived or not: the RDMA write that was to announce them has failed. The target does
    /// not repeat that write, because the initiator may use the slot for something else already.
    AskAgain,
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

/// Encodes [`Response::AskAgain`] to the slot request with this sequence number, as one word.
pub(crate) fn encode_ask_again(sequence: u32) -> u64 {
    u64::from(sequence) | u64::from(ASK_AGAIN) << 32
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
    if common == ASK_AGAIN {
        return Some(Response::AskAgain);
    }
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
    use crate::staging_buffer::SLOT_COUNT;

    proptest! {
        #[test]
        fn a_request_is_decoded_whole_or_not_at_all(
            sequence in 1_u32.., kind in 0..4_usize, key: u64, offset: u64, len: u64, imm: Option<u32>, pages: u16,
            carries_bytes: bool,
            torn in prop::collection::vec(any::<bool>(), REQUEST_WORDS), before: [u64; REQUEST_WORDS],
        ) {
            use SlotRequestKind::{Cancel, Imm, Read, Write};
            let kind = [Write, Read, Cancel, Imm][kind];
            let numbered = NumberedRequest { sequence, request: SlotRequest { kind, key, offset, len }, imm, pages, carries_bytes };
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
            let again = encode_ask_again(sequence);
            prop_assert_eq!(decode_response(sequence, 1, |_| again), Some(Response::AskAgain));
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(decode(sequence, &seen).is_none_or(|response| response == expected));
        }
    }

    proptest! {
        #[test]
        fn a_slot_imm_is_decoded_as_it_was_encoded(slot in 0..SLOT_COUNT, tag in 0..IMM_TAGS, sequence: u32, other: u32, is_data: bool) {
            let kind = if is_data { SlotImmKind::Data } else { SlotImmKind::Request };
            let tag = ImmTag::new(tag).unwrap();
            let imm = SlotImm::new(kind, slot, tag, sequence);
            prop_assert_eq!(SlotImm::decode(imm.encode()), Some(imm));
            prop_assert!(is_reserved(imm.encode()) && imm.encode() != WAKE_IMM);
            let next = ImmSequence::of(sequence.wrapping_add(1));
            prop_assert!(next.is_after(imm.sequence) && !imm.sequence.is_after(next) && !next.is_after(next));
            // A peer may name a slot that is not there. Both roles ignore it.
            prop_assert_eq!(SlotImm::decode(other).is_some(), is_reserved(other) && other != WAKE_IMM);
            let any = SlotImm::decode(SLOT_IMMS << SLOT_IMM_BITS | other >> (32 - SLOT_IMM_BITS));
            prop_assert!(any.is_some_and(|any| any.slot < 16 && any.encode() << (32 - SLOT_IMM_BITS) >> (32 - SLOT_IMM_BITS) == other >> (32 - SLOT_IMM_BITS)));
        }
    }

    #[test]
    fn zeroed_memory_holds_no_request() {
        assert!(is_reserved(WAKE_IMM) && !is_reserved(WAKE_IMM + 1) && SlotImm::decode(WAKE_IMM).is_none());
        assert_eq!(NumberedRequest::from_words(&[0; REQUEST_WORDS]), None);
        let request = SlotRequest { kind: SlotRequestKind::Write, key: 1, offset: 2, len: 3 };
        let unnumbered = NumberedRequest { sequence: 0, request, imm: None, pages: 0, carries_bytes: false };
        assert_eq!(NumberedRequest::from_words(&unnumbered.to_words()), None);
        let decode = |words: [u64; RESPONSE_WORDS]| decode_response(1, 2, |index| words[index]);
        let common = |result| Some(Response::Common(Err(result)));
        assert_eq!(decode(encode_response(1, [Err(ErrorKind::Busy)].into_iter()).0), common(ErrorKind::Io));
        let mut unknown = [0; RESPONSE_WORDS];
        unknown[0] = 1 | 77 << 32;
        assert_eq!(decode(unknown), common(ErrorKind::Protocol));
    }
}
