//! The loss of rails in the middle of a transfer: what it costs until the other rails have healed it.

use std::time::Duration;

use multirail::Time;
use serde::Serialize;

use super::costs::ProcessorCosts;
use super::failing_group::{CardLoss, FailingGroup, Healing};
use super::profile::{Profile, ProfileName};
use crate::Common;
use crate::failure::{CommandFailure, CommandResult};
use crate::output::{self, TextTable};
use crate::units::{Size, round};

/// How long after its loss the bytes that a card had sent may still arrive.
const LATE_AFTER: Duration = Duration::from_millis(1);

/// The result of one page size. The fields are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct FailRailsRow {
    model: &'static str,
    profile: ProfileName,
    size: u64,
    rails: u32,
    failed_rails: u32,
    post_cost_ns: f64,
    fence_us: u64,
    /// The payload from the loss to the end of the transfer: the sum over the rail groups.
    gbps: f64,
    /// What the rails that are left can carry.
    ceiling_gbps: f64,
    percent_of_ceiling: f64,
    /// The requests that were posted again, and their bytes.
    replayed: u64,
    replayed_bytes: u64,
    /// The time from the loss to the first request that was posted again, in the rail group where it was longest.
    /// `None` if nothing was posted on the lost rails.
    heal_ms: Option<f64>,
    /// The bytes that landed after their operation had ended.
    late_bytes: u64,
}

impl FailRailsRow {
    /// Simulates the loss of `failed` rails in the middle of a transfer of pages of `size` bytes.
    fn simulate(
        name: ProfileName,
        profile: &Profile,
        failed: u32,
        size: u64,
        cost: f64,
        fence_takes: Duration,
    ) -> CommandResult<Self> {
        let whole = FailingGroup::open(profile, 0, size, cost, CardLoss::NONE)?.run()?.took;
        let group = |number: u32| -> CommandResult<Healing> {
            let cards = failed / profile.groups + u32::from(number < failed % profile.groups);
            let (at, late_after) = (Time::ZERO.after(whole / 2), LATE_AFTER);
            let loss = CardLoss { cards, at, fence_takes, late_after, ..CardLoss::NONE };
            FailingGroup::open(profile, number, size, cost, loss)?.run()
        };
        let groups = (0..profile.groups).map(group).collect::<CommandResult<Vec<_>>>()?;
        let gbps: f64 = groups.iter().map(|group| group.gbps).sum();
        let share_left = 1.0 - f64::from(failed) / f64::from(profile.all_cards());
        let ceiling = profile.ceiling_gbps() * share_left;
        let healed_after = groups.iter().filter_map(|group| group.healed_after).max();
        Ok(Self {
            model: "simulation, not a measurement",
            profile: name,
            size,
            rails: profile.all_cards(),
            failed_rails: failed,
            post_cost_ns: round(cost),
            fence_us: fence_takes.as_micros() as u64,
            gbps: round(gbps),
            ceiling_gbps: round(ceiling),
            percent_of_ceiling: round(gbps / ceiling * 100.0),
            replayed: groups.iter().map(|group| group.replayed).sum(),
            replayed_bytes: groups.iter().map(|group| group.replayed_bytes).sum(),
            heal_ms: healed_after.map(|span| round(span.as_secs_f64() * 1e3)),
            late_bytes: groups.iter().map(|group| group.late_bytes).sum(),
        })
    }

    /// Prints a table with a note that it is a simulation, or JSON.
    fn print(common: &Common, rows: &[Self]) -> CommandResult {
        if common.json {
            return rows.iter().try_for_each(output::json);
        }
        let table = TextTable::named_by(0).number("size").number("rails").number("failed");
        let table = table.number("Gbps after the loss").number("ceiling Gbps").optional(1);
        let table = table.number("% of ceiling").number("replayed").optional(2);
        let mut table = table.number("replayed bytes").number("heal ms").number("late bytes");
        rows.iter().for_each(|row| table.row(row.cells()));
        table.print()?;
        if rows.iter().any(|row| row.percent_of_ceiling > 100.0) {
            output::print_text("over 100 %: some requests began before the loss and completed after it")?;
        }
        output::print_text(
            "the ceiling is that of the rails left; a simulation of this engine in virtual time, with real memory and \
             loopback's link model, not a measurement",
        )
    }

    fn cells(&self) -> Vec<String> {
        vec![
            Size(self.size).to_string(),
            self.rails.to_string(),
            self.failed_rails.to_string(),
            format!("{:.1}", self.gbps),
            format!("{:.1}", self.ceiling_gbps),
            format!("{:.2}", self.percent_of_ceiling),
            self.replayed.to_string(),
            self.replayed_bytes.to_string(),
            self.heal_ms.map_or("-".to_owned(), |heal| format!("{heal:.4}")),
            self.late_bytes.to_string(),
        ]
    }
}

/// Prints one row for each size.
pub fn run(
    common: &Common,
    name: ProfileName,
    profile: &Profile,
    failed: u32,
    sizes: &[u64],
    costs: &ProcessorCosts,
    fence_takes: Duration,
) -> CommandResult {
    check(profile, failed)?;
    let row = |size: &u64| {
        FailRailsRow::simulate(name, profile, failed, *size, costs.request_ns(*size), fence_takes)
    };
    FailRailsRow::print(common, &sizes.iter().map(row).collect::<CommandResult<Vec<_>>>()?)
}

/// Fails if these rails do not exist, or if a rail group has none left.
fn check(profile: &Profile, failed: u32) -> CommandResult {
    let (rails, most) = (profile.all_cards(), profile.groups * (profile.cards - 1));
    let refuse = |why: String| Err(CommandFailure::new(format!("--fail-rails {failed}: {why}")));
    match failed {
        0 => refuse("give at least 1".to_owned()),
        _ if failed > rails => refuse(format!("there are {rails} rails")),
        _ if failed == rails => refuse(format!("these are all {rails} rails; none would be left")),
        _ if failed > most => refuse(format!(
            "a rail group would have no rail left, and the rails of other groups do not take over; at most {most} of {rails} \
             can fail, {} of each group",
            profile.cards - 1
        )),
        _ => Ok(()),
    }
}
