//! Requests that this crate posts itself, beside the engine's.

use multirail_spi::{PeerSlot, WorkKind, WorkRequest, copy::CopyStrategy};

/// What a request of ours does for a slot. There is one of each at most for a slot at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The initiator's bytes.
    Data,
    /// The initiator's ask.
    Ask,
    /// The target's bytes.
    Reply,
    /// The target's answer.
    Answer,
}

/// The bit of an id that is never set in the engine's: those count requests.
const OURS: u64 = 1 << 63;

/// Who a request of ours is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub role: Role,
    pub peer: PeerSlot,
    pub slot: usize,
}

impl Name {
    pub(crate) fn id(self) -> u64 {
        OURS | (self.role as u64) << 40 | u64::from(self.peer.0) << 8 | self.slot as u64
    }

    /// Whose an id is; `None` for the engine's.
    pub(crate) fn of(id: u64) -> Option<Self> {
        let role = match id >> 40 & 0xff {
            0 => Role::Data,
            1 => Role::Ask,
            2 => Role::Reply,
            _ => Role::Answer,
        };
        let name = Self { role, peer: PeerSlot((id >> 8) as u32), slot: (id & 0xff) as usize };
        (id & OURS != 0).then_some(name)
    }

    /// A write to the peer, of bytes alone.
    pub(crate) fn write(self, local: *mut u8, lkey: u64, len: u64, remote: u64, rkey: u64) -> WorkRequest {
        WorkRequest {
            id: self.id(),
            peer: self.peer,
            kind: WorkKind::Write,
            local,
            lkey,
            len,
            remote,
            rkey,
            imm: None,
            strategy: CopyStrategy::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for role in [Role::Data, Role::Ask, Role::Reply, Role::Answer] {
            for (peer, slot) in [(0, 0), (3, 31), (u32::MAX, 255)] {
                let name = Name { role, peer: PeerSlot(peer), slot };
                assert_eq!(Name::of(name.id()), Some(name));
            }
        }
        assert_eq!(Name::of(u64::from(u32::MAX) << 30), None);
    }
}
