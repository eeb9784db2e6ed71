//! Tables: rows under headings, laid out for the place where stdout goes.
//!
//! In a terminal a table has boxes and is never wider than the screen. Where it would be, its texts wrap between
//! words, then its optional columns go; a table that still does not fit is printed one key per line. In a pipe
//! it is plain aligned text, and no value is wrapped: a line stays whole for `grep`.

use std::io::{self, IsTerminal};

use comfy_table::{CellAlignment, ContentArrangement, presets};

use crate::failure::CommandResult;
use crate::output;

/// The widest plain table; a wider one is printed one key per line.
const PLAIN_WIDTH: usize = 160;

/// The width of a terminal that does not tell it.
const UNKNOWN_WIDTH: usize = 80;

/// Characters that a wrapped text has at least in a line of a table.
const NARROWEST_TEXT: usize = 24;

/// Characters that a value has at least beside its key; with fewer it stands below the key.
const NARROWEST_VALUE: usize = 20;

/// Where a table is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Surface {
    /// A screen of so many columns.
    Terminal(usize),
    /// A pipe or a file.
    Plain,
}

/// Rows under headings.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// Columns that name a row; one key per line, they are its title.
    named: usize,
}

struct Column {
    heading: String,
    is_number: bool,
    /// The order in which columns are left out where the table is too wide: the highest first, 0 never.
    optional: u8,
}

impl Table {
    /// A table without columns, whose first `named` columns will name the row.
    pub fn named_by(named: usize) -> Self {
        Self { columns: Vec::new(), rows: Vec::new(), named }
    }

    /// Adds a column of text: left aligned, wrapped between words.
    pub fn text(self, heading: impl Into<String>) -> Self {
        self.column(heading.into(), false)
    }

    /// Adds a column of numbers: right aligned, never wrapped.
    pub fn number(self, heading: impl Into<String>) -> Self {
        self.column(heading.into(), true)
    }

    fn column(mut self, heading: String, is_number: bool) -> Self {
        self.columns.push(Column { heading, is_number, optional: 0 });
        self
    }

    /// Lets a narrow terminal leave out the column added last; of several, the one of the highest `rank` first.
    pub fn optional(mut self, rank: u8) -> Self {
        if let Some(column) = self.columns.last_mut() {
            column.optional = rank;
        }
        self
    }

    /// Adds a row: a cell per column. Lines of a cell end in `\n`.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Prints it, as it fits stdout.
    pub fn print(&self) -> CommandResult {
        output::text(&self.rendered(Surface::of_stdout()))
    }

    fn rendered(&self, surface: Surface) -> String {
        let mut shown: Vec<usize> =
            (0..self.columns.len()).filter(|column| !self.is_empty(*column)).collect();
        let all = shown.len();
        loop {
            if let Some(widths) = self.widths(&shown, surface) {
                let mut text = self.boxed(&shown, &widths, surface);
                if shown.len() < all {
                    text.push_str(&self.left_out(&shown, surface));
                }
                return text;
            }
            // One row shows everything, one key per line, instead of a part of it.
            let Some(least) = self.least_needed(&shown).filter(|_| self.rows.len() > 1) else { break };
            shown.remove(least);
        }
        self.records(surface)
    }

    /// Whether no row has anything in this column.
    fn is_empty(&self, column: usize) -> bool {
        self.rows.iter().all(|row| row[column].is_empty())
    }

    /// The position in `shown` of the column to leave out next.
    fn least_needed(&self, shown: &[usize]) -> Option<usize> {
        let rank = |at: &usize| self.columns[shown[*at]].optional;
        (0..shown.len()).max_by_key(rank).filter(|at| rank(at) > 0)
    }

    /// The widths of these columns where they fit.
    fn widths(&self, shown: &[usize], surface: Surface) -> Option<Vec<usize>> {
        let room = surface.room(shown.len())?;
        let full: Vec<usize> = shown.iter().map(|column| self.full_width(*column)).collect();
        if full.iter().sum::<usize>() <= room {
            return Some(full);
        }
        if surface == Surface::Plain {
            return None;
        }
        let mut widths: Vec<usize> = shown.iter().map(|column| self.least_width(*column)).collect();
        let mut left = room.checked_sub(widths.iter().sum())?;
        // The most cramped column grows first, so that all need about as many lines.
        while left > 0 {
            let cramped = |at: &usize| full[*at] * 1000 / widths[*at].max(1);
            let Some(at) = (0..widths.len()).filter(|at| widths[*at] < full[*at]).max_by_key(cramped) else {
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

    /// The width at which nothing wraps.
    fn full_width(&self, column: usize) -> usize {
        let heading = self.columns[column].heading.as_str();
        let lines = self.cells(column).chain([heading]).flat_map(str::lines);
        lines.map(width).max().unwrap_or(0)
    }

    /// The width below which a word would break, or a text be hard to read.
    fn least_width(&self, column: usize) -> usize {
        let Column { heading, is_number, .. } = &self.columns[column];
        let heading = longest_word(heading);
        if *is_number {
            return self.cells(column).flat_map(str::lines).map(width).max().unwrap_or(0).max(heading);
        }
        let words = self.cells(column).map(longest_word).max().unwrap_or(0);
        let text = self.cells(column).flat_map(str::lines).map(width).max().unwrap_or(0);
        words.max(heading).max(text.min(NARROWEST_TEXT))
    }

    fn boxed(&self, shown: &[usize], widths: &[usize], surface: Surface) -> String {
        let mut table = comfy_table::Table::new();
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.load_style(match surface {
            Surface::Terminal(_) => presets::UTF8_FULL_CONDENSED,
            Surface::Plain => presets::NOTHING,
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
            if surface == Surface::Plain {
                drawn.set_padding((0, 2));
            }
        }
        table.trim_fmt() + "\n"
    }

    /// Names the columns that a table of `shown` lacks.
    fn left_out(&self, shown: &[usize], surface: Surface) -> String {
        let missing =
            (0..self.columns.len()).filter(|column| !shown.contains(column) && !self.is_empty(*column));
        let names: Vec<&str> = missing.map(|column| self.columns[column].heading.as_str()).collect();
        let note = format!("not shown, for want of columns: {} (--json has all)", names.join(", "));
        wrap(&note, surface.width()).join("\n") + "\n"
    }

    /// One key per line.
    fn records(&self, surface: Surface) -> String {
        let keys = self.columns[self.named..].iter().map(|column| width(&column.heading));
        let (indent, key) = (if self.named > 0 { 2 } else { 0 }, keys.max().unwrap_or(0) + 2);
        let room = surface.width().saturating_sub(indent + key);
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
                let is_below = room < NARROWEST_VALUE || longest_word(value) > room;
                let (first, further, room) = match is_below && surface != Surface::Plain {
                    true => (format!("\n{:indent$}", "", indent = indent + 2), indent + 2, room + key - 2),
                    false => (" ".repeat(key - width(&column.heading)), indent + key, room),
                };
                let lines = match surface {
                    Surface::Plain => value.lines().map(str::to_owned).collect(),
                    Surface::Terminal(_) => wrap(value, room),
                };
                text.push_str(&format!("{:indent$}{}{first}", "", column.heading));
                text.push_str(&lines.join(&format!("\n{:further$}", "")));
                text.push('\n');
            }
        }
        text
    }
}

impl Surface {
    fn of_stdout() -> Self {
        let out = io::stdout();
        if !out.is_terminal() {
            return Self::Plain;
        }
        let told = rustix::termios::tcgetwinsize(&out).map_or(0, |size| usize::from(size.ws_col));
        Self::Terminal(if told == 0 { UNKNOWN_WIDTH } else { told })
    }

    fn width(self) -> usize {
        match self {
            Self::Terminal(width) => width,
            Self::Plain => usize::MAX,
        }
    }

    /// Characters for the cells of so many columns, beside what separates them; `None` if there are none left.
    fn room(self, columns: usize) -> Option<usize> {
        match self {
            // A line before each column and behind the last, and a space on both sides of a cell.
            Self::Terminal(width) => width.checked_sub(3 * columns + 1),
            Self::Plain => PLAIN_WIDTH.checked_sub(2 * columns),
        }
    }
}

/// Prints a sentence: wrapped between words where stdout is a terminal.
pub fn print_text(text: &str) -> CommandResult {
    match Surface::of_stdout() {
        Surface::Plain => output::line(text),
        Surface::Terminal(width) => output::line(&wrap(text, width).join("\n")),
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

fn longest_word(text: &str) -> usize {
    text.split_whitespace().map(width).max().unwrap_or(0)
}

/// The lines of `text`, cut between words into lines of at most `room` characters. A word that is longer has a
/// line of its own.
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

    fn findings() -> Table {
        let mut table = Table::named_by(2).text("check").text("level").text("found").text("cost").text("fix");
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        table.row(row([
            "memlock",
            "warning",
            "soft 64 KiB, hard 64 KiB",
            "a card registers little memory: registered pages are pinned and count",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service",
        ]));
        table.row(row(["kernel", "ok", "Linux 6.18.5", "", ""]));
        table
    }

    fn figures() -> Table {
        let table = Table::named_by(0).number("size").number("GB/s").number("Gbps").optional(1);
        let mut table =
            table.number("ops/s").number("p50 µs").number("p99.9 µs").optional(2).number("% of memcpy");
        for size in ["8 B", "64 KiB"] {
            let cells = [size, "12.34", "98.7", "1234567", "0.10", "123.45", "99"];
            table.row(cells.map(str::to_owned).to_vec());
        }
        table
    }

    /// Every word of `table`, each in one line of `text`.
    fn assert_whole(table: &Table, text: &str, width_of_lines: usize) {
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
            let (findings, text) = (findings(), findings().rendered(Surface::Terminal(columns)));
            assert_whole(&findings, &text, columns);
            let text = figures().rendered(Surface::Terminal(columns));
            assert!(text.lines().all(|line| width(line) <= columns), "{text}");
            assert!(text.contains("1234567"), "{text}");
        }
    }

    #[test]
    fn a_wide_terminal_has_boxes_and_a_narrow_one_a_key_per_line() {
        let wide = findings().rendered(Surface::Terminal(200));
        assert!(wide.starts_with('┌') && wide.contains("found"), "{wide}");
        let narrow = findings().rendered(Surface::Terminal(80));
        assert!(narrow.starts_with("memlock: warning\n  found  soft 64 KiB"), "{narrow}");
        assert!(narrow.ends_with("kernel: ok\n  found  Linux 6.18.5\n"), "{narrow}");
    }

    #[test]
    fn optional_columns_go_by_their_rank_and_are_named() {
        let full = figures().rendered(Surface::Terminal(80));
        assert!(full.contains("p99.9 µs") && full.contains("Gbps") && !full.contains("not shown"), "{full}");
        let less = figures().rendered(Surface::Terminal(59));
        assert!(less.contains("Gbps") && less.contains("not shown, for want of columns: p99.9 µs"), "{less}");
        let least = figures().rendered(Surface::Terminal(50));
        assert!(least.contains("Gbps, p99.9 µs"), "{least}");
        let mut one = figures();
        one.rows.truncate(1);
        let one = one.rendered(Surface::Terminal(50));
        assert!(one.starts_with("size         8 B\nGB/s         12.34\nGbps         98.7\n"), "{one}");
    }

    #[test]
    fn a_pipe_has_plain_text_whose_values_are_whole() {
        let plain = figures().rendered(Surface::Plain);
        assert_eq!(plain.lines().count(), 3, "{plain}");
        assert!(plain.lines().next().is_some_and(|line| line.contains("p99.9 µs")), "{plain}");
        let records = findings().rendered(Surface::Plain);
        assert!(
            records.contains(
                "\n  cost   a card registers little memory: registered pages are pinned and count\n"
            )
        );
        for text in [plain, records] {
            assert!(
                !text.contains(['│', '┌', '─']) && text.lines().all(|line| line == line.trim_end()),
                "{text}"
            );
        }
    }

    #[test]
    fn columns_without_any_cell_are_not_there() {
        let mut table = Table::named_by(1).text("backend").text("reason");
        table.row(vec!["loopback".into(), String::new()]);
        assert_eq!(table.rendered(Surface::Plain), "backend\nloopback\n");
    }

    #[test]
    fn lines_are_cut_between_words() {
        assert_eq!(wrap("to be or not", 5), ["to be", "or", "not"]);
        assert_eq!(wrap("a/path/that/is/long or", 5), ["a/path/that/is/long", "or"]);
        assert_eq!(wrap("two\nlines", 80), ["two", "lines"]);
        assert!(wrap("", 10).is_empty());
    }
}
