//! Lines, rows and tables on stdout; complaints on stderr.

use std::io::{self, IsTerminal, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use super::failure::{Done, printable};

/// Columns of a table where stdout is no terminal.
const PLAIN_WIDTH: u16 = 200;

/// Prints one line at once.
pub fn line(text: &str) -> Done {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints lines that end by themselves.
pub fn text(text: &str) -> Done {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints one row as a JSON object on its own line.
pub fn json(row: &impl Serialize) -> Done {
    let text = serde_json::to_string(row).map_err(io::Error::from)?;
    line(&text)
}

/// Prints one sentence to stderr. Nothing is left to do if that fails too.
pub fn complain(sentence: &str) {
    let _ = writeln!(io::stderr().lock(), "multirail: {}", printable(sentence));
}

/// Prints a table; `numbers` are the columns to align right.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers: std::ops::Range<usize>) -> Done {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width());
    table.set_header(header.to_vec()).add_rows(rows);
    for column in numbers {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    line(&table.to_string())
}

fn width() -> u16 {
    let out = io::stdout();
    if !out.is_terminal() {
        return PLAIN_WIDTH;
    }
    rustix::termios::tcgetwinsize(&out).map_or(PLAIN_WIDTH, |size| size.ws_col.max(60))
}
