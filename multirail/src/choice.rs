//! Which backend carries the bytes: the user's choice, and a fabric made of it.

use std::fmt;
use std::str::FromStr;

use transport_core::{Error, ErrorKind, Fabric, FabricBuilder, Result};

use crate::Registry;

/// The environment variable that [`BackendChoice::from_env`] reads.
const VARIABLE: &str = "MULTIRAIL_BACKEND";

/// Which backends a fabric opens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// Every backend that is available here, in this order of preference:
    /// `loopback` (reaches this host only), `efa`, `verbs`.
    #[default]
    Auto,
    /// This one, or an error that says why it is not there.
    Named(String),
}

impl BackendChoice {
    /// The choice in `MULTIRAIL_BACKEND`; [`Auto`](Self::Auto) if it is unset or empty.
    ///
    /// # Errors
    /// `InvalidRequest` if the variable does not hold a name.
    pub fn from_env() -> Result<Self> {
        match std::env::var(VARIABLE) {
            Ok(name) if name.is_empty() => Ok(Self::Auto),
            Ok(name) => name.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::Auto),
            Err(std::env::VarError::NotUnicode(_)) => Err(Error::new(
                ErrorKind::InvalidRequest,
                "choose backend",
                format!("{VARIABLE} is not text; set it to `auto` or a backend's name"),
            )),
        }
    }
}

impl FromStr for BackendChoice {
    type Err = Error;

    /// `auto`, or a name. Whether a backend has that name is found out when it is opened.
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "" => Err(Error::new(
                ErrorKind::InvalidRequest,
                "choose backend",
                "the name is empty; give `auto` or a backend's name",
            )),
            "auto" => Ok(Self::Auto),
            name => Ok(Self::Named(name.to_owned())),
        }
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Named(name) => name,
        })
    }
}

/// A builder with the transports of `choice`, out of [`Registry::standard`].
///
/// # Errors
/// `NotFound` for a name no backend has, `Unsupported` for a backend that is not
/// available: with the reason, what would mend it, and the names there are.
/// Nothing else is ever opened in its place.
pub fn builder(choice: &BackendChoice) -> Result<FabricBuilder> {
    Registry::standard().builder(choice)
}

/// A fabric with the backends that `MULTIRAIL_BACKEND` asks for, or all that are
/// available.
///
/// # Errors
/// As [`builder`] and [`FabricBuilder::open`].
pub fn open() -> Result<Fabric> {
    builder(&BackendChoice::from_env()?)?.open()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_parse_and_print() {
        assert_eq!("auto".parse::<BackendChoice>().unwrap(), BackendChoice::Auto);
        assert_eq!(" loopback ".parse::<BackendChoice>().unwrap(), BackendChoice::Named("loopback".into()));
        assert_eq!("".parse::<BackendChoice>().unwrap_err().kind(), ErrorKind::InvalidRequest);
        assert_eq!(BackendChoice::Named("efa".into()).to_string(), "efa");
    }
}
