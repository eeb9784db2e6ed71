//! The printed row of one measurement.

use std::time::Instant;

use serde::Serialize;

use super::client::RoundResults;
use super::failing::{FailRail, RailFailure};
use super::load::BenchLoad;
use super::rails::Rails;
use crate::failure::CommandResult;
use crate::output::{self, TextTable};
use crate::units::{Size, round};

/// The result of one measurement. The fields are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct BenchRow {
    backend: String,
    /// How bytes get to the other side's memory, in the words of an explanation.
    path: Option<String>,
    op: &'static str,
    src: String,
    dst: String,
    size: u64,
    pages: u32,
    regions: u32,
    /// The share of the pages that are in runs.
    contiguous: f64,
    inflight: u32,
    gbytes_per_s: f64,
    gbps: f64,
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// The mean time of the call that posts an operation.
    post_us: f64,
    /// The mean number of work requests of an operation.
    wrs: f64,
    /// The mean number of an operation's pages that shared a work request with the page before them.
    merged: f64,
    verified: bool,
    limit_gbytes_per_s: Option<f64>,
    /// The latency of one pass of the limit, which copies all pages.
    limit_p50_us: Option<f64>,
    percent_of_limit: Option<f64>,
    /// True if a signal or a failure ended the measurement early.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cut_short: bool,
    #[serde(skip)]
    is_on_gpu: bool,
    /// When the measurement began.
    #[serde(skip)]
    began: Instant,
    #[serde(flatten)]
    rails: Rails,
    /// The rail of `--fail-rail`.
    #[serde(flatten)]
    failed: Option<FailedRail>,
}

/// The rail that was lost, and what was posted again over the others.
#[derive(Debug, Serialize)]
pub struct FailedRail {
    failed_rail: String,
    failed_after_s: f64,
    /// The requests that were posted again, and their bytes.
    replayed: u64,
    replayed_bytes: u64,
}

impl FailedRail {
    /// The failure of one rail during which `rails` carried bytes.
    pub fn new(failure: &RailFailure, rails: &Rails) -> Self {
        let (FailRail { device, after }, (replayed, replayed_bytes)) = (failure.rail(), rails.replayed());
        let (failed_rail, failed_after_s) = (device.clone(), after.as_secs_f64());
        Self { failed_rail, failed_after_s, replayed, replayed_bytes }
    }
}

impl BenchRow {
    /// The row of a measurement.
    pub fn new(
        backend: &str,
        load: &BenchLoad,
        measured: &RoundResults,
        verified: bool,
        path: Option<String>,
        rails: Rails,
    ) -> Self {
        let bytes_per_op = load.total() as f64 / load.operations() as f64;
        let limit = measured.limit.as_ref();
        Self {
            backend: backend.to_owned(),
            path,
            op: load.kind.name(),
            src: load.src.to_string(),
            dst: load.dst.to_string(),
            size: load.size,
            pages: load.pages,
            regions: load.regions,
            contiguous: round(load.contiguous()),
            inflight: load.inflight,
            gbytes_per_s: round(measured.speed),
            gbps: round(measured.speed * 8.0),
            ops_per_s: round(measured.speed * 1e9 / bytes_per_op),
            p50_us: measured.latencies.quantile_us(0.5),
            p99_us: measured.latencies.quantile_us(0.99),
            p999_us: measured.latencies.quantile_us(0.999),
            max_us: measured.latencies.max_us(),
            post_us: round(measured.latencies.mean_posting_us()),
            wrs: round(measured.requests.0),
            merged: round(measured.requests.1),
            verified,
            limit_gbytes_per_s: limit.map(|(speed, _)| round(*speed)),
            limit_p50_us: limit.map(|(_, latencies)| latencies.quantile_us(0.5)),
            percent_of_limit: limit.map(|(speed, _)| round(measured.speed / speed * 100.0)),
            cut_short: false,
            is_on_gpu: load.is_on_gpu(),
            began: Instant::now(),
            rails,
            failed: None,
        }
    }

    /// Sets the rail that was lost during the measurement.
    pub fn failed_rail(self, failed: Option<FailedRail>) -> Self {
        Self { failed, ..self }
    }

    /// Sets when the measurement began.
    pub fn began_at(self, began: Instant) -> Self {
        Self { began, ..self }
    }

    /// When the measurement began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// The size of a page.
    pub fn size(&self) -> Size {
        Size(self.size)
    }

    /// Sets whether the measurement ended early.
    pub fn cut_short(self, cut_short: bool) -> Self {
        Self { cut_short, ..self }
    }

    /// Prints a table of the measurements of one bench, and a table of their rails.
    pub fn print(rows: &[Self]) -> CommandResult {
        let Some(first) = rows.first() else { return Ok(()) };
        let Self { backend, op, src, dst, contiguous, inflight, .. } = first;
        let runs = match *contiguous > 0.0 {
            true => format!(", contiguous: {:.0} %", contiguous * 100.0),
            false => String::new(),
        };
        output::print_text(&format!(
            "{op} over {backend}, from {src} to {dst}{runs}, in flight: {inflight}"
        ))?;
        let limit = if first.is_on_gpu { "one copy" } else { "memcpy" };
        let table = TextTable::named_by(0).number("size").number("pages").optional(2);
        let table = table.number("regions").optional(7);
        let table = table.number("GB/s").number("Gbps").optional(5).number("ops/s").optional(1);
        let table = table.number("p50 µs").number("p99 µs").number("p99.9 µs").optional(6);
        let table = table.number("max µs").optional(4).number("post µs").optional(8);
        let table = table.number("WRs/op").optional(9).number("merged/op").optional(10);
        let table = table.number(format!("{limit} GB/s")).optional(3);
        let mut table = table.number(format!("% of {limit}")).text("verified");
        rows.iter().for_each(|row| table.row(row.cells()));
        table.print()?;
        if rows.iter().any(|row| row.percent_of_limit > Some(100.0)) {
            let one = if first.is_on_gpu { "one contiguous copy" } else { "one thread's memcpy" };
            output::print_text(&format!(
                "over 100 %: the limit is {one}, but the backend may copy with several threads"
            ))?;
        }
        for failed in rows.iter().filter_map(|row| row.failed.as_ref()) {
            let FailedRail { failed_rail, failed_after_s, replayed, replayed_bytes } = failed;
            output::print_text(&format!(
                "{failed_rail} was lost after {failed_after_s} s; WRs that other rails replayed: {replayed}, with \
                 {replayed_bytes} bytes"
            ))?;
        }
        match rows {
            [row] => row.rails.print(),
            _ => Rails::print_sizes(rows.iter().map(|row| (Size(row.size), &row.rails))),
        }
    }

    fn cells(&self) -> Vec<String> {
        let verified = match (self.verified, self.cut_short) {
            (true, _) => "yes",
            (false, true) => "no: cut short",
            (false, false) => "no",
        };
        vec![
            Size(self.size).to_string(),
            self.pages.to_string(),
            // A column that is empty in all rows is not printed.
            if self.regions > 1 { self.regions.to_string() } else { String::new() },
            format!("{:.2}", self.gbytes_per_s),
            format!("{:.1}", self.gbps),
            format!("{:.0}", self.ops_per_s),
            format!("{:.2}", self.p50_us),
            format!("{:.2}", self.p99_us),
            format!("{:.2}", self.p999_us),
            format!("{:.2}", self.max_us),
            format!("{:.2}", self.post_us),
            format!("{:.0}", self.wrs),
            format!("{:.0}", self.merged),
            self.limit_gbytes_per_s.map_or(String::new(), |speed| format!("{speed:.2}")),
            self.percent_of_limit.map_or(String::new(), |percent| format!("{percent:.0}")),
            verified.to_owned(),
        ]
    }
}
