//! Whether bytes may take the long way, through memory that both sides reach.

use std::str::FromStr;

use crate::{Error, ErrorKind};

/// When bytes may take the long way where there is no short one: through a segment that is set aside for it, out of
/// which the target's worker moves them. That costs a second copy, and a hand-over to that worker.
///
/// Both processes must allow it. An import says which way it takes (`RemoteRegion::path`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Staging {
    /// Never: memory without a short way is refused, with the reason.
    #[default]
    Never,
    /// Memory without a short way. With loopback that of other processes, where the kernel refuses the way to it;
    /// with cards that of GPUs, where the card refuses it.
    WhereRefused,
    /// All memory, even where there is a shorter way: to test and to measure.
    Always,
}

impl FromStr for Staging {
    type Err = Error;

    /// `0` or nothing, `1`, `always`.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.trim() {
            "" | "0" => Ok(Self::Never),
            "1" => Ok(Self::WhereRefused),
            "always" => Ok(Self::Always),
            other => {
                let context = format!("{other:?} does not say when to stage: give 0, 1 or always");
                Err(Error::new(ErrorKind::InvalidRequest, "configure staging", context))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_environment() {
        assert_eq!("".parse::<Staging>().unwrap(), Staging::Never);
        assert_eq!(" 1 ".parse::<Staging>().unwrap(), Staging::WhereRefused);
        assert_eq!("always".parse::<Staging>().unwrap(), Staging::Always);
        let refused = "yes".parse::<Staging>().unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidRequest && refused.context().contains("0, 1 or always"));
    }
}
