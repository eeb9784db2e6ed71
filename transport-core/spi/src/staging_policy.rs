//! When bytes may go through staging buffers.

use std::str::FromStr;

use crate::{Error, ErrorKind};

/// When bytes may go through a staging buffer: the initiator writes them into a buffer of the target, and the target's
/// worker copies them to where they belong. Staging costs a second copy, and the time of that worker.
///
/// Both processes must allow it. `RemoteRegion::path` says which path an import takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Staging {
    /// Never. Memory that the backend cannot reach is refused, with the reason.
    #[default]
    Never,
    /// For memory that the backend cannot reach: with loopback, memory of other processes that the kernel refuses access
    /// to; with NICs, GPU memory that the NIC cannot register.
    WhereRefused,
    /// For all memory, also where the backend reaches it: to test and to measure.
    Always,
}

impl FromStr for Staging {
    type Err = Error;

    /// Parses `0` or an empty text as never, `1` as where refused, and `always`.
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
