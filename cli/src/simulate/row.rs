//! The printed row of one simulated page size.

use multirail::way::Way;
use serde::Serialize;

use super::costs::{MemoryKind, ProcessorCosts};
use super::host::HostResult;
use super::profile::{Profile, ProfileName};
use super::provider::CountedProvider;
use super::way_plan::{PageOptions, WayPlan};
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
    provider: Option<CountedProvider>,
    memory: MemoryKind,
    /// `direct`, `merged`, `gathered` or `coalesced`.
    way: &'static str,
    /// The stage that was busiest: `line`, `requests`, `cpu` or `copy`.
    limit: &'static str,
    /// The bytes of pages in a work request, or in a slot.
    payload: u64,
    /// The bytes of a slot, of coalesced pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    slot_bytes: Option<u64>,
    /// The cores that drive the rail groups, and how many of them were busy, on average.
    driving_cores: u32,
    cores: f64,
    /// The busy cores of the target, for this transfer.
    target_cores: f64,
    /// Our CPU time per work request; and that with the provider's and with that of the request's pages.
    post_cost_ns: f64,
    request_ns: f64,
    pub gbps: f64,
    gbytes_per_s: f64,
    ceiling_gbps: f64,
    percent_of_ceiling: f64,
    /// How busy each stage was.
    line_percent: f64,
    requests_percent: f64,
    cpu_percent: f64,
    copy_percent: f64,
    /// As `cores`.
    busy_cores: f64,
    /// The difference between the busiest and the least busy card, in percent.
    imbalance_percent: f64,
    rail_bytes: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fewest_cores: Option<u32>,
}

impl PageSizeRow {
    /// The row of one simulation with `cores` cores.
    pub fn new(
        name: ProfileName,
        profile: &Profile,
        costs: &ProcessorCosts,
        options: &PageOptions,
        size: u64,
        (plan, cores): (&WayPlan, u32),
        measured: &HostResult,
    ) -> Self {
        let (least, most) = (measured.bytes.iter().min(), measured.bytes.iter().max());
        let (least, most) = (least.copied().unwrap_or(0) as f64, most.copied().unwrap_or(0) as f64);
        let percent = |part: f64| round(part * 100.0);
        let usage = measured.usage;
        Self {
            model: "simulation, not a measurement",
            profile: name,
            size,
            rails: profile.all_cards(),
            provider: costs.provider,
            memory: options.memory,
            way: plan.way.name(),
            limit: usage.limit().name(),
            payload: plan.payload,
            slot_bytes: plan.slots.map(|slots| slots.costs.slot_bytes),
            driving_cores: cores,
            cores: round(measured.busy_cores),
            target_cores: round(measured.target_cores),
            post_cost_ns: round(costs.ours_ns),
            request_ns: round(plan.request_ns),
            gbps: round(measured.gbps),
            gbytes_per_s: round(measured.gbps / 8.0),
            ceiling_gbps: round(profile.ceiling_gbps()),
            percent_of_ceiling: percent(measured.gbps / profile.ceiling_gbps()),
            line_percent: percent(usage.line),
            requests_percent: percent(usage.requests),
            cpu_percent: percent(usage.cpu),
            copy_percent: percent(usage.copy),
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
        let table = TextTable::named_by(0).number("size").text("way").optional(5).number("rails");
        let table = table.optional(4).number("ns per WR").number("Gbps").optional(6).number("ceiling Gbps");
        let table = table.number("% of ceiling").text("limit").number("cores").number("target cores");
        let mut table = table.optional(1).number("imbalance %").optional(2).number("fewest cores");
        rows.iter().for_each(|row| table.row(row.cells()));
        table.print()?;
        if rows.iter().any(|row| row.percent_of_ceiling > 100.0) {
            output::print_text(
                "over 100 %: some requests began before the measured time and completed within it",
            )?;
        }
        if rows.iter().any(|row| row.slot_bytes.is_some()) {
            output::print_text("coalesced pages: a model of the stages that a slot passes")?;
        }
        if rows.iter().any(|row| row.way == Way::Gathered.name()) {
            output::print_text("gather lists are modelled: the engine does not have them")?;
        }
        if rows.iter().any(|row| row.provider.is_none()) {
            output::print_text(
                "the cores' time is the engine's own: with --provider, the provider's is added",
            )?;
        }
        output::print_text(
            "a simulation of this engine in virtual time against simulated cards, not a measurement",
        )
    }

    fn cells(&self) -> Vec<String> {
        vec![
            Size(self.size).to_string(),
            self.way.to_owned(),
            self.rails.to_string(),
            format!("{:.1}", self.request_ns),
            format!("{:.1}", self.gbps),
            format!("{:.1}", self.ceiling_gbps),
            format!("{:.2}", self.percent_of_ceiling),
            self.limit.to_owned(),
            format!("{:.2}", self.cores),
            format!("{:.2}", self.target_cores),
            format!("{:.2}", self.imbalance_percent),
            self.fewest_cores.map_or(String::new(), |cores| cores.to_string()),
        ]
    }
}
