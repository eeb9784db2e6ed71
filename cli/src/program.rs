//! How this command is started once more, in another process.

use std::ffi::OsString;
use std::sync::OnceLock;

use crate::failure::{CommandFailure, CommandResult};

static GIVEN: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the words that start this command. Until it is called, they are the path of this process's executable. The first
/// call counts.
pub fn set(words: Vec<OsString>) {
    let _ = GIVEN.set(words);
}

/// The words that start this command: the program, and arguments that come before the command's own.
pub fn words() -> CommandResult<Vec<OsString>> {
    if let Some(given) = GIVEN.get() {
        return Ok(given.clone());
    }
    let this = std::env::current_exe();
    let this =
        this.map_err(|e| CommandFailure::new(format!("cannot find this program to start it again: {e}")))?;
    Ok(vec![this.into()])
}
