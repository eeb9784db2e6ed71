//! Variables of the environment, as settings.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use transport_core::{Error, ErrorKind, Result};

/// The most rails a transport has, and so the most threads or domains one can ask for.
const MOST: u32 = 64;

/// What a variable says; `None` if it is not there, or says nothing.
pub(crate) fn given(name: &str) -> Option<String> {
    let text = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// How many rails `text`, the value of `name`, asks for.
pub(crate) fn rails(name: &str, text: &str) -> Result<u32> {
    number(name, text, 1..=MOST)
}

/// The number that `text`, the value of `name`, is.
pub(crate) fn number<T>(name: &str, text: &str, allowed: RangeInclusive<T>) -> Result<T>
where
    T: FromStr + PartialOrd + Display,
{
    text.parse().ok().filter(|number| allowed.contains(number)).ok_or_else(|| {
        let context = format!("{name} is {text:?}: give {} to {}", allowed.start(), allowed.end());
        Error::new(ErrorKind::InvalidRequest, "read the environment", context)
    })
}
