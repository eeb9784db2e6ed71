//! `multirail topo`: the GPUs and cards of a machine, and the rail groups that follow.

pub mod label;
mod picture;
#[cfg(test)]
mod samples;
mod table;
mod tree;

use std::path::PathBuf;

use serde::Serialize;
use topology::{Machine, RailGroup, rail_groups};

use multirail::MachineSource;

use super::failure::{Done, Failure, printable};
use super::{Common, output};

#[derive(clap::Args)]
pub struct TopoArguments {
    /// The machine to show: hwloc (this host through libhwloc), hwloc:FILE (XML of lstopo's),
    /// sysfs:DIR (a copy of a /sys), file:FILE (a description in TOML) or p5.48xlarge (one that
    /// is built in) [default: this host, from /sys]
    #[arg(long, value_name = "SOURCE")]
    from: Option<MachineSource>,

    /// Show disks in the tree too
    #[arg(long)]
    disks: bool,

    /// Write a picture of the rail groups to this file too
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    machine: &'a Machine,
    groups: &'a [RailGroup],
}

/// Draws the picture, if one is asked for, and prints the tree and the rail groups.
pub fn run(common: &Common, arguments: &TopoArguments) -> Done {
    let source = arguments.from.as_ref().unwrap_or(&MachineSource::ThisHost);
    let (name, machine) = source.read()?;
    let name = printable(&name);
    let groups = rail_groups(&machine);
    if let Some(file) = &arguments.svg {
        std::fs::write(file, picture::svg(&name, &machine, &groups))
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", file.display())))?;
    }
    if common.json {
        return output::json(&Row { name: &name, machine: &machine, groups: &groups });
    }
    output::text(&tree::text(&name, &machine, &groups, arguments.disks))?;
    if groups.is_empty() {
        let here = if *source == MachineSource::ThisHost { "here".to_owned() } else { format!("on {name}") };
        return output::line(&format!(
            "no RDMA card {here}: transfers use the loopback backend, which copies memory on one host\n\
             (`multirail info` lists the backends, and what they lack)"
        ));
    }
    output::table(&table::HEADER, table::rows(&machine, &groups), 0..0)
}
