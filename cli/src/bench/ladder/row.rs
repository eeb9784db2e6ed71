//! The printed row of one rung.

use std::time::Duration;

use serde::Serialize;

use super::rung::Rung;
use crate::failure::CommandResult;
use crate::output::TextTable;
use crate::units::round;

/// The result of one rung. The fields are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct LadderRow {
    rung: usize,
    technique: &'static str,
    work_requests: u64,
    /// The payload in decimal GB/s. Null devices move no bytes, so it is the payload of the requests.
    gbytes_per_s: f64,
    /// The CPU time of one busy core.
    ns_per_wr: f64,
    busy_cores: usize,
    /// The line rate that one core could reach with pages of this size.
    gbps_per_core: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions_per_wr: Option<f64>,
}

impl LadderRow {
    /// The row of a rung with this many requests in this time.
    pub fn new(
        number: usize,
        rung: &Rung,
        page: usize,
        (requests, took): (u64, Duration),
        busy_cores: usize,
        instructions: Option<f64>,
    ) -> Self {
        let bytes_per_s = requests as f64 * page as f64 / took.as_secs_f64();
        Self {
            rung: number,
            technique: rung.name,
            work_requests: requests,
            gbytes_per_s: round(bytes_per_s / 1e9),
            ns_per_wr: round(took.as_nanos() as f64 * busy_cores as f64 / requests.max(1) as f64),
            busy_cores,
            gbps_per_core: round(bytes_per_s * 8.0 / 1e9 / busy_cores as f64),
            instructions_per_wr: instructions.map(round),
        }
    }

    /// Prints a table: with costs on null devices, or with throughput.
    pub fn print(rows: &[Self], null: bool) -> CommandResult {
        let table =
            TextTable::named_by(0).number("rung").text("technique").number("cores").number("ns per WR");
        let mut table = match null {
            true => table.number("instructions per WR").number("Gbps per core"),
            false => table.number("GB/s").number("times the first"),
        };
        let first = rows.first().map_or(1.0, |row| row.gbytes_per_s);
        let cells = |row: &Self| {
            let counted = row.instructions_per_wr.map_or(String::new(), |count| format!("{count:.0}"));
            let last = match null {
                true => [counted, format!("{:.0}", row.gbps_per_core)],
                false => [format!("{:.2}", row.gbytes_per_s), format!("{:.2}", row.gbytes_per_s / first)],
            };
            let head = [
                row.rung.to_string(),
                row.technique.to_owned(),
                row.busy_cores.to_string(),
                format!("{:.1}", row.ns_per_wr),
            ];
            head.into_iter().chain(last).collect()
        };
        rows.iter().for_each(|row| table.row(cells(row)));
        table.print()
    }
}
