//! Variables of the environment, as settings.

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
    match text.parse() {
        Ok(count @ 1..=MOST) => Ok(count),
        _ => {
            let context = format!("{name} is {text:?}: give 1 to {MOST}");
            Err(Error::new(ErrorKind::InvalidRequest, "read the environment", context))
        }
    }
}
