//! The error type of multirail: what went wrong, in which operation, and what to do next.

use std::fmt;

/// The result of calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Programs match on the kind; the text of an error is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A request that can never succeed as given: empty list, zero page size.
    InvalidRequest,
    /// A range that does not lie inside its region.
    OutOfBounds,
    /// The local region was not registered for this use.
    LocalAccess,
    /// The target refused: wrong key, out of bounds there, or no such right.
    RemoteAccess,
    /// The target has revoked the region, or registered it anew.
    Revoked,
    /// Larger than the backend can carry in one piece.
    TooLarge,
    /// The backend, or this platform, cannot do this.
    Unsupported,
    /// Something is in use, or a queue or table is full, and the call does not wait for it. A later call may succeed.
    Busy,
    /// No more of something can be made: peer slots, registrations, memory, file descriptors.
    Exhausted,
    /// The deadline passed first.
    DeadlineExceeded,
    /// Cancelled by the caller, or by dropping the operation.
    Cancelled,
    /// The peer's process, host or connection is gone.
    PeerDied,
    /// The local device is gone or no longer usable.
    DeviceLost,
    /// This fabric, listener or peer was closed locally.
    Closed,
    /// Nothing has this name.
    NotFound,
    /// No transport of ours reaches that peer.
    Unreachable,
    /// The peer speaks another version of the protocol.
    Version,
    /// The peer sent bytes that do not parse or that break the protocol.
    Protocol,
    /// The operating system refused, because a right or a setting is missing. Or a peer refused, because a token or a
    /// certificate is missing.
    Permission,
    /// Any other failure of the operating system.
    Io,
}

impl ErrorKind {
    /// Every kind, in the order of the declaration. The index of a kind is its code.
    #[doc(hidden)]
    pub const ALL: [Self; 20] = [
        Self::InvalidRequest,
        Self::OutOfBounds,
        Self::LocalAccess,
        Self::RemoteAccess,
        Self::Revoked,
        Self::TooLarge,
        Self::Unsupported,
        Self::Busy,
        Self::Exhausted,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::PeerDied,
        Self::DeviceLost,
        Self::Closed,
        Self::NotFound,
        Self::Unreachable,
        Self::Version,
        Self::Protocol,
        Self::Permission,
        Self::Io,
    ];

    /// The kind's number in the flight recorder.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind with this number.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidRequest => "invalid request",
            Self::OutOfBounds => "out of bounds",
            Self::LocalAccess => "local access refused",
            Self::RemoteAccess => "remote access error",
            Self::Revoked => "region revoked",
            Self::TooLarge => "too large",
            Self::Unsupported => "unsupported",
            Self::Busy => "busy",
            Self::Exhausted => "limit reached",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::Cancelled => "cancelled",
            Self::PeerDied => "peer died",
            Self::DeviceLost => "device lost",
            Self::Closed => "closed",
            Self::NotFound => "not found",
            Self::Unreachable => "unreachable",
            Self::Version => "version mismatch",
            Self::Protocol => "protocol error",
            Self::Permission => "permission denied",
            Self::Io => "I/O error",
        })
    }
}

/// An error: kind, operation, context in words, and its cause if there is one.
///
/// It has the size of a pointer, so that results stay small on the hot path. `Debug` prints the same sentence as
/// `Display`, so that an error that `main` or a test returns says what to do:
///
/// ```
/// # use multirail_spi::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::Busy, "open endpoint", "drop the other one first");
/// assert_eq!(format!("{error:?}"), "open endpoint: busy: drop the other one first");
/// assert_eq!(format!("{error:?}"), error.to_string());
/// ```
#[derive(Clone)]
pub struct Error(Box<Detail>);

#[derive(Clone)]
struct Detail {
    kind: ErrorKind,
    operation: &'static str,
    context: String,
    source: Option<std::sync::Arc<dyn std::error::Error + Send + Sync>>,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Detail { kind, operation, context, source } = &*self.0;
        write!(f, "{operation}: {kind}")?;
        if !context.is_empty() {
            write!(f, ": {context}")?;
        }
        match source {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}

impl Error {
    /// An error of `kind` in `operation`; `context` says what to do next.
    #[cold]
    pub fn new(kind: ErrorKind, operation: &'static str, context: impl Into<String>) -> Self {
        Self(Box::new(Detail { kind, operation, context: context.into(), source: None }))
    }

    /// The operating system's refusal, classified by its error number.
    #[cold]
    pub fn os(
        operation: &'static str,
        context: impl Into<String>,
        source: impl Into<std::io::Error>,
    ) -> Self {
        let source = source.into();
        Self::new(os_kind(&source), operation, context).with_source(source)
    }

    /// The same error with its cause attached.
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(std::sync::Arc::new(source));
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that failed, as the API names it.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The text that says what is known about the failure, and what to do next.
    pub fn context(&self) -> &str {
        &self.0.context
    }
}

/// The only place where error numbers of the operating system become kinds.
fn os_kind(source: &std::io::Error) -> ErrorKind {
    use std::io::ErrorKind as Os;
    match source.kind() {
        Os::PermissionDenied => ErrorKind::Permission,
        Os::NotFound => ErrorKind::NotFound,
        Os::TimedOut | Os::WouldBlock => ErrorKind::DeadlineExceeded,
        Os::ConnectionRefused | Os::HostUnreachable | Os::NetworkUnreachable | Os::AddrNotAvailable => {
            ErrorKind::Unreachable
        }
        Os::ConnectionReset | Os::ConnectionAborted | Os::BrokenPipe | Os::UnexpectedEof => {
            ErrorKind::PeerDied
        }
        Os::OutOfMemory => ErrorKind::Exhausted,
        Os::Unsupported => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_readable() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
        let error = Error::new(ErrorKind::OutOfBounds, "write", "range 0..9 of a region of 8 bytes");
        assert_eq!(error.to_string(), "write: out of bounds: range 0..9 of a region of 8 bytes");
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(format!("{error:#?}"), error.to_string());
    }

    #[test]
    fn codes_decode_to_their_kinds() {
        assert!(ErrorKind::ALL.iter().all(|kind| ErrorKind::from_code(kind.code()) == Some(*kind)));
        assert_eq!(usize::from(ErrorKind::Io.code()) + 1, ErrorKind::ALL.len());
    }

    #[test]
    fn os_errors_keep_their_cause() {
        let error =
            Error::os("connect", "127.0.0.1:1", std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        let source = std::error::Error::source(&error).unwrap();
        assert!(source.is::<std::io::Error>(), "{source}");
        assert_ne!(source.to_string(), error.to_string());
    }
}
