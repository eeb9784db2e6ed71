//! The view of one process: three tables, and the sentence of the selected operation.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use multirail::Dump;
use multirail::observe::{OperationDump, RailDump, WorkerState};
use ratatui::Frame;
use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table, TableState, Wrap};

use super::rates::Rates;
use crate::admin_client::Sample;
use crate::failure::printable;

/// The lines besides the tables' rows: two of the title, a title and a heading for each table, the operation's sentence.
const FIXED_LINES: usize = 2 + 3 * 2 + DETAIL_LINES;

/// The lines of the selected operation's sentence, with an empty line before.
const DETAIL_LINES: usize = 5;

/// The most samples whose rates the small plot shows.
const HISTORY: usize = 120;

/// What a key does.
pub enum Step {
    NextTable,
    PreviousTable,
    /// Moves the selection by so many rows, down to the first or up to the last one.
    Rows(isize),
}

/// The newest sample of a process, and what the user looks at.
pub struct TopView {
    sample: Sample,
    /// In the order in which they are shown.
    operations: Vec<OperationDump>,
    rates: Rates,
    interval: Duration,
    taken: Instant,
    /// Bytes per second of the last intervals.
    history: VecDeque<u64>,
    /// The table that has the keys.
    focus: usize,
    /// The selected rows and the scroll positions.
    states: [TableState; 3],
}

/// A table that is ready to be drawn.
struct Listing {
    title: String,
    heading: Vec<&'static str>,
    widths: Vec<Constraint>,
    /// The cells of each row, and what it is marked with.
    rows: Vec<(Vec<String>, Style)>,
}

impl TopView {
    /// A view whose rates are zero until there is a second sample.
    pub fn new(sample: Sample, interval: Duration) -> Self {
        let (rates, history) = (Rates::default(), VecDeque::new());
        // The operations: what waits is what a user comes for.
        let operations = in_order(&sample.dump);
        Self {
            sample,
            operations,
            rates,
            interval,
            taken: Instant::now(),
            history,
            focus: 2,
            states: unmoved(),
        }
    }

    /// Shows a newer sample.
    pub fn show(&mut self, sample: Sample) {
        self.rates = Rates::between(&self.sample.dump, &sample.dump);
        self.operations = in_order(&sample.dump);
        self.sample = sample;
        self.taken = Instant::now();
        self.history.push_back(self.rates.sum().bytes as u64);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// Does what a key says.
    pub fn step(&mut self, step: Step) {
        match step {
            Step::NextTable => self.focus = (self.focus + 1) % 3,
            Step::PreviousTable => self.focus = (self.focus + 2) % 3,
            Step::Rows(rows) => {
                let last = self.rows(self.focus).saturating_sub(1);
                let state = &mut self.states[self.focus];
                let now = state.selected().unwrap_or(0).min(last);
                state.select(Some(now.saturating_add_signed(rows).min(last)));
            }
        }
    }

    /// The process, in words.
    pub fn process(&self) -> String {
        format!("process {} on {}", self.sample.dump.process, printable(&self.sample.dump.host))
    }

    /// One frame as text with all rows.
    pub fn text(&mut self, width: u16) -> String {
        let rows: usize = (0..3).map(|table| self.rows(table).max(1)).sum();
        let height = u16::try_from(FIXED_LINES + rows).unwrap_or(u16::MAX / width);
        let states = std::mem::replace(&mut self.states, unmoved());
        let Ok(mut terminal) = ratatui::Terminal::new(TestBackend::new(width, height));
        let Ok(_) = terminal.draw(|frame| self.draw(frame));
        self.states = states;
        let cells = terminal.backend().buffer().content();
        let lines = cells.chunks(usize::from(width)).map(|line| {
            let line: String = line.iter().map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned() + "\n"
        });
        lines.collect::<String>().trim_end().to_owned() + "\n"
    }

    /// Draws everything.
    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let heights = self.heights(frame.area().height);
        let [title, summary, rails, peers, operations, detail] =
            Layout::vertical([1, 1, heights[0], heights[1], heights[2], DETAIL_LINES as u16])
                .areas(frame.area());
        self.draw_title(frame, title);
        self.draw_summary(frame, summary);
        let listings = [self.rail_listing(), self.peer_listing(), self.operation_listing()];
        for (table, (listing, area)) in listings.into_iter().zip([rails, peers, operations]).enumerate() {
            listing.draw(frame, area, &mut self.states[table], self.focus == table);
        }
        self.draw_detail(frame, detail);
    }

    /// The heights of the tables, with title and heading. Each gets a row in turn until it has all, the last one the rest.
    fn heights(&self, height: u16) -> [u16; 3] {
        let mut left = usize::from(height).saturating_sub(FIXED_LINES);
        let mut rows = [0; 3];
        let wanted = [0, 1, 2].map(|table| self.rows(table).max(1));
        while left > 0 && rows != wanted {
            for table in 0..3 {
                let takes = usize::from(left > 0 && rows[table] < wanted[table]);
                rows[table] += takes;
                left -= takes;
            }
        }
        rows[2] += left;
        rows.map(|rows| u16::try_from(rows + 2).unwrap_or(u16::MAX))
    }

    /// The number of rows of a table.
    fn rows(&self, table: usize) -> usize {
        let dump = &self.sample.dump;
        match table {
            0 => dump.transports.iter().map(|group| group.rails.len()).sum(),
            1 => dump.peers.len(),
            _ => self.operations.len(),
        }
    }

    fn draw_title(&self, frame: &mut Frame<'_>, area: Rect) {
        let late = self.taken.elapsed().saturating_sub(self.interval);
        let state = match late > self.interval.max(Duration::from_secs(1)) {
            true => format!("no answer for {}", short(late + self.interval)),
            false => format!("every {}", short(self.interval)),
        };
        let text = format!("multirail top: {}, {state}", self.process());
        let keys = "q quit, Tab table, arrows rows";
        let gap = usize::from(area.width).saturating_sub(text.chars().count() + keys.len());
        let line = if gap > 0 { format!("{text}{:gap$}{keys}", "") } else { text };
        frame.render_widget(Line::from(line).bold(), area);
    }

    fn draw_summary(&self, frame: &mut Frame<'_>, area: Rect) {
        let (dump, rate) = (&self.sample.dump, self.rates.sum());
        let stalled = dump.stalled().count();
        let mut text = format!(
            "{:.2} GB/s   {:.1} Gbps   {} WRs/s   stalled: {stalled}",
            rate.bytes / 1e9,
            rate.bytes * 8.0 / 1e9,
            count(rate.requests)
        );
        let blocked = dump.transports.iter().filter(|group| group.worker == WorkerState::Blocked);
        let blocked: Vec<_> = blocked.map(|group| printable(&group.label)).collect();
        if !blocked.is_empty() {
            text += &format!("   worker blocked: {}", blocked.join(", "));
        }
        let used = u16::try_from(text.chars().count() + 3).unwrap_or(u16::MAX);
        let is_alarming = stalled > 0 || !blocked.is_empty();
        let style = if is_alarming { Style::new().fg(Color::Red) } else { Style::new() };
        frame.render_widget(Line::from(text).style(style), area);
        if self.history.len() > 1 && area.width > used {
            let plot = Rect { x: area.x + used, width: area.width - used, ..area };
            let newest = self.history.len().saturating_sub(usize::from(plot.width));
            let data: Vec<u64> = self.history.iter().skip(newest).copied().collect();
            frame.render_widget(Sparkline::default().data(data).style(Style::new().fg(Color::Cyan)), plot);
        }
    }

    fn draw_detail(&self, frame: &mut Frame<'_>, area: Rect) {
        let selected = self.states[2].selected().unwrap_or(0);
        let Some(operation) = self.operations.get(selected) else { return };
        let text =
            format!("\n{}: {}", printable(&operation.transport), printable_all(&operation.to_string()));
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }

    fn rail_listing(&self) -> Listing {
        let groups = self.sample.dump.transports.iter();
        let rails = groups.flat_map(|group| group.rails.iter().map(move |rail| (group, rail)));
        let rows = rails.enumerate().map(|(at, (group, rail))| {
            let rate = self.rates.of(at);
            let (state, style) = state(rail);
            let cells = vec![
                printable(&rail.counters.device),
                printable(&group.label),
                state.to_owned(),
                format!("{:.2}", rate.bytes / 1e9),
                count(rate.requests),
                format!("{}/{}", rail.outstanding, rail.depth),
                rail.counters.errors.to_string(),
            ];
            (cells, style)
        });
        Listing {
            title: format!("Rails: {}", self.rows(0)),
            heading: vec!["device", "transport", "state", "GB/s", "WRs/s", "queue", "errors"],
            widths: vec![
                Constraint::Fill(1),
                Constraint::Fill(1),
                Constraint::Length(14),
                Constraint::Length(8),
                Constraint::Length(7),
                Constraint::Length(11),
                Constraint::Length(6),
            ],
            rows: rows.collect(),
        }
    }

    fn peer_listing(&self) -> Listing {
        let rows = self.sample.dump.peers.iter().map(|peer| {
            let is_its = |operation: &&OperationDump| {
                operation.peer.as_ref().is_some_and(|name| name.id == peer.name.id)
            };
            let operations = self.operations.iter().filter(is_its).count();
            let cells = vec![
                peer.name.id.to_string(),
                printable(&peer.name.host),
                peer.name.address.as_deref().map_or_else(|| "this process".to_owned(), printable),
                peer.heard.map_or_else(String::new, |ago| format!("{} ago", short(ago))),
                operations.to_string(),
            ];
            (cells, Style::new())
        });
        let total = self.sample.dump.peers.len() as u64 + self.sample.omitted_peers;
        Listing {
            title: format!("Peers: {total}{}", left_out(self.sample.omitted_peers)),
            heading: vec!["peer", "host", "address", "heard", "operations"],
            widths: vec![
                Constraint::Length(6),
                Constraint::Fill(2),
                Constraint::Fill(3),
                Constraint::Length(10),
                Constraint::Length(10),
            ],
            rows: rows.collect(),
        }
    }

    fn operation_listing(&self) -> Listing {
        let rows = self.operations.iter().map(|operation| {
            let waits: Vec<_> = operation.waits.iter().map(|wait| printable_all(&wait.to_string())).collect();
            let mark = if operation.stalled { "stalled: " } else { "" };
            let cells = vec![
                operation.id.to_string(),
                operation.kind.name().to_owned(),
                bytes(operation.bytes),
                operation.peer.as_ref().map_or_else(String::new, |peer| peer.id.to_string()),
                short(operation.age),
                format!("{mark}{}", waits.join(", and ")),
            ];
            let style = if operation.stalled { Style::new().fg(Color::Red) } else { Style::new() };
            (cells, style)
        });
        let total = self.operations.len() as u64 + self.sample.omitted_operations;
        Listing {
            title: format!("Operations: {total}{}", left_out(self.sample.omitted_operations)),
            heading: vec!["op", "kind", "bytes", "peer", "age", "waits for"],
            widths: vec![
                Constraint::Length(9),
                Constraint::Length(11),
                Constraint::Length(9),
                Constraint::Length(4),
                Constraint::Length(7),
                Constraint::Fill(1),
            ],
            rows: rows.collect(),
        }
    }
}

impl Listing {
    fn draw(self, frame: &mut Frame<'_>, area: Rect, state: &mut TableState, has_focus: bool) {
        let [title, table] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
        let style = if has_focus { Style::new().reversed().bold() } else { Style::new().reversed().dim() };
        frame.render_widget(Line::from(self.title).style(style), title);
        let last = self.rows.len().saturating_sub(1);
        // The selected row may be gone.
        state.select(Some(state.selected().unwrap_or(0).min(last)));
        let rows = self
            .rows
            .into_iter()
            .map(|(cells, style)| Row::new(cells.into_iter().map(Cell::from)).style(style));
        let highlight = if has_focus { Style::new().reversed() } else { Style::new() };
        let drawn = Table::new(rows, self.widths).header(Row::new(self.heading).underlined());
        frame.render_stateful_widget(drawn.row_highlight_style(highlight), table, state);
    }
}

/// The states of tables in which nobody has moved.
fn unmoved() -> [TableState; 3] {
    std::array::from_fn(|_| TableState::new().with_selected(0))
}

/// The operations of a dump: those that stall first, then the oldest.
fn in_order(dump: &Dump) -> Vec<OperationDump> {
    let mut operations: Vec<_> = dump.operations().cloned().collect();
    operations.sort_by_key(|operation| (!operation.stalled, std::cmp::Reverse(operation.age)));
    operations
}

/// The state of a rail, and how it is marked.
fn state(rail: &RailDump) -> (&'static str, Style) {
    match (rail.lost, rail.retired) {
        (true, _) => ("lost", Style::new().fg(Color::Red)),
        (false, true) => ("out of service", Style::new().fg(Color::Yellow)),
        (false, false) => ("in service", Style::new()),
    }
}

fn left_out(count: u64) -> String {
    if count == 0 { String::new() } else { format!(", {count} not shown") }
}

/// Text of any length without control characters.
fn printable_all(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A number in at most 6 characters.
fn count(number: f64) -> String {
    match number {
        n if n < 10_000.0 => format!("{n:.0}"),
        n if n < 9_999_500.0 => format!("{:.0}k", n / 1e3),
        n => format!("{:.1}M", n / 1e6),
    }
}

/// Bytes in at most 9 characters.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4) as usize;
    let number = bytes as f64 / (1_u64 << (10 * unit)) as f64;
    let digits = usize::from(number.fract() > 0.0);
    format!("{number:.digits$} {}", UNITS[unit])
}

/// A time in at most 7 characters.
fn short(time: Duration) -> String {
    match time.as_secs_f64() {
        s if s < 0.001 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests;
