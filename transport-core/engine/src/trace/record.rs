//! One entry of the flight recorder: a value for readers, four words in the ring.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::OperationKind;
use crate::op::OpId;
use crate::{ErrorKind, PeerId, Time};

/// One entry of the flight recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The record's number since the fabric was opened. A gap means that records were overwritten.
    pub sequence: u64,
    /// The time by the fabric's clock. All records of one step of the engine have the same time.
    pub time: Time,
    /// The event.
    pub event: TraceEvent,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields have the crate's usual names")]
pub enum TraceEvent {
    /// The engine activated an operation. Peers are numbered from 1 in each process.
    Started { op: OpId, kind: OperationKind, peer: u32, bytes: u64 },
    /// An operation ended; `error` is the kind of error that it failed with. None of its requests is posted any more.
    Ended { op: OpId, error: Option<ErrorKind> },
    /// The engine posted a batch; `op` is the first operation in it.
    Posted { rail: u16, op: OpId, requests: u32, bytes: u64 },
    /// A poll returned completions.
    Completed { rail: u16, requests: u32, failed: u32 },
    /// The endpoint refused a part of a batch; `op` is the operation of the first refused request.
    Backpressure { rail: u16, op: OpId, refused: u32 },
    /// The send queue is full, and more requests wait.
    QueueFull { rail: u16 },
    /// Immediate data arrived.
    Imm { rail: u16, peer: u32, imm: u32 },
    /// A message arrived.
    Message { rail: u16, peer: u32, bytes: u64 },
    /// The user cancelled an operation.
    Cancelled { op: OpId },
    /// The deadline of an operation passed.
    Expired { op: OpId },
    /// The engine aborted the requests posted to a peer.
    Aborted { peer: u32 },
    /// The engine learned of a connected peer.
    PeerLinked { peer: u32 },
    /// The connection to a peer ended.
    PeerFailed { peer: u32, error: ErrorKind },
    /// The backend released the slot of a peer on a rail.
    PeerGone { rail: u16, peer: u32 },
    /// A device was lost.
    DeviceLost { rail: u16 },
    /// A peer has confirmed that nothing arrives any more of what a lost device has posted; or it cannot.
    Fenced { rail: u16, peer: u32, confirmed: bool },
    /// Other rails post again what a lost device has posted of an operation.
    Replayed { rail: u16, op: OpId, requests: u32, bytes: u64 },
    /// Nothing is sent to a peer over a rail any more: its device is lost, the peer's, or the path between them.
    PathBroken { rail: u16, peer: u32 },
    /// Requests go to a peer over a rail again.
    PathMended { rail: u16, peer: u32 },
    /// No rail of the engine's group can carry the rest of an operation: the rail group whose first rail is `rail` carries it
    /// as the operation `rest`.
    Continued { op: OpId, rail: u16, rest: OpId },
    /// The user took a device out of service.
    RailRetired { rail: u16 },
    /// The user took a device back into service.
    RailRestored { rail: u16 },
    /// The worker went to sleep.
    Parked,
    /// The worker woke up and found something to do.
    Woken,
    /// An operation made no progress for the fabric's `stall_after`.
    Stalled { op: OpId },
    /// The signal that an operation waited for has reached its value.
    Triggered { op: OpId },
}

/// A record as the ring stores it: time, header, operation, value.
pub type RecordWords = [u64; 4];

/// The number of a peer as records store it.
pub fn peer_number(peer: PeerId) -> u32 {
    peer.number() as u32
}

/// The header word: `code | small << 8 | rail << 16 | count << 32`.
const fn head(code: u8, small: u8, rail: u16, count: u32) -> u64 {
    code as u64 | (small as u64) << 8 | (rail as u64) << 16 | (count as u64) << 32
}

impl TraceEvent {
    /// The words of the event at `time`.
    #[inline(always)]
    pub(crate) fn pack(self, time: Time) -> RecordWords {
        let (head, subject, value) = match self {
            Self::Started { op, kind, peer, bytes } => (head(1, kind.code(), 0, peer), op.word(), bytes),
            Self::Ended { op, error } => {
                (head(2, error.map_or(0, |kind| kind.code() + 1), 0, 0), op.word(), 0)
            }
            Self::Posted { rail, op, requests, bytes } => (head(3, 0, rail, requests), op.word(), bytes),
            Self::Completed { rail, requests, failed } => (head(4, 0, rail, requests), 0, failed.into()),
            Self::Backpressure { rail, op, refused } => (head(5, 0, rail, refused), op.word(), 0),
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
            Self::RailRetired { rail } => (head(20, 0, rail, 0), 0, 0),
            Self::RailRestored { rail } => (head(21, 0, rail, 0), 0, 0),
            Self::Fenced { rail, peer, confirmed } => (head(22, confirmed.into(), rail, peer), 0, 0),
            Self::Replayed { rail, op, requests, bytes } => (head(23, 0, rail, requests), op.word(), bytes),
            Self::PathBroken { rail, peer } => (head(24, 0, rail, peer), 0, 0),
            Self::PathMended { rail, peer } => (head(25, 0, rail, peer), 0, 0),
            Self::Continued { op, rail, rest } => (head(26, 0, rail, 0), op.word(), rest.word()),
        };
        [time.as_nanos(), head, subject, value]
    }
}

impl Record {
    /// The record of these words. `None` if no record has such words.
    pub(crate) fn unpack(sequence: u64, words: RecordWords) -> Option<Self> {
        let [time, head, subject, value] = words;
        let (small, rail, count) = ((head >> 8) as u8, (head >> 16) as u16, (head >> 32) as u32);
        let op = OpId::from_word(subject);
        let event = match head as u8 {
            1 => {
                TraceEvent::Started { op, kind: OperationKind::from_code(small)?, peer: count, bytes: value }
            }
            2 if small == 0 => TraceEvent::Ended { op, error: None },
            2 => TraceEvent::Ended { op, error: Some(ErrorKind::from_code(small - 1)?) },
            3 => TraceEvent::Posted { rail, op, requests: count, bytes: value },
            4 => TraceEvent::Completed { rail, requests: count, failed: value as u32 },
            5 => TraceEvent::Backpressure { rail, op, refused: count },
            6 => TraceEvent::QueueFull { rail },
            7 => TraceEvent::Imm { rail, peer: count, imm: value as u32 },
            8 => TraceEvent::Message { rail, peer: count, bytes: value },
            9 => TraceEvent::Cancelled { op },
            10 => TraceEvent::Expired { op },
            11 => TraceEvent::Aborted { peer: count },
            12 => TraceEvent::PeerLinked { peer: count },
            13 => TraceEvent::PeerFailed { peer: count, error: ErrorKind::from_code(small)? },
            14 => TraceEvent::PeerGone { rail, peer: count },
            15 => TraceEvent::DeviceLost { rail },
            16 => TraceEvent::Parked,
            17 => TraceEvent::Woken,
            18 => TraceEvent::Stalled { op },
            19 => TraceEvent::Triggered { op },
            20 => TraceEvent::RailRetired { rail },
            21 => TraceEvent::RailRestored { rail },
            22 => TraceEvent::Fenced { rail, peer: count, confirmed: small != 0 },
            23 => TraceEvent::Replayed { rail, op, requests: count, bytes: value },
            24 => TraceEvent::PathBroken { rail, peer: count },
            25 => TraceEvent::PathMended { rail, peer: count },
            26 => TraceEvent::Continued { op, rail, rest: OpId::from_word(value) },
            _ => return None,
        };
        Some(Self { sequence, time: Time::from_nanos(time), event })
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.9} {}", Duration::from_nanos(self.time.as_nanos()).as_secs_f64(), self.event)
    }
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { op, kind, peer, bytes } => {
                write!(f, "op {op} started: {} of {bytes} bytes with peer {peer}", kind.name())
            }
            Self::Ended { op, error: None } => write!(f, "op {op} done"),
            Self::Ended { op, error: Some(kind) } => write!(f, "op {op} failed: {kind}"),
            Self::Posted { rail, op, requests, bytes } => {
                write!(f, "rail {rail}: posted {requests} requests, {bytes} bytes, first of op {op}")
            }
            Self::Completed { rail, requests, failed: 0 } => write!(f, "rail {rail}: {requests} completions"),
            Self::Completed { rail, requests, failed } => {
                write!(f, "rail {rail}: {requests} completions, {failed} failures")
            }
            Self::Backpressure { rail, op, refused } => {
                write!(f, "rail {rail}: back-pressure at op {op}, {refused} requests refused")
            }
            Self::QueueFull { rail } => write!(f, "rail {rail}: send queue full"),
            Self::Imm { rail, peer, imm } => write!(f, "rail {rail}: imm {imm:#x} from peer {peer}"),
            Self::Message { rail, peer, bytes } => {
                write!(f, "rail {rail}: message of {bytes} bytes from peer {peer}")
            }
            Self::Cancelled { op } => write!(f, "op {op} was cancelled"),
            Self::Expired { op } => write!(f, "op {op} is past its deadline"),
            Self::Aborted { peer } => write!(f, "requests posted to peer {peer} aborted"),
            Self::PeerLinked { peer } => write!(f, "peer {peer} linked"),
            Self::PeerFailed { peer, error } => write!(f, "peer {peer} ended: {error}"),
            Self::PeerGone { rail, peer } => write!(f, "rail {rail}: the backend released peer {peer}"),
            Self::DeviceLost { rail } => write!(f, "rail {rail}: device lost"),
            Self::Fenced { rail, peer, confirmed: true } => {
                write!(f, "rail {rail}: peer {peer} lets nothing arrive any more")
            }
            Self::Fenced { rail, peer, confirmed: false } => {
                write!(f, "rail {rail}: peer {peer} cannot keep out what may still arrive")
            }
            Self::Replayed { rail, op, requests, bytes } => {
                write!(
                    f,
                    "rail {rail}: other rails post {requests} requests, {bytes} bytes, of op {op} again"
                )
            }
            Self::PathBroken { rail, peer } => write!(f, "rail {rail}: nothing goes to peer {peer} any more"),
            Self::PathMended { rail, peer } => write!(f, "rail {rail}: requests go to peer {peer} again"),
            Self::Continued { op, rail, rest } => {
                write!(f, "op {op}: the rail group of rail {rail} carries the rest, as op {rest}")
            }
            Self::RailRetired { rail } => write!(f, "rail {rail}: taken out of service"),
            Self::RailRestored { rail } => write!(f, "rail {rail}: taken back into service"),
            Self::Parked => f.write_str("worker parked"),
            Self::Woken => f.write_str("worker woken"),
            Self::Stalled { op } => write!(f, "op {op} stalled"),
            Self::Triggered { op } => write!(f, "op {op} was triggered"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_survives_packing() {
        let op = OpId { index: 7, generation: u32::MAX };
        let (rail, peer) = (u16::MAX, u32::MAX);
        let all = [
            TraceEvent::Started { op, kind: OperationKind::Revoke, peer, bytes: u64::MAX },
            TraceEvent::Ended { op, error: None },
            TraceEvent::Ended { op, error: Some(ErrorKind::Io) },
            TraceEvent::Ended { op, error: Some(ErrorKind::InvalidRequest) },
            TraceEvent::Posted { rail, op, requests: 64, bytes: 1 << 40 },
            TraceEvent::Completed { rail, requests: 3, failed: u32::MAX },
            TraceEvent::Backpressure { rail, op, refused: 9 },
            TraceEvent::QueueFull { rail },
            TraceEvent::Imm { rail, peer, imm: u32::MAX },
            TraceEvent::Message { rail, peer, bytes: 5 },
            TraceEvent::Cancelled { op },
            TraceEvent::Expired { op },
            TraceEvent::Aborted { peer },
            TraceEvent::PeerLinked { peer },
            TraceEvent::PeerFailed { peer, error: ErrorKind::PeerDied },
            TraceEvent::PeerGone { rail, peer },
            TraceEvent::DeviceLost { rail },
            TraceEvent::Fenced { rail, peer, confirmed: true },
            TraceEvent::Replayed { rail, op, requests: 3, bytes: 1 << 40 },
            TraceEvent::PathBroken { rail, peer },
            TraceEvent::PathMended { rail, peer },
            TraceEvent::Continued { op, rail, rest: OpId { index: 1 << 23, generation: 9 } },
            TraceEvent::RailRetired { rail },
            TraceEvent::RailRestored { rail },
            TraceEvent::Parked,
            TraceEvent::Woken,
            TraceEvent::Stalled { op },
            TraceEvent::Triggered { op },
        ];
        for (sequence, event) in (0..).zip(all) {
            let time = Time::from_nanos(sequence * 1000);
            assert_eq!(Record::unpack(sequence, event.pack(time)), Some(Record { sequence, time, event }));
        }
        assert_eq!(Record::unpack(0, [0; 4]), None);
        assert_eq!(Record::unpack(0, [0, head(2, 255, 0, 0), 0, 0]), None);
    }
}
