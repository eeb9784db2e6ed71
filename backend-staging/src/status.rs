//! Statuses of requests that failed here, not at the card.

use multirail_spi::{ErrorKind, Status};

/// No card's code.
const OURS: i32 = i32::MIN + 16;

/// That of a kind, which says all.
pub(crate) fn status(kind: ErrorKind) -> Status {
    Status { kind, code: OURS }
}

/// What a status of ours says; `None` for the card's.
pub(crate) fn describe(status: Status) -> Option<String> {
    if status.code != OURS {
        return None;
    }
    Some(match status.kind {
        ErrorKind::RemoteAccess => {
            "the peer refused: a wrong key, out of bounds, or no such right".to_owned()
        }
        ErrorKind::Revoked => "the peer took the region back".to_owned(),
        ErrorKind::PeerDied => "the connection ended".to_owned(),
        ErrorKind::Protocol => "the peer answered nonsense".to_owned(),
        ErrorKind::Cancelled => "stopped before it was complete".to_owned(),
        _ => "a staged copy failed".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ours_is_described_here() {
        assert!(
            describe(status(ErrorKind::Revoked)).is_some_and(|words| words.contains("took the region back"))
        );
        assert_eq!(describe(Status { kind: ErrorKind::Io, code: -5 }), None);
        assert_eq!(describe(Status { kind: ErrorKind::Io, code: 0 }), None);
    }
}
