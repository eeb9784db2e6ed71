//! The failure of a command.

use std::io;

/// The result of a command, or of a part of it.
pub type CommandResult<T = ()> = Result<T, CommandFailure>;

/// The reason why a command ended early.
#[derive(Debug)]
pub enum CommandFailure {
    /// The text for the user, without a full stop.
    Message(String),
    /// The arguments are invalid: the text for the user, without a full stop.
    Invalid(String),
    /// A signal ended the command: its number, and the text for the user.
    Interrupted(u8, String),
    /// The reader of the output is gone. The command ends without a message.
    ClosedPipe,
}

impl CommandFailure {
    /// A failure with this text.
    pub fn new(message: impl Into<String>) -> Self {
        Self::Message(message.into())
    }

    /// The same failure with a context: `prefix: text`.
    pub fn context(self, prefix: impl std::fmt::Display) -> Self {
        match self {
            Self::Message(message) => Self::Message(format!("{prefix}: {message}")),
            other => other,
        }
    }

    /// The text of the failure.
    pub fn message(&self) -> &str {
        match self {
            Self::Message(message) | Self::Invalid(message) | Self::Interrupted(_, message) => message,
            Self::ClosedPipe => "the reader of the output is gone",
        }
    }

    /// The exit code. After a signal it is 128 plus the signal's number, as in shells.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Message(_) => 1,
            Self::Invalid(_) => 2,
            Self::Interrupted(signal, _) => 128_u8.saturating_add(*signal),
            Self::ClosedPipe => 0,
        }
    }
}

impl From<multirail::Error> for CommandFailure {
    fn from(error: multirail::Error) -> Self {
        Self::Message(error.to_string())
    }
}

/// Failures of the command's own output. Errors of files get their text where they happen.
impl From<io::Error> for CommandFailure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            _ => Self::Message(format!("cannot write the output: {error}")),
        }
    }
}

/// Makes text from outside safe to print as part of one line.
pub fn printable(text: &str) -> String {
    const LONGEST: usize = 500;
    text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
