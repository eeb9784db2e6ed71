//! Lines, JSON rows and tables on stdout, and errors on stderr.

use std::io::{self, IsTerminal, Write};

use comfy_table::{CellAlignment, ContentArrangement, presets};
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

/// The maximum width of a plain table. A wider one is printed as one key per line.
const PLAIN_WIDTH: usize = 160;

/// The width of a terminal that does not report its width.
const UNKNOWN_WIDTH: usize = 80;

/// The minimum width of a wrapped text, in characters.
const MIN_TEXT_WIDTH: usize = 24;

/// The minimum width of a value beside its key, in characters. A narrower value is printed below the key.
const MIN_VALUE_WIDTH: usize = 20;

/// The destination of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destination {
    /// A terminal with this many columns.
    Terminal(usize),
    /// A pipe or a file.
    Plain,
}

/// Rows under headings.
pub struct TextTable {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// The number of first columns that name a row. They are its title in the one-key-per-line form.
    named: usize,
}

struct Column {
    heading: String,
    is_number: bool,
    /// The order in which columns are dropped if the table is too wide: the highest rank first, rank 0 never.
    optional: u8,
}

impl TextTable {
    /// A table without columns yet. Its first `named` columns will name the row.
    pub fn named_by(named: usize) -> Self {
        Self { columns: Vec::new(), rows: Vec::new(), named }
    }

    /// Adds a column of text, left aligned and wrapped between words.
    pub fn text(self, heading: impl Into<String>) -> Self {
        self.column(heading.into(), false)
    }

    /// Adds a column of numbers, right aligned and never wrapped.
    pub fn number(self, heading: impl Into<String>) -> Self {
        self.column(heading.into(), true)
    }

    fn column(mut self, heading: String, is_number: bool) -> Self {
        self.columns.push(Column { heading, is_number, optional: 0 });
        self
    }

    /// Makes the last column optional: a narrow terminal drops it. The column with the highest `rank` is dropped first.
    pub fn optional(mut self, rank: u8) -> Self {
        if let Some(column) = self.columns.last_mut() {
            column.optional = rank;
        }
        self
    }

    /// Adds a row with one cell per column. `\n` separates the lines of a cell.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Prints the table, laid out for stdout.
    pub fn print(&self) -> CommandResult {
        text(&self.rendered(Destination::of_stdout()))
    }

    fn rendered(&self, destination: Destination) -> String {
        let mut shown: Vec<usize> =
            (0..self.columns.len()).filter(|column| !self.is_empty(*column)).collect();
        let all = shown.len();
        loop {
            if let Some(widths) = self.widths(&shown, destination) {
                let mut text = self.boxed(&shown, &widths, destination);
                if shown.len() < all {
                    text.push_str(&self.left_out(&shown, destination));
                }
                return text;
            }
            // A single row is printed as one key per line instead of without some columns.
            let Some(least) = self.least_needed(&shown).filter(|_| self.rows.len() > 1) else { break };
            shown.remove(least);
        }
        self.records(destination)
    }

    /// Returns true if this column is empty in all rows.
    fn is_empty(&self, column: usize) -> bool {
        self.rows.iter().all(|row| row[column].is_empty())
    }

    /// The position in `shown` of the next column to drop.
    fn least_needed(&self, shown: &[usize]) -> Option<usize> {
        let rank = |at: &usize| self.columns[shown[*at]].optional;
        (0..shown.len()).max_by_key(rank).filter(|at| rank(at) > 0)
    }

    /// The widths of these columns, or `None` if they do not fit.
    fn widths(&self, shown: &[usize], destination: Destination) -> Option<Vec<usize>> {
        let room = destination.room(shown.len())?;
        let full: Vec<usize> = shown.iter().map(|column| self.full_width(*column)).collect();
        if full.iter().sum::<usize>() <= room {
            return Some(full);
        }
        if destination == Destination::Plain {
            return None;
        }
        let mut widths: Vec<usize> = shown.iter().map(|column| self.least_width(*column)).collect();
        let mut left = room.checked_sub(widths.iter().sum())?;
        // The column with the most lines grows first, so that all columns need about the same number of lines.
        while left > 0 {
            let lines = |at: &usize| full[*at] * 1000 / widths[*at].max(1);
            let Some(at) = (0..widths.len()).filter(|at| widths[*at] < full[*at]).max_by_key(lines) else {
                break;
            };
            widths[at] += 1;
            left -= 1;
        }
        Some(widths)
    }

    fn cells(&self, column: usize) -> impl Iterator<Item = &str> {
        self.rows.iter().map(move |row| row[column].as_str())
    }

    /// The width at which no cell wraps.
    fn full_width(&self, column: usize) -> usize {
        let heading = self.columns[column].heading.as_str();
        let lines = self.cells(column).chain([heading]).flat_map(str::lines);
        lines.map(width).max().unwrap_or(0)
    }

    /// The minimum width, at which no word is cut and texts are still easy to read.
    fn least_width(&self, column: usize) -> usize {
        let Column { heading, is_number, .. } = &self.columns[column];
        let heading = longest_word(heading);
        if *is_number {
            return self.cells(column).flat_map(str::lines).map(width).max().unwrap_or(0).max(heading);
        }
        let words = self.cells(column).map(longest_word).max().unwrap_or(0);
        let text = self.cells(column).flat_map(str::lines).map(width).max().unwrap_or(0);
        words.max(heading).max(text.min(MIN_TEXT_WIDTH))
    }

    fn boxed(&self, shown: &[usize], widths: &[usize], destination: Destination) -> String {
        let mut table = comfy_table::Table::new();
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.load_style(match destination {
            Destination::Terminal(_) => presets::UTF8_FULL_CONDENSED,
            Destination::Plain => presets::NOTHING,
        });
        let wrapped = |cell: &str, at: usize| wrap(cell, widths[at]).join("\n");
        let headings = shown.iter().enumerate();
        table.set_header(headings.map(|(at, column)| wrapped(&self.columns[*column].heading, at)));
        for row in &self.rows {
            table.add_row(shown.iter().enumerate().map(|(at, column)| wrapped(&row[*column], at)));
        }
        for (at, column) in shown.iter().enumerate() {
            let Some(drawn) = table.column_mut(at) else { continue };
            if self.columns[*column].is_number {
                drawn.set_cell_alignment(CellAlignment::Right);
            }
            if destination == Destination::Plain {
                drawn.set_padding((0, 2));
            }
        }
        table.trim_fmt() + "\n"
    }

    /// The note that names the columns missing in a table of `shown`.
    fn left_out(&self, shown: &[usize], destination: Destination) -> String {
        let missing =
            (0..self.columns.len()).filter(|column| !shown.contains(column) && !self.is_empty(*column));
        let names: Vec<&str> = missing.map(|column| self.columns[column].heading.as_str()).collect();
        let note = format!("hidden columns: {} (use a wider terminal or --json)", names.join(", "));
        wrap(&note, destination.width()).join("\n") + "\n"
    }

    /// The table as one key per line.
    fn records(&self, destination: Destination) -> String {
        let keys = self.columns[self.named..].iter().map(|column| width(&column.heading));
        let (indent, key) = (if self.named > 0 { 2 } else { 0 }, keys.max().unwrap_or(0) + 2);
        let room = destination.width().saturating_sub(indent + key);
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            let (title, values) = row.split_at(self.named);
            if number > 0 && self.named == 0 {
                text.push('\n');
            }
            if self.named > 0 {
                let title: Vec<&str> =
                    title.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
                text.push_str(&(title.join(": ") + "\n"));
            }
            for (column, value) in self.columns[self.named..].iter().zip(values) {
                if value.is_empty() {
                    continue;
                }
                let is_below = room < MIN_VALUE_WIDTH || longest_word(value) > room;
                let (first, further, room) = match is_below && destination != Destination::Plain {
                    true => (format!("\n{:indent$}", "", indent = indent + 2), indent + 2, room + key - 2),
                    false => (" ".repeat(key - width(&column.heading)), indent + key, room),
                };
                let lines = match destination {
                    Destination::Plain => value.lines().map(str::to_owned).collect(),
                    Destination::Terminal(_) => wrap(value, room),
                };
                text.push_str(&format!("{:indent$}{}{first}", "", column.heading));
                text.push_str(&lines.join(&format!("\n{:further$}", "")));
                text.push('\n');
            }
        }
        text
    }
}

impl Destination {
    fn of_stdout() -> Self {
        let out = io::stdout();
        if !out.is_terminal() {
            return Self::Plain;
        }
        let columns = rustix::termios::tcgetwinsize(&out).map_or(0, |size| usize::from(size.ws_col));
        Self::Terminal(if columns == 0 { UNKNOWN_WIDTH } else { columns })
    }

    fn width(self) -> usize {
        match self {
            Self::Terminal(width) => width,
            Self::Plain => usize::MAX,
        }
    }

    /// The width that is left for the cells of this many columns, without the separators. `None` if nothing is left.
    fn room(self, columns: usize) -> Option<usize> {
        match self {
            // One line before each column and after the last, and one space on both sides of each cell.
            Self::Terminal(width) => width.checked_sub(3 * columns + 1),
            Self::Plain => PLAIN_WIDTH.checked_sub(2 * columns),
        }
    }
}

/// Prints a sentence. If stdout is a terminal, it is wrapped between words.
pub fn print_text(text: &str) -> CommandResult {
    match Destination::of_stdout() {
        Destination::Plain => line(text),
        Destination::Terminal(width) => line(&wrap(text, width).join("\n")),
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

fn longest_word(text: &str) -> usize {
    text.split_whitespace().map(width).max().unwrap_or(0)
}

/// Wraps `text` between words into lines of at most `room` characters. A longer word gets its own line.
fn wrap(text: &str, room: usize) -> Vec<String> {
    let mut wrapped = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut current = words.next().unwrap_or_default().to_owned();
        for word in words {
            if width(&current) + 1 + width(word) > room {
                wrapped.push(std::mem::take(&mut current));
                current.push_str(word);
            } else {
                current.push(' ');
                current.push_str(word);
            }
        }
        wrapped.push(current);
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> TextTable {
        let mut table =
            TextTable::named_by(2).text("check").text("level").text("found").text("cost").text("fix");
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        table.row(row([
            "memlock",
            "warning",
            "soft 64 KiB, hard 64 KiB",
            "a card can register only this much memory, because registered pages are pinned",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service",
        ]));
        table.row(row(["kernel", "ok", "Linux 6.18.5", "", ""]));
        table
    }

    fn figures() -> TextTable {
        let table = TextTable::named_by(0).number("size").number("GB/s").number("Gbps").optional(1);
        let mut table =
            table.number("ops/s").number("p50 µs").number("p99.9 µs").optional(2).number("% of memcpy");
        for size in ["8 B", "64 KiB"] {
            let cells = [size, "12.34", "98.7", "1234567", "0.10", "123.45", "99"];
            table.row(cells.map(str::to_owned).to_vec());
        }
        table
    }

    /// Checks that every word of `table` is in `text`, uncut.
    fn assert_whole(table: &TextTable, text: &str, width_of_lines: usize) {
        for line in text.lines() {
            assert!(width(line) <= width_of_lines, "{} columns in:\n{text}", width(line));
        }
        let cells = table.rows.iter().flatten().flat_map(|cell| cell.split_whitespace());
        let seen: Vec<&str> = text.split(|c: char| c.is_whitespace() || "│┆".contains(c)).collect();
        for word in cells {
            assert!(
                seen.iter().any(|seen| *seen == word || seen.trim_end_matches(':') == word),
                "{word} in:\n{text}"
            );
        }
    }

    #[test]
    fn no_line_is_too_long_and_no_word_is_broken() {
        for columns in 40..=220 {
            let (findings, text) = (findings(), findings().rendered(Destination::Terminal(columns)));
            assert_whole(&findings, &text, columns);
            let text = figures().rendered(Destination::Terminal(columns));
            assert!(text.lines().all(|line| width(line) <= columns), "{text}");
            assert!(text.contains("1234567"), "{text}");
        }
    }

    #[test]
    fn a_wide_terminal_has_boxes_and_a_narrow_one_a_key_per_line() {
        let wide = findings().rendered(Destination::Terminal(200));
        assert!(wide.starts_with('┌') && wide.contains("found"), "{wide}");
        let narrow = findings().rendered(Destination::Terminal(80));
        assert!(narrow.starts_with("memlock: warning\n  found  soft 64 KiB"), "{narrow}");
        assert!(narrow.ends_with("kernel: ok\n  found  Linux 6.18.5\n"), "{narrow}");
    }

    #[test]
    fn optional_columns_go_by_their_rank_and_are_named() {
        let full = figures().rendered(Destination::Terminal(80));
        assert!(
            full.contains("p99.9 µs") && full.contains("Gbps") && !full.contains("hidden columns"),
            "{full}"
        );
        let less = figures().rendered(Destination::Terminal(59));
        assert!(less.contains("Gbps") && less.contains("hidden columns: p99.9 µs"), "{less}");
        let least = figures().rendered(Destination::Terminal(50));
        assert!(least.contains("Gbps, p99.9 µs"), "{least}");
        let mut one = figures();
        one.rows.truncate(1);
        let one = one.rendered(Destination::Terminal(50));
        assert!(one.starts_with("size         8 B\nGB/s         12.34\nGbps         98.7\n"), "{one}");
    }

    #[test]
    fn a_pipe_has_plain_text_whose_values_are_whole() {
        let plain = figures().rendered(Destination::Plain);
        assert_eq!(plain.lines().count(), 3, "{plain}");
        assert!(plain.lines().next().is_some_and(|line| line.contains("p99.9 µs")), "{plain}");
        let records = findings().rendered(Destination::Plain);
        assert!(records.contains(
            "\n  cost   a card can register only this much memory, because registered pages are pinned\n"
        ));
        for text in [plain, records] {
            assert!(
                !text.contains(['│', '┌', '─']) && text.lines().all(|line| line == line.trim_end()),
                "{text}"
            );
        }
    }

    #[test]
    fn empty_columns_are_not_shown() {
        let mut table = TextTable::named_by(1).text("backend").text("reason");
        table.row(vec!["loopback".into(), String::new()]);
        assert_eq!(table.rendered(Destination::Plain), "backend\nloopback\n");
    }

    #[test]
    fn lines_are_cut_between_words() {
        assert_eq!(wrap("to be or not", 5), ["to be", "or", "not"]);
        assert_eq!(wrap("a/path/that/is/long or", 5), ["a/path/that/is/long", "or"]);
        assert_eq!(wrap("two\nlines", 80), ["two", "lines"]);
        assert!(wrap("", 10).is_empty());
    }
}
