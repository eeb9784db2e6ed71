//! `bench --report`: one page with the results, plots, the machine and the findings of doctor. It needs no other file and no
//! network, and is well-formed XML.

mod plot;
mod timeline;

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use multirail::Fabric;
use serde_json::Value;

use super::row::BenchRow;
use crate::doctor::{self, Finding, Level};
use crate::failure::{CommandFailure, CommandResult, printable};
use crate::topo::picture::svg::escaped;
use crate::units::Size;
use crate::{Common, topo};
use plot::{LinePlot, Scale, Series, number};
use timeline::{Timeline, TimelineRecorder};

/// The most rails that have a line of their own in the timeline.
const MAX_LINES: usize = 7;

const CSS: &str = "\
body{font:15px/1.45 system-ui,sans-serif;color:#1f2933;background:#fff;margin:0 auto;padding:24px 40px;max-width:1200px}\
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:34px 0 8px}p{margin:6px 0}\
table{border-collapse:collapse;width:100%;font-size:13.5px}th,td{padding:4px 9px;border-bottom:1px solid #d9dfe5;text-align:left;\
vertical-align:top}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}.tile{border:1px solid #d9dfe5;border-radius:8px;padding:10px 18px;\
min-width:120px}#machine th{width:200px}.tile b{display:block;font-size:22px}.tile span{color:#52606d;font-size:13px}\
svg{max-width:100%;height:auto}.warning{color:#8a4b00}.problem,.failed{color:#a61b1b}.note{color:#52606d}\
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}";

/// A page that is being made: what is known before the measurement, and what its time brings.
pub struct ResultPage {
    path: PathBuf,
    file: File,
    began: SystemTime,
    machine: CommandResult<String>,
    findings: CommandResult<Vec<Finding>>,
    timeline: TimelineRecorder,
}

impl ResultPage {
    /// Makes the file, looks at the machine, and begins to watch the rails of `fabric`.
    pub fn begin(common: &Common, path: &Path, fabric: &Fabric) -> CommandResult<Self> {
        let file = File::create(path).map_err(|error| failed(path, &error))?;
        let (machine, findings) = (topo::picture_of_this_host(common), doctor::findings(common));
        let timeline = TimelineRecorder::start(fabric)?;
        Ok(Self { path: path.to_owned(), file, began: SystemTime::now(), machine, findings, timeline })
    }

    /// Writes the page with the rows that were measured, and with the failure that ended the bench.
    pub fn finish(mut self, rows: &[BenchRow], failure: Option<&CommandFailure>) -> CommandResult {
        let timeline = self.timeline.finish();
        let page = Content { rows, failure, timeline, began: self.began };
        let text = page.text(&self.machine, &self.findings);
        self.file.write_all(text.as_bytes()).map_err(|error| failed(&self.path, &error))
    }
}

/// What a page shows of the bench itself.
struct Content<'a> {
    rows: &'a [BenchRow],
    failure: Option<&'a CommandFailure>,
    timeline: Option<Timeline>,
    began: SystemTime,
}

impl Content<'_> {
    fn text(&self, machine: &CommandResult<String>, findings: &CommandResult<Vec<Finding>>) -> String {
        let values: Vec<Value> = self.rows.iter().filter_map(|row| serde_json::to_value(row).ok()).collect();
        let mut html = format!(
            "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
             <meta name=\"viewport\" content=\"width=device-width\"/>\n<title>multirail bench</title>\n\
             <link rel=\"icon\" href=\"data:,\"/>\n<style>{CSS}</style>\n</head>\n<body>\n"
        );
        self.summary(&mut html, &values);
        results(&mut html, &values);
        self.over_size(&mut html, &values);
        balance(&mut html, &values);
        self.over_time(&mut html);
        machine_section(&mut html, machine);
        doctor_section(&mut html, findings);
        html.push_str("<h2>Raw results</h2>\n<p class=\"note\">As <code>--json</code> prints them.</p>\n<pre id=\"json\">");
        let lines: Vec<_> = self.rows.iter().filter_map(|row| serde_json::to_string(row).ok()).collect();
        html.push_str(&escaped_lines(&lines.join("\n")));
        html.push_str("</pre>\n</body>\n</html>\n");
        html
    }

    fn summary(&self, html: &mut String, values: &[Value]) {
        let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        let host = gethostname();
        add(html, &format!("<h1>multirail bench on {}</h1>\n", escaped(&host)));
        add(
            html,
            &format!(
                "<p class=\"note\">{}, multirail {}: <code>{}</code></p>\n",
                utc(self.began),
                env!("CARGO_PKG_VERSION"),
                escaped(&words.join(" "))
            ),
        );
        if let Some(failure) = self.failure {
            add(
                html,
                &format!("<p class=\"failed\">The bench ended early: {}.</p>\n", escaped(failure.message())),
            );
        }
        let Some(first) = values.first() else {
            html.push_str("<p class=\"failed\">No size was measured.</p>\n");
            return;
        };
        let words = |key: &str| escaped(first[key].as_str().unwrap_or("unknown"));
        add(
            html,
            &format!(
                "<p>{} over {}, from {} to {}, {} in flight; path: {}.</p>\n",
                words("op"),
                words("backend"),
                words("src"),
                words("dst"),
                first["inflight"],
                words("path")
            ),
        );
        html.push_str("<div class=\"tiles\">\n");
        let figure = |value: &&Value, key: &str| value[key].as_f64().unwrap_or(0.0);
        let fastest =
            values.iter().max_by(|a, b| figure(a, "gbytes_per_s").total_cmp(&figure(b, "gbytes_per_s")));
        if let Some(row) = fastest {
            let about = format!("{:.1} Gbps, at {}", figure(&row, "gbps"), size(row));
            tile(html, &format!("{:.2} GB/s", figure(&row, "gbytes_per_s")), &about);
            if let Some(percent) = row["percent_of_limit"].as_f64() {
                tile(html, &format!("{percent:.0} %"), "of one thread's copy in the same run");
            }
        }
        let quickest = values.iter().min_by(|a, b| figure(a, "p50_us").total_cmp(&figure(b, "p50_us")));
        if let Some(row) = quickest {
            tile(
                html,
                &format!("{:.2} µs", figure(&row, "p50_us")),
                &format!("median latency at {}", size(row)),
            );
            tile(
                html,
                &format!("{:.2} µs", figure(&row, "p99_us")),
                &format!("p99 latency at {}", size(row)),
            );
        }
        let verified = values.iter().filter(|row| row["verified"] == true).count();
        tile(html, &format!("{verified} of {}", values.len()), "verified, every byte");
        html.push_str("</div>\n");
    }

    fn over_size(&self, html: &mut String, values: &[Value]) {
        if values.len() < 2 {
            return;
        }
        let series = |name: &str, key: &str| {
            let point = |row: &Value| Some((row["size"].as_f64()?, row[key].as_f64()?));
            Series { name: name.to_owned(), points: values.iter().filter_map(point).collect() }
        };
        let has_points = |series: &Series| !series.points.is_empty();
        let sizes = |bytes: f64| Size(bytes as u64).to_string();
        let mut plot = LinePlot {
            title: "Bandwidth over size",
            labels: ["size of a page", "GB/s"],
            scales: [Scale::Powers(2.0), Scale::Powers(10.0)],
            series: vec![
                series("transfer", "gbytes_per_s"),
                series("one thread's copy", "limit_gbytes_per_s"),
            ],
            marks: Vec::new(),
            name: sizes,
        };
        plot.series.retain(has_points);
        add(html, &format!("<h2>Bandwidth over size</h2>\n{}", plot.draw()));
        plot.title = "Latency over size";
        plot.labels[1] = "µs";
        plot.series = vec![series("median", "p50_us"), series("p99", "p99_us"), series("p99.9", "p999_us")];
        add(html, &format!("<h2>Latency over size</h2>\n{}", plot.draw()));
    }

    fn over_time(&self, html: &mut String) {
        let Some(timeline) = self.timeline.as_ref().filter(|timeline| timeline.samples.len() > 1) else {
            return;
        };
        let mut series = vec![Series { name: "all rails".into(), points: timeline.rates(None) }];
        let rails = timeline.devices.len();
        let note = match rails {
            0 | 1 => String::new(),
            2..=MAX_LINES => {
                let line = |(rail, device): (usize, &String)| Series {
                    name: printable(device),
                    points: timeline.rates(Some(rail)),
                };
                series.extend(timeline.devices.iter().enumerate().map(line));
                String::new()
            }
            _ => format!(" The {rails} rails are too many for lines of their own."),
        };
        let marks = self.rows.iter().map(|row| {
            let began = row.began().saturating_duration_since(timeline.began).as_secs_f64();
            (began, row.size().to_string())
        });
        let plot = LinePlot {
            title: "Timeline",
            labels: ["seconds since the bench began", "GB/s"],
            scales: [Scale::Time, Scale::Linear],
            series,
            marks: marks.collect(),
            name: number,
        };
        add(
            html,
            &format!(
                "<h2>Timeline</h2>\n{}<p class=\"note\">Rounds of the transfer alternate with rounds of a plain copy and with \
                 verification, which no rail carries. A dashed line is the begin of a size.{note}</p>\n",
                plot.draw()
            ),
        );
    }
}

/// The table of all rows.
fn results(html: &mut String, values: &[Value]) {
    if values.is_empty() {
        return;
    }
    const COLUMNS: [(&str, &str, usize); 10] = [
        ("GB/s", "gbytes_per_s", 2),
        ("Gbps", "gbps", 1),
        ("ops/s", "ops_per_s", 0),
        ("p50 µs", "p50_us", 2),
        ("p99 µs", "p99_us", 2),
        ("p99.9 µs", "p999_us", 2),
        ("max µs", "max_us", 2),
        ("WRs/op", "wrs", 0),
        ("copy GB/s", "limit_gbytes_per_s", 2),
        ("% of copy", "percent_of_limit", 0),
    ];
    html.push_str(
        "<h2>Results</h2>\n<table id=\"results\">\n<tr><th class=\"n\">size</th><th class=\"n\">pages</th>",
    );
    COLUMNS.iter().for_each(|(heading, ..)| add(html, &format!("<th class=\"n\">{heading}</th>")));
    html.push_str("<th>verified</th></tr>\n");
    for row in values {
        add(html, &format!("<tr><td class=\"n\">{}</td><td class=\"n\">{}</td>", size(row), row["pages"]));
        for (_, key, digits) in COLUMNS {
            let figure = row[key].as_f64().map_or(String::new(), |figure| format!("{figure:.digits$}"));
            add(html, &format!("<td class=\"n\">{figure}</td>"));
        }
        let verified = match (row["verified"] == true, row["cut_short"] == true) {
            (true, _) => "yes",
            (false, true) => "no: cut short",
            (false, false) => "no",
        };
        add(html, &format!("<td>{verified}</td></tr>\n"));
    }
    html.push_str("</table>\n");
}

/// The bytes of each rail, over all sizes.
fn balance(html: &mut String, values: &[Value]) {
    let mut rails: Vec<(String, u64)> = Vec::new();
    for rail in values.iter().filter_map(|row| row["rails"].as_array()).flatten() {
        let (device, bytes) =
            (rail["device"].as_str().unwrap_or_default(), rail["bytes"].as_u64().unwrap_or(0));
        match rails.iter_mut().find(|(known, _)| known == device) {
            Some((_, sum)) => *sum += bytes,
            None => rails.push((device.to_owned(), bytes)),
        }
    }
    let total = rails.iter().map(|rail| rail.1).sum::<u64>().max(1) as f64;
    let bars: Vec<_> = rails
        .into_iter()
        .map(|(device, bytes)| {
            let text = format!("{:.3} GB, {:.2} %", bytes as f64 / 1e9, bytes as f64 / total * 100.0);
            (printable(&device), bytes as f64, text)
        })
        .collect();
    if !bars.is_empty() {
        add(html, &format!("<h2>Balance of the rails</h2>\n{}", plot::bars("Bytes of each rail", &bars)));
    }
}

fn machine_section(html: &mut String, machine: &CommandResult<String>) {
    html.push_str("<h2>Machine</h2>\n<table id=\"machine\">\n");
    for (name, value) in facts() {
        add(html, &format!("<tr><th>{name}</th><td>{}</td></tr>\n", escaped(&value)));
    }
    html.push_str("</table>\n");
    match machine {
        Ok(picture) => html.push_str(picture),
        Err(failure) => {
            add(html, &format!("<p class=\"warning\">No picture: {}.</p>\n", escaped(failure.message())));
        }
    }
}

fn doctor_section(html: &mut String, findings: &CommandResult<Vec<Finding>>) {
    html.push_str("<h2>Findings of doctor</h2>\n");
    let findings = match findings {
        Ok(findings) => findings,
        Err(failure) => {
            add(html, &format!("<p class=\"warning\">doctor failed: {}.</p>\n", escaped(failure.message())));
            return;
        }
    };
    html.push_str("<table id=\"doctor\">\n<tr><th>check</th><th>level</th><th>found</th><th>cost</th><th>fix</th></tr>\n");
    let mut sorted: Vec<_> = findings.iter().collect();
    sorted.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    for Finding { check, level, what, cost, remedy } in sorted {
        let class = if *level >= Level::Warning { level.word() } else { "note" };
        add(html, &format!("<tr class=\"{class}\"><td>{}</td><td>{}</td>", escaped(check), level.word()));
        for cell in [Some(what), cost.as_ref(), remedy.as_ref()] {
            add(html, &format!("<td>{}</td>", escaped_lines(cell.map_or("", String::as_str))));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table>\n");
}

fn tile(html: &mut String, figure: &str, about: &str) {
    add(
        html,
        &format!("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", escaped(figure), escaped(about)),
    );
}

/// The size of a row's page, in words.
fn size(row: &Value) -> String {
    Size(row["size"].as_u64().unwrap_or(0)).to_string()
}

/// Text with the lines that it has; a page may be opened in a browser that wraps them.
fn escaped_lines(text: &str) -> String {
    text.lines().map(escaped).collect::<Vec<_>>().join("\n")
}

fn add(html: &mut String, text: &str) {
    // Writing to a string does not fail.
    let _ = html.write_str(text);
}

/// What Linux tells of this machine. What it does not tell is left out.
fn facts() -> Vec<(&'static str, String)> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let value = |text: String, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cores = std::thread::available_parallelism().map_or_else(|_| "unknown".to_owned(), |n| n.to_string());
    let processor = read("/proc/cpuinfo").and_then(|text| value(text, "model name"));
    let memory = read("/proc/meminfo").and_then(|text| value(text, "MemTotal"));
    let gib = |text: String| {
        let kib: f64 = text.split(' ').next()?.parse().ok()?;
        Some(format!("{:.1} GiB", kib / f64::from(1 << 20)))
    };
    let facts = [
        ("system", read("/proc/sys/kernel/osrelease").map(|release| format!("Linux {}", release.trim()))),
        ("processor", processor),
        ("cores for this process", Some(cores)),
        ("memory", memory.and_then(gib)),
    ];
    facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn gethostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A moment as `2026-01-31 23:59:59 UTC`.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (mut days, second) = (seconds / 86_400, seconds % 86_400);
    let is_leap =
        |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 0;
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year}-{:02}-{:02} {hour:02}:{minute:02}:{:02} UTC", month + 1, days + 1, second % 60)
}

#[cold]
fn failed(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure::new(format!("cannot write the report to {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_dates() {
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_795_910_400, "2026-11-29 00:00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }

    #[test]
    fn a_page_without_results_is_well_formed_and_says_why() {
        let failure = CommandFailure::new("the peer <x> has died & more");
        let page = Content { rows: &[], failure: Some(&failure), timeline: None, began: UNIX_EPOCH };
        let text = page.text(&Err(CommandFailure::new("no /sys")), &Err(CommandFailure::new("no /proc")));
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document = roxmltree::Document::parse_with_options(&text, options).expect("XML");
        let texts: String = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["the peer <x> has died & more", "No size was measured", "no /sys", "no /proc"] {
            assert!(texts.contains(wanted), "{wanted}: {texts}");
        }
    }
}
