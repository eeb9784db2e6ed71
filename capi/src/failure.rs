//! Errors as C sees them, and the text of the last one of each thread.

use std::cell::RefCell;

use multirail::{Error, ErrorKind};

use crate::abi::*;

/// What an entry point returns: a status that is no error, or a failure.
pub type Answer = Result<mr_status, Failure>;

/// Why an entry point has failed: its status, and a sentence for people. It has the size of a pointer, so that results
/// stay small on the hot path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(Box<Detail>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Detail {
    status: mr_status,
    text: String,
}

thread_local! {
    /// The sentence for the last failure of this thread.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

impl Failure {
    #[cold]
    pub fn new(status: mr_status, text: impl Into<String>) -> Self {
        Self(Box::new(Detail { status, text: text.into() }))
    }

    /// A request that can never succeed as given.
    #[cold]
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(MR_ERROR_INVALID_REQUEST, text)
    }

    pub fn status(&self) -> mr_status {
        self.0.status
    }

    /// Puts words before the sentence.
    pub fn within(self, place: impl std::fmt::Display) -> Self {
        Self::new(self.0.status, format!("{place}: {}", self.0.text))
    }

    /// Keeps the sentence for [`last_text`], and returns the status.
    #[cold]
    pub fn report(self) -> mr_status {
        let Detail { status, text } = *self.0;
        // A thread that ends has given its text back; then nobody can ask for it.
        let _ = LAST.try_with(|last| last.replace(text));
        status
    }
}

/// Calls `read` with the sentence for the last failure of this thread.
pub fn last_text<T>(read: impl FnOnce(&str) -> T) -> T {
    let mut read = Some(read);
    let of_thread = LAST.try_with(|last| read.take().map(|read| read(&last.borrow())));
    match (of_thread, read) {
        (Ok(Some(result)), _) => result,
        (_, Some(read)) => read(""),
        (_, None) => unreachable!("`read` is taken only where its result is returned"),
    }
}

impl From<Error> for Failure {
    #[cold]
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<&Error> for Failure {
    #[cold]
    fn from(error: &Error) -> Self {
        Self::new(status_of(error.kind()), error.to_string())
    }
}

/// The only place where kinds of errors become numbers of the header.
fn status_of(kind: ErrorKind) -> mr_status {
    match kind {
        ErrorKind::InvalidRequest => MR_ERROR_INVALID_REQUEST,
        ErrorKind::OutOfBounds => MR_ERROR_OUT_OF_BOUNDS,
        ErrorKind::LocalAccess => MR_ERROR_LOCAL_ACCESS,
        ErrorKind::RemoteAccess => MR_ERROR_REMOTE_ACCESS,
        ErrorKind::Revoked => MR_ERROR_REVOKED,
        ErrorKind::TooLarge => MR_ERROR_TOO_LARGE,
        ErrorKind::Unsupported => MR_ERROR_UNSUPPORTED,
        ErrorKind::Busy => MR_ERROR_BUSY,
        ErrorKind::Exhausted => MR_ERROR_EXHAUSTED,
        ErrorKind::DeadlineExceeded => MR_ERROR_DEADLINE_EXCEEDED,
        ErrorKind::Cancelled => MR_ERROR_CANCELLED,
        ErrorKind::PeerDied => MR_ERROR_PEER_DIED,
        ErrorKind::DeviceLost => MR_ERROR_DEVICE_LOST,
        ErrorKind::Closed => MR_ERROR_CLOSED,
        ErrorKind::NotFound => MR_ERROR_NOT_FOUND,
        ErrorKind::Unreachable => MR_ERROR_UNREACHABLE,
        ErrorKind::Version => MR_ERROR_VERSION,
        ErrorKind::Protocol => MR_ERROR_PROTOCOL,
        ErrorKind::Permission => MR_ERROR_PERMISSION,
        ErrorKind::Io => MR_ERROR_IO,
        _ => MR_ERROR_OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_number() {
        let kinds = (0..=u8::MAX).map_while(ErrorKind::from_code);
        let numbers: Vec<mr_status> = kinds.map(status_of).collect();
        let expected: Vec<mr_status> = (1..=numbers.len() as mr_status).map(|code| -code).collect();
        assert_eq!(numbers, expected);
        assert_eq!(numbers.last(), Some(&MR_ERROR_IO));
    }

    #[test]
    fn each_thread_has_its_own_text() {
        assert_eq!(Failure::invalid("one").within("open").report(), MR_ERROR_INVALID_REQUEST);
        std::thread::spawn(|| assert_eq!(last_text(str::to_owned), "")).join().unwrap();
        assert_eq!(last_text(str::to_owned), "open: one");
    }
}
