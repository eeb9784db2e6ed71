//! The table of a process's rails.

use multirail::admin::{RailState, RailStatus};

use crate::Common;
use crate::failure::CommandResult;
use crate::output::{self, TextTable};

/// Prints one row for each rail.
pub fn print(common: &Common, rails: &[RailStatus]) -> CommandResult {
    if common.json {
        return rails.iter().try_for_each(output::json);
    }
    let table = TextTable::named_by(1).text("device").text("transport").optional(1).text("state");
    let table = table.number("WRs").optional(2).number("bytes").number("errors");
    let mut table = table.number("taken over").optional(3).number("replayed").optional(4);
    for RailStatus { state, counters, .. } in rails {
        let state = match state {
            RailState::InService => "in service",
            RailState::OutOfService => "out of service",
            RailState::Lost => "lost",
            _ => "unknown",
        };
        table.row(vec![
            counters.device.clone(),
            counters.transport.clone(),
            state.to_owned(),
            (counters.posts + counters.direct).to_string(),
            (counters.bytes + counters.direct_bytes).to_string(),
            counters.errors.to_string(),
            counters.taken_over.to_string(),
            counters.replayed.to_string(),
        ]);
    }
    table.print()
}
