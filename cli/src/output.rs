//! Lines and JSON rows on stdout, and errors on stderr.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::{CommandResult, printable};

/// Prints one line and flushes it.
pub fn line(text: &str) -> CommandResult {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints text that ends with a newline.
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

/// Prints one sentence to stderr. An error is ignored.
pub fn print_error(message: &str) {
    let _ = writeln!(io::stderr().lock(), "multirail: {}", printable(message));
}
