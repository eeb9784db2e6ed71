//! Why a command ended early.

use std::io;

/// The result of anything a command does.
pub type Done<T = ()> = Result<T, Failure>;

/// What ends a command early.
#[derive(Debug)]
pub enum Failure {
    /// What to tell the user, without a full stop.
    Sentence(String),
    /// Nobody reads our output any more: end quietly.
    ClosedPipe,
}

impl Failure {
    /// A failure in these words.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self::Sentence(sentence.into())
    }

    /// The same failure told as part of something larger: `prefix: sentence`.
    pub fn within(self, prefix: impl std::fmt::Display) -> Self {
        match self {
            Self::Sentence(sentence) => Self::Sentence(format!("{prefix}: {sentence}")),
            Self::ClosedPipe => Self::ClosedPipe,
        }
    }

    /// The words, for passing them on.
    pub fn sentence(&self) -> &str {
        match self {
            Self::Sentence(sentence) => sentence,
            Self::ClosedPipe => "the reader of our output went away",
        }
    }
}

impl From<multirail::Error> for Failure {
    fn from(error: multirail::Error) -> Self {
        Self::Sentence(error.to_string())
    }
}

/// Failures of our own output; errors of files get their own words where they happen.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            _ => Self::Sentence(format!("cannot write the output: {error}")),
        }
    }
}

/// Text from outside made safe to print as part of one line.
pub fn printable(text: &str) -> String {
    const LONGEST: usize = 500;
    text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
