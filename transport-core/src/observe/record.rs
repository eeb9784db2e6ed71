//! One thing that happened in an engine: a value for readers, four words in the ring.

use serde::{Deserialize, Serialize};

use super::OperationKind;
use crate::op::OpId;
use crate::{ErrorKind, Time};

/// One entry of the flight recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its place since the fabric was opened; gaps are records that were lost.
    pub sequence: u64,
    /// When, by the fabric's clock; one reading serves a whole turn of the engine.
    pub time: Time,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the crate")]
pub enum What {
    /// The engine took an operation over. Peers count up from 1 per process.
    Begun { op: OpId, kind: OperationKind, peer: u32, bytes: u64 },
    /// Nothing of an operation is posted any more; with the error it failed by.
    Ended { op: OpId, error: Option<ErrorKind> },
    /// A batch was posted; `op` is the first operation in it.
    Posted { rail: u16, op: OpId, requests: u32, bytes: u64 },
    /// A poll brought ends of requests.
    Completed { rail: u16, requests: u32, failed: u32 },
    /// The endpoint took a batch only in part; `op` stood at the cut.
    Pressure { rail: u16, op: OpId, refused: u32 },
    /// As many requests are posted as the send queue holds, and more wait.
    QueueFull { rail: u16 },
    /// Immediate data arrived.
    Imm { rail: u16, peer: u32, imm: u32 },
    /// A message arrived.
    Message { rail: u16, peer: u32, bytes: u64 },
    /// A cancel was asked for.
    Cancelled { op: OpId },
    /// The deadline passed.
    Expired { op: OpId },
    /// Posted work to a peer was torn down.
    Aborted { peer: u32 },
    /// A peer was admitted.
    PeerLinked { peer: u32 },
    /// A peer ended.
    PeerFailed { peer: u32, error: ErrorKind },
    /// The backend let go of a peer.
    PeerGone { rail: u16, peer: u32 },
    /// A device is lost.
    DeviceLost { rail: u16 },
    /// The worker went to sleep.
    Parked,
    /// It woke up and found something to do.
    Woken,
    /// An operation made no progress for the fabric's `stall_after`.
    Stalled { op: OpId },
    /// The word that an operation waited for has reached its value.
    Triggered { op: OpId },
}

/// A record as the ring holds it: time, head, subject, value.
pub(crate) type Words = [u64; 4];

/// `code | small << 8 | rail << 16 | count << 32`.
const fn head(code: u8, small: u8, rail: u16, count: u32) -> u64 {
    code as u64 | (small as u64) << 8 | (rail as u64) << 16 | (count as u64) << 32
}

impl What {
    /// The words of it at `time`.
    #[inline(always)]
    pub(crate) fn pack(self, time: Time) -> Words {
        let (head, subject, value) = match self {
            Self::Begun { op, kind, peer, bytes } => (head(1, kind.code(), 0, peer), op.word(), bytes),
            Self::Ended { op, error } => {
                (head(2, error.map_or(0, |kind| kind.code() + 1), 0, 0), op.word(), 0)
            }
            Self::Posted { rail, op, requests, bytes } => (head(3, 0, rail, requests), op.word(), bytes),
            Self::Completed { rail, requests, failed } => (head(4, 0, rail, requests), 0, failed.into()),
            Self::Pressure { rail, op, refused } => (head(5, 0, rail, refused), op.word(), 0),
            Self::QueueFull { rail } => (head(6, 0, rail, 0), 0, 0),
            Self::Imm { rail, peer, imm } => (head(7, 0, rail, peer), 0, imm.into()),
            Self::Message { rail, peer, bytes } => (head(8, 0, rail, peer), 0, bytes),
            Self::Cancelled { op } => (head(9, 0, 0, 0), op.word(), 0),
            Self::Expired { op } => (head(10, 0, 0, 0), op.word(), 0),
            Self::Aborted { peer } => (head(11, 0, 0, peer), 0, 0),
            Self::PeerLinked { peer } => (head(12, 0, 0, peer), 0, 0),
            Self::PeerFailed { peer, error } => (head(13, error.code(), 0, peer), 0, 0),
            Self::PeerGone { rail, peer } => (head(14, 0, rail, peer), 0, 0),
            Self::DeviceLost { rail } => (head(15, 0, rail, 0), 0, 0),
            Self::Parked => (head(16, 0, 0, 0), 0, 0),
            Self::Woken => (head(17, 0, 0, 0), 0, 0),
            Self::Stalled { op } => (head(18, 0, 0, 0), op.word(), 0),
            Self::Triggered { op } => (head(19, 0, 0, 0), op.word(), 0),
        };
        [time.as_nanos(), head, subject, value]
    }
}

impl Record {
    /// The record of these words; `None` for words that no record has.
    pub(crate) fn unpack(sequence: u64, words: Words) -> Option<Self> {
        let [time, head, subject, value] = words;
        let (small, rail, count) = ((head >> 8) as u8, (head >> 16) as u16, (head >> 32) as u32);
        let op = OpId::from_word(subject);
        let what = match head as u8 {
            1 => What::Begun { op, kind: OperationKind::from_code(small)?, peer: count, bytes: value },
            2 if small == 0 => What::Ended { op, error: None },
            2 => What::Ended { op, error: Some(ErrorKind::from_code(small - 1)?) },
            3 => What::Posted { rail, op, requests: count, bytes: value },
            4 => What::Completed { rail, requests: count, failed: value as u32 },
            5 => What::Pressure { rail, op, refused: count },
            6 => What::QueueFull { rail },
            7 => What::Imm { rail, peer: count, imm: value as u32 },
            8 => What::Message { rail, peer: count, bytes: value },
            9 => What::Cancelled { op },
            10 => What::Expired { op },
            11 => What::Aborted { peer: count },
            12 => What::PeerLinked { peer: count },
            13 => What::PeerFailed { peer: count, error: ErrorKind::from_code(small)? },
            14 => What::PeerGone { rail, peer: count },
            15 => What::DeviceLost { rail },
            16 => What::Parked,
            17 => What::Woken,
            18 => What::Stalled { op },
            19 => What::Triggered { op },
            _ => return None,
        };
        Some(Self { sequence, time: Time::from_nanos(time), what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_its_words() {
        let op = OpId { index: 7, generation: u32::MAX };
        let (rail, peer) = (u16::MAX, u32::MAX);
        let all = [
            What::Begun { op, kind: OperationKind::Revoke, peer, bytes: u64::MAX },
            What::Ended { op, error: None },
            What::Ended { op, error: Some(ErrorKind::Io) },
            What::Ended { op, error: Some(ErrorKind::InvalidRequest) },
            What::Posted { rail, op, requests: 64, bytes: 1 << 40 },
            What::Completed { rail, requests: 3, failed: u32::MAX },
            What::Pressure { rail, op, refused: 9 },
            What::QueueFull { rail },
            What::Imm { rail, peer, imm: u32::MAX },
            What::Message { rail, peer, bytes: 5 },
            What::Cancelled { op },
            What::Expired { op },
            What::Aborted { peer },
            What::PeerLinked { peer },
            What::PeerFailed { peer, error: ErrorKind::PeerDied },
            What::PeerGone { rail, peer },
            What::DeviceLost { rail },
            What::Parked,
            What::Woken,
            What::Stalled { op },
            What::Triggered { op },
        ];
        for (sequence, what) in (0..).zip(all) {
            let time = Time::from_nanos(sequence * 1000);
            assert_eq!(Record::unpack(sequence, what.pack(time)), Some(Record { sequence, time, what }));
        }
        assert_eq!(Record::unpack(0, [0; 4]), None);
        assert_eq!(Record::unpack(0, [0, head(2, 255, 0, 0), 0, 0]), None);
    }
}
