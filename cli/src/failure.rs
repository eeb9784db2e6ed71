//! Why a command ended early.

use std::io;
use std::process::ExitCode;

/// The result of anything a command does.
pub type CommandResult<T = ()> = Result<T, Failure>;

/// What ends a command early.
#[derive(Debug)]
pub enum Failure {
    /// What to tell the user, without a full stop.
    Message(String),
    /// A signal ended it, with its number and what to tell the user.
    Interrupted(u8, String),
    /// Nobody reads our output any more: end quietly.
    ClosedPipe,
}

impl Failure {
    /// A failure in these words.
    pub fn new(message: impl Into<String>) -> Self {
        Self::Message(message.into())
    }

    /// The same failure told as part of something larger: `prefix: sentence`.
    pub fn context(self, prefix: impl std::fmt::Display) -> Self {
        match self {
            Self::Message(message) => Self::Message(format!("{prefix}: {message}")),
            other => other,
        }
    }

    /// The words, for passing them on.
    pub fn message(&self) -> &str {
        match self {
            Self::Message(message) | Self::Interrupted(_, message) => message,
            Self::ClosedPipe => "the reader of our output went away",
        }
    }

    /// What the shell is told: of a signal as shells tell it, 128 and its number.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Message(_) => ExitCode::FAILURE,
            Self::Interrupted(signal, _) => ExitCode::from(128_u8.saturating_add(*signal)),
            Self::ClosedPipe => ExitCode::SUCCESS,
        }
    }
}

impl From<multirail::Error> for Failure {
    fn from(error: multirail::Error) -> Self {
        Self::Message(error.to_string())
    }
}

/// Failures of our own output; errors of files get their own words where they happen.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            _ => Self::Message(format!("cannot write the output: {error}")),
        }
    }
}

/// Text from outside made safe to print as part of one line.
pub fn printable(text: &str) -> String {
    const LONGEST: usize = 500;
    text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
