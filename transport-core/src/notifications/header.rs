//! The first bytes of each message that carries a fragment of a notification.

use super::NotificationBytes;
use crate::TraceContext;

/// The bytes of a message, and so of a buffer: a page, which every backend can send in one message.
pub(super) const BLOCK: usize = 4096;
/// The bytes of a notification in one message.
pub(crate) const PAYLOAD: usize = BLOCK - Header::LEN;

/// What a fragment says of itself, in little-endian order: `number`, `floor`, `offset`, `total`. `is_traced` is the bit
/// [`Header::TRACED`] of `total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The fragment's number, from 0 on, for each connection and direction.
    pub number: u64,
    /// All fragments with smaller numbers have ended at the sender: those that have not arrived never will.
    pub floor: u64,
    /// Where the fragment begins in its notification, in bytes.
    pub offset: u32,
    /// The bytes of all fragments of the notification. [`Header::SKIP`] if the message carries no fragment, but only
    /// `floor`.
    pub total: u32,
    /// Whether the notification begins with a trace context.
    pub is_traced: bool,
}

impl Header {
    pub const LEN: usize = 24;
    pub const SKIP: u32 = u32::MAX;
    const TRACED: u32 = 1 << 31;

    /// The header of a message without a fragment, which tells `floor`.
    pub fn skip(floor: u64) -> Self {
        Self { number: 0, floor, offset: 0, total: Self::SKIP, is_traced: false }
    }

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let traced = if self.is_traced { Self::TRACED } else { 0 };
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.floor.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.offset.to_le_bytes());
        bytes[20..].copy_from_slice(&(self.total | traced).to_le_bytes());
        bytes
    }

    /// Reads the header of a message of `len` bytes, of which `head` has the first ones: all or [`Header::LEN`]. The error
    /// says what is wrong with the message.
    pub fn parse(head: &[u8], len: usize) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("a notification's message of {len} bytes {what}"));
        let (Some(head), Some(payload)) = (head.first_chunk::<{ Self::LEN }>(), len.checked_sub(Self::LEN))
        else {
            return wrong("is shorter than its header");
        };
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(20) == Self::SKIP {
            let skip = Self { number: long(0), ..Self::skip(long(8)) };
            return if payload == 0 { Ok(skip) } else { wrong("carries no fragment, but bytes") };
        }
        let (is_traced, total) = (word(20) & Self::TRACED != 0, word(20) & !Self::TRACED);
        let header = Self { number: long(0), floor: long(8), offset: word(16), total, is_traced };
        let (offset, total) = (header.offset as usize, total as usize);
        let most = NotificationBytes::MAX - if is_traced { 0 } else { TraceContext::LEN };
        if total > most || offset > total || payload != (total - offset).min(PAYLOAD) {
            return wrong(&format!("is no fragment at {offset} of {total} bytes"));
        }
        if offset > 0 && payload == 0 {
            return wrong("is an empty fragment behind the first");
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::MAX_LEN;
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn what_is_written_is_read(number: u64, floor: u64, len in 0..=MAX_LEN, fragment: prop::sample::Index, is_traced: bool) {
            let len = len + if is_traced { TraceContext::LEN } else { 0 };
            let fragments = len.div_ceil(PAYLOAD).max(1);
            let offset = fragment.index(fragments) * PAYLOAD;
            let header = Header { number, floor, offset: offset as u32, total: len as u32, is_traced };
            let mut message = header.to_bytes().to_vec();
            message.resize(Header::LEN + (len - offset).min(PAYLOAD), 7);
            prop_assert_eq!(Header::parse(&message, message.len()).unwrap(), header);
            prop_assert!(Header::parse(&message[..Header::LEN], message.len() + 1).is_err(), "a byte too many");
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2 * Header::LEN)) {
            if let Ok(header) = Header::parse(&bytes, bytes.len()) {
                let end = header.offset as usize + bytes.len() - Header::LEN;
                prop_assert!(header.total == Header::SKIP || end <= NotificationBytes::MAX);
            }
        }
    }

    #[test]
    fn the_longest_are_read_and_no_longer_ones() {
        for (is_traced, most) in [(false, MAX_LEN), (true, NotificationBytes::MAX)] {
            for (total, is_valid) in [(most, true), (most + 1, false)] {
                let offset = (total - 1) / PAYLOAD * PAYLOAD;
                let header =
                    Header { number: 7, floor: 3, offset: offset as u32, total: total as u32, is_traced };
                let parsed = Header::parse(&header.to_bytes(), Header::LEN + total - offset);
                assert_eq!(parsed.ok(), is_valid.then_some(header), "{total} {is_traced}");
            }
        }
    }
}
