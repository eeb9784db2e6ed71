//! Why something is not stored, in words for both sides.

use crate::failure::Failure;

/// What the sender is told too, so without the directory's path.
pub fn failed(what: &str, error: impl Into<std::io::Error>) -> Failure {
    let error = error.into();
    let remedy = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; make room there, then go on with `send --resume`"
        }
        std::io::ErrorKind::PermissionDenied => "; check the directory's permissions",
        _ => "",
    };
    Failure::new(format!("the server cannot {what}: {error}{remedy}"))
}

/// What a sender did that keeps to the protocol never does.
pub fn out_of_turn() -> Failure {
    Failure::new("the sender sent something out of turn; run the same multirail version on both sides")
}
