//! The IDs and statuses that belong to this crate: IDs of the work requests that it posts beside the engine's, and
//! statuses of the engine's work requests that failed here rather than at the inner device.

use multirail_spi::{ErrorKind, PeerSlot, Status, WorkKind, WorkRequest, copy::CopyStrategy};

/// What an internal work request sends for a slot. A slot has at most one of each role outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WrRole {
    /// The bytes that the initiator writes, reads or sends.
    InitiatorData,
    /// The initiator's request.
    Request,
    /// The bytes that the target has read from its region.
    TargetData,
    /// The target's response.
    Response,
}

/// The two upper bits of internal IDs. The engine's IDs count work requests and never reach them; its probes of paths
/// have the upper bit alone.
const INTERNAL: u64 = 0b01 << 62;

/// The ID of an internal work request: the peer and the slot that it belongs to, and what it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InternalWrId {
    pub role: WrRole,
    pub peer: PeerSlot,
    /// The index of the slot.
    pub slot: usize,
}

impl InternalWrId {
    pub(crate) fn encode(self) -> u64 {
        INTERNAL | (self.role as u64) << 40 | u64::from(self.peer.0) << 8 | self.slot as u64
    }

    /// Decodes an ID. Returns `None` for the engine's IDs.
    pub(crate) fn decode(id: u64) -> Option<Self> {
        let role = match id >> 40 & 0xff {
            0 => WrRole::InitiatorData,
            1 => WrRole::Request,
            2 => WrRole::TargetData,
            _ => WrRole::Response,
        };
        let decoded = Self { role, peer: PeerSlot((id >> 8) as u32), slot: (id & 0xff) as usize };
        (id >> 62 == INTERNAL >> 62).then_some(decoded)
    }

    /// A work request with this ID that writes bytes to the peer, without an imm.
    pub(crate) fn write(self, local: *mut u8, lkey: u64, len: u64, remote: u64, rkey: u64) -> WorkRequest {
        WorkRequest {
            id: self.encode(),
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

/// The code of all statuses that this crate makes. No device uses it.
const STAGING_CODE: i32 = i32::MIN + 16;

/// The status of a work request that failed in this crate.
pub(crate) fn staging_status(kind: ErrorKind) -> Status {
    Status { kind, code: STAGING_CODE }
}

/// The text of a status that this crate made. Returns `None` for the statuses of devices.
pub(crate) fn describe_staging_status(status: Status) -> Option<String> {
    if status.code != STAGING_CODE {
        return None;
    }
    let text = match status.kind {
        ErrorKind::RemoteAccess => {
            "the peer refused the access: the key is wrong, the range is out of bounds, or the region does not allow it"
        }
        ErrorKind::Revoked => "the peer revoked the region: ask it for a new descriptor",
        ErrorKind::PeerDied => "the connection ended",
        ErrorKind::Protocol => "the peer sent an invalid response",
        ErrorKind::Cancelled => "before it was complete",
        _ => "a staged copy failed",
    };
    Some(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_decoded_as_they_were_encoded() {
        for role in [WrRole::InitiatorData, WrRole::Request, WrRole::TargetData, WrRole::Response] {
            for (peer, slot) in [(0, 0), (3, 31), (u32::MAX, 255)] {
                let id = InternalWrId { role, peer: PeerSlot(peer), slot };
                assert_eq!(InternalWrId::decode(id.encode()), Some(id));
            }
        }
        assert_eq!(InternalWrId::decode(u64::from(u32::MAX) << 30), None);
        assert_eq!(InternalWrId::decode(1 << 63 | 7), None, "a probe of the engine");
    }

    #[test]
    fn only_statuses_of_this_crate_are_described() {
        let text = describe_staging_status(staging_status(ErrorKind::Revoked));
        assert!(text.is_some_and(|text| text.contains("revoked the region")));
        assert_eq!(describe_staging_status(Status { kind: ErrorKind::Io, code: -5 }), None);
        assert_eq!(describe_staging_status(Status { kind: ErrorKind::Io, code: 0 }), None);
    }
}
