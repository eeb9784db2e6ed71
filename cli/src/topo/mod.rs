//! `multirail topo`: the GPUs and cards of a machine, and its rail groups.

pub mod label;
pub mod picture;
#[cfg(test)]
mod samples;
mod tree;

use std::path::PathBuf;

use serde::Serialize;
use topology::{Cpus, Kind, Machine, RailGroup};

use multirail::{BackendChoice, BackendGroups, MachineSource};

use super::failure::{CommandFailure, CommandResult, printable};
use super::output::TextTable;
use super::{Common, output};

#[derive(clap::Args)]
pub struct TopoArguments {
    /// The machine to show: hwloc (this host through libhwloc), hwloc:FILE (XML of lstopo),
    /// sysfs:DIR (a copy of a /sys), file:FILE (a description in TOML) or p5.48xlarge (built in) [default:
    /// $MULTIRAIL_TOPOLOGY, or this host, from /sys]
    #[arg(long, value_name = "SOURCE")]
    from: Option<MachineSource>,

    /// Also show disks in the tree
    #[arg(long)]
    disks: bool,

    /// Also write a picture of the rail groups to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Serialize)]
struct MachineRow<'a> {
    name: &'a str,
    machine: &'a Machine,
    groups: Vec<GroupRow<'a>>,
}

#[derive(Serialize)]
struct GroupRow<'a> {
    backend: &'a str,
    #[serde(flatten)]
    group: &'a RailGroup,
}

/// Prints the tree and the rail groups, and writes the picture if `--svg` is given.
pub fn run(common: &Common, arguments: &TopoArguments) -> CommandResult {
    let source = arguments.from.clone().map_or_else(MachineSource::of_this_host, Ok)?;
    let is_here = arguments.from.is_none() || source == MachineSource::ThisHost;
    let (name, machine) = source.read()?;
    let name = printable(&name);
    let backends = common.registry()?.rail_groups(&common.choice()?, &machine, is_here)?;
    // Groups have one numbering over all backends, as in the tree and the picture.
    let groups: Vec<RailGroup> = backends.iter().flat_map(|backend| backend.groups.clone()).collect();
    if let Some(file) = &arguments.svg {
        std::fs::write(file, picture::svg(&name, &machine, &groups))
            .map_err(|error| CommandFailure::new(format!("cannot write {}: {error}", file.display())))?;
    }
    if common.json {
        let row = |backend: &'static str| move |group| GroupRow { backend, group };
        let groups = backends.iter().flat_map(|of| of.groups.iter().map(row(of.backend))).collect();
        return output::json(&MachineRow { name: &name, machine: &machine, groups });
    }
    output::text(&tree::text(&name, &machine, &groups, arguments.disks))?;
    if groups.is_empty() {
        let here = if is_here { "on this host".to_owned() } else { format!("on {name}") };
        let none = match (machine.of_kind(Kind::Nic).next(), common.choice()?) {
            (None, _) => format!("no RDMA card {here}"),
            (_, BackendChoice::Named(name)) => format!("{name} supports no RDMA card {here}"),
            (_, BackendChoice::Auto) => format!("no backend supports the RDMA cards {here}"),
        };
        return output::line(&format!(
            "{none}: transfers use the loopback backend, which copies memory on one host\n\
             (`multirail info` lists the backends, and why one is unavailable)"
        ));
    }
    let mut first = 0;
    for BackendGroups { backend, groups, unavailable, .. } in &backends {
        if backends.len() > 1 {
            output::line(&format!("rail groups of {backend}:"))?;
        }
        group_table(&machine, first, groups).print()?;
        if let Some(why) = unavailable {
            let (reason, remedy) = (&why.reason, &why.remedy);
            super::output::print_text(&format!(
                "{backend} cannot be opened on this host: {reason}; {remedy}"
            ))?;
        }
        first += groups.len();
    }
    Ok(())
}

/// A picture of this host's rail groups, as an SVG element.
pub fn picture_of_this_host(common: &Common) -> CommandResult<String> {
    let source = MachineSource::of_this_host()?;
    let (name, machine) = source.read()?;
    let is_here = source == MachineSource::ThisHost;
    let backends = common.registry()?.rail_groups(&common.choice()?, &machine, is_here)?;
    let groups: Vec<RailGroup> = backends.into_iter().flat_map(|backend| backend.groups).collect();
    Ok(picture::element(&printable(&name), &machine, &groups))
}

/// The number of card names per line.
const CARDS_PER_LINE: usize = 2;

/// The rail groups as a table with one row per group, numbered from `first`. The table of a p5 has at most 100 columns.
fn group_table(machine: &Machine, first: usize, groups: &[RailGroup]) -> TextTable {
    let table = TextTable::named_by(0).text("group").text("GPUs").text("cards").text("distance");
    let mut table = table.text("NUMA node").text("cores").text("worker core");
    (first..).zip(groups).for_each(|(number, group)| table.row(group_row(machine, number, group)));
    table
}

fn group_row(machine: &Machine, number: usize, group: &RailGroup) -> Vec<String> {
    let gpus: Vec<String> = group.gpus.iter().map(|gpu| gpu.to_string()).collect();
    let cards: Vec<String> = group.cards.iter().map(|card| label::card(machine, *card)).collect();
    let cards: Vec<String> = cards.chunks(CARDS_PER_LINE).map(|cards| cards.join(" ")).collect();
    let cores: Cpus = group.cores.iter().copied().collect();
    let known = |number: Option<u32>| number.map_or("unknown".to_owned(), |number| number.to_string());
    vec![
        number.to_string(),
        if gpus.is_empty() { "host memory".to_owned() } else { gpus.join("\n") },
        cards.join("\n"),
        group.distance.map(label::distance).unwrap_or_default().to_owned(),
        known(group.node),
        label::cpus(&cores, 24),
        known(group.core),
    ]
}
