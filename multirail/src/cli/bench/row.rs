//! One measurement as it is printed.

use serde::Serialize;

use super::client::Measured;
use super::load::Load;
use super::rails::Rails;
use crate::cli::failure::Done;
use crate::cli::output;
use crate::cli::units::{Size, round};

/// One measurement; the fields are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct Row {
    backend: String,
    op: &'static str,
    src: String,
    dst: String,
    size: u64,
    pages: u32,
    inflight: u32,
    gbytes_per_s: f64,
    gbps: f64,
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    verified: bool,
    limit_gbytes_per_s: Option<f64>,
    /// Of one pass of the limit, which moves all pages.
    limit_p50_us: Option<f64>,
    percent_of_limit: Option<f64>,
    #[serde(skip)]
    is_on_gpu: bool,
    #[serde(flatten)]
    rails: Rails,
}

impl Row {
    /// The row of a measurement.
    pub fn new(backend: &str, load: &Load, measured: &Measured, verified: bool, rails: Rails) -> Self {
        let bytes_per_op = load.total() as f64 / load.operations() as f64;
        let limit = measured.limit.as_ref();
        Self {
            backend: backend.to_owned(),
            op: load.kind.name(),
            src: load.src.to_string(),
            dst: load.dst.to_string(),
            size: load.size,
            pages: load.pages,
            inflight: load.inflight,
            gbytes_per_s: round(measured.speed),
            gbps: round(measured.speed * 8.0),
            ops_per_s: round(measured.speed * 1e9 / bytes_per_op),
            p50_us: measured.latencies.quantile_us(0.5),
            p99_us: measured.latencies.quantile_us(0.99),
            p999_us: measured.latencies.quantile_us(0.999),
            max_us: measured.latencies.max_us(),
            verified,
            limit_gbytes_per_s: limit.map(|(speed, _)| round(*speed)),
            limit_p50_us: limit.map(|(_, latencies)| latencies.quantile_us(0.5)),
            percent_of_limit: limit.map(|(speed, _)| round(measured.speed / speed * 100.0)),
            is_on_gpu: load.is_on_gpu(),
            rails,
        }
    }

    /// Prints a table, and one of the rails.
    pub fn print(rows: &[Self]) -> Done {
        // All rows are of one pair of places.
        let limit = if rows.iter().any(|row| row.is_on_gpu) { "one copy" } else { "memcpy" };
        let (speed, percent) = (format!("{limit} GB/s"), format!("% of {limit}"));
        let header = [
            "backend",
            "op",
            "src",
            "dst",
            "size",
            "pages",
            "in flight",
            "GB/s",
            "Gbps",
            "ops/s",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "max µs",
            "verified",
            &speed,
            &percent,
        ];
        output::table(&header, rows.iter().map(Self::cells).collect(), 4..17)?;
        rows.iter().try_for_each(|row| row.rails.print())
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.backend.clone(),
            self.op.to_owned(),
            self.src.clone(),
            self.dst.clone(),
            Size(self.size).to_string(),
            self.pages.to_string(),
            self.inflight.to_string(),
            format!("{:.2}", self.gbytes_per_s),
            format!("{:.1}", self.gbps),
            format!("{:.0}", self.ops_per_s),
            format!("{:.2}", self.p50_us),
            format!("{:.2}", self.p99_us),
            format!("{:.2}", self.p999_us),
            format!("{:.2}", self.max_us),
            if self.verified { "yes" } else { "no" }.to_owned(),
            self.limit_gbytes_per_s.map_or("-".to_owned(), |speed| format!("{speed:.2}")),
            self.percent_of_limit.map_or("-".to_owned(), |percent| format!("{percent:.0}")),
        ]
    }
}
