//! Lines and JSON rows on stdout; complaints on stderr.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::{CommandResult, printable};

/// Prints one line at once.
pub fn line(text: &str) -> CommandResult {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints lines that end by themselves.
pub fn text(text: &str) -> CommandResult {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints one row as a JSON object on its own line.
pub fn json(row: &impl Serialize) -> CommandResult {
    let text = serde_json::to_string(row).map_err(io::Error::from)?;
    line(&text)
}

/// Prints one sentence to stderr. Nothing is left to do if that fails too.
pub fn print_error(message: &str) {
    let _ = writeln!(io::stderr().lock(), "multirail: {}", printable(message));
}
