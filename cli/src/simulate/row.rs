//! The printed row of one simulated page size.

use serde::Serialize;

use super::host::HostResult;
use super::profile::{Profile, ProfileName};
use crate::Common;
use crate::failure::CommandResult;
use crate::output::{self, TextTable};
use crate::units::{Size, round};

/// The result of one page size. The fields are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct PageSizeRow {
    model: &'static str,
    profile: ProfileName,
    size: u64,
    rails: u32,
    cores: u32,
    post_cost_ns: f64,
    pub gbps: f64,
    ceiling_gbps: f64,
    percent_of_ceiling: f64,
    busy_cores: f64,
    /// The difference between the busiest and the least busy card, in percent.
    imbalance_percent: f64,
    rail_bytes: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fewest_cores: Option<u32>,
}

impl PageSizeRow {
    /// The row of one simulation.
    pub fn new(
        name: ProfileName,
        profile: &Profile,
        cores: u32,
        cost: f64,
        size: u64,
        measured: &HostResult,
    ) -> Self {
        let (least, most) = (measured.bytes.iter().min(), measured.bytes.iter().max());
        let (least, most) = (least.copied().unwrap_or(0) as f64, most.copied().unwrap_or(0) as f64);
        Self {
            model: "simulation, not a measurement",
            profile: name,
            size,
            rails: profile.all_cards(),
            cores,
            post_cost_ns: round(cost),
            gbps: round(measured.gbps),
            ceiling_gbps: round(profile.ceiling_gbps()),
            percent_of_ceiling: round(measured.gbps / profile.ceiling_gbps() * 100.0),
            busy_cores: round(measured.busy_cores),
            imbalance_percent: round((most - least) / most.max(1.0) * 100.0),
            rail_bytes: measured.bytes.clone(),
            fewest_cores: None,
        }
    }

    /// Prints a table with a note that it is a simulation, or JSON.
    pub fn print(common: &Common, rows: &[Self]) -> CommandResult {
        if common.json {
            return rows.iter().try_for_each(output::json);
        }
        let table = TextTable::named_by(0).number("size").number("rails").number("cores");
        let table = table.number("ns per WR").optional(3).number("Gbps").number("ceiling Gbps");
        let table = table.number("% of ceiling").number("busy cores").optional(1);
        let mut table = table.number("imbalance %").optional(2).number("fewest cores");
        rows.iter().for_each(|row| table.row(row.cells()));
        table.print()?;
        if rows.iter().any(|row| row.percent_of_ceiling > 100.0) {
            output::print_text(
                "over 100 %: some requests began before the measured time and completed within it",
            )?;
        }
        output::print_text(
            "a simulation of this engine in virtual time against simulated cards, not a measurement",
        )
    }

    fn cells(&self) -> Vec<String> {
        vec![
            Size(self.size).to_string(),
            self.rails.to_string(),
            self.cores.to_string(),
            format!("{:.1}", self.post_cost_ns),
            format!("{:.1}", self.gbps),
            format!("{:.1}", self.ceiling_gbps),
            format!("{:.2}", self.percent_of_ceiling),
            format!("{:.2}", self.busy_cores),
            format!("{:.2}", self.imbalance_percent),
            self.fewest_cores.map_or(String::new(), |cores| cores.to_string()),
        ]
    }
}
