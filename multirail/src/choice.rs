//! The user's choice of backends, and a fabric with them.

use std::fmt;
use std::str::FromStr;

use transport_core::{Error, ErrorKind, Fabric, FabricBuilder, Result};

use crate::Registry;

/// The environment variable that [`BackendChoice::from_env`] reads.
const VARIABLE: &str = "MULTIRAIL_BACKEND";

/// Which backends a fabric opens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// All available backends, in this order of preference: `loopback` (which reaches this host
    /// only), `efa`, `verbs`.
    #[default]
    Auto,
    /// One backend by name. If it is unavailable you get an error, not a fallback.
    Named(String),
}

impl BackendChoice {
    /// The choice in `MULTIRAIL_BACKEND`; [`Auto`](Self::Auto) if it is unset or empty.
    ///
    /// # Errors
    /// `InvalidRequest` if the variable is not a name.
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

    /// Parses `auto` or a name. The name is checked only when the backend is opened.
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "" => Err(Error::new(
                ErrorKind::InvalidRequest,
                "choose backend",
                "the name is empty; use `auto` or a backend's name",
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

/// A builder with the transports of `choice` in [`Registry::standard`].
///
/// # Errors
/// `NotFound` for an unknown name. `Unsupported` for an unavailable backend, with the reason, the
/// fix, and the known names. Another backend is never used as a fallback.
pub fn builder(choice: &BackendChoice) -> Result<FabricBuilder> {
    Registry::standard().builder(choice)
}

/// Opens a fabric with the backend of `MULTIRAIL_BACKEND`, or with all available backends.
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
