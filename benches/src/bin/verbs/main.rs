//! The cost of the backend `verbs` compared with perftest and with libibverbs itself.
//!
//! `cargo run --profile dist -p benches --bin verbs` compares them on soft-RoCE, in the machine of `ci/rdma-vm`. With
//! `--here` it compares them on this machine, over the devices of `--devices`.

mod comparisons;
mod perftest;

use std::process::ExitCode;

use backend_verbs::{Verbs, VerbsConfig};
use benches::processes::{BenchDevices, ProcessRole, Target, transport};
use benches::{BenchResult, exit_code, inside};
use clap::{Parser, Subcommand};
use transport_core::TransportConfig;

/// A loop of our writes.
type WriteLoop = benches::load::WriteLoop<Ports>;

#[derive(Parser)]
struct VerbsArguments {
    #[command(subcommand)]
    what: Option<VerbsCommand>,
    #[command(flatten)]
    compare: Compare,
}

/// The whole comparison.
#[derive(clap::Args)]
struct Compare {
    /// Use this machine's devices, not a virtual machine.
    #[arg(long)]
    here: bool,
    /// Pairs of runs of each.
    #[arg(long, default_value_t = 41)]
    pairs: usize,
    /// Measure one figure only.
    #[arg(long)]
    only: Option<Figure>,
    #[command(flatten)]
    ports: Ports,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Figure {
    Bandwidth,
    Latency,
}

#[derive(Subcommand)]
enum VerbsCommand {
    /// The measured side of a pair of processes; prints one line.
    #[command(hide = true)]
    Ours(WriteLoop),
    /// The measured side of a ping-pong.
    #[command(hide = true)]
    Pings(comparisons::Pings),
    /// The other side.
    #[command(hide = true)]
    Target(Target<Ports>),
}

impl Compare {
    fn run(&self) -> BenchResult<ExitCode> {
        let pingpong = comparisons::compile(self.here)?;
        if let Some(code) = inside::virtual_machine(self.here)? {
            return Ok(code);
        }
        let is_asked = |figure| self.only.is_none_or(|only| only == figure);
        let is_fast = !is_asked(Figure::Bandwidth) || comparisons::bandwidth(&self.ports, self.pairs)?;
        let is_quick =
            !is_asked(Figure::Latency) || comparisons::latency(&self.ports, self.pairs, &pingpong)?;
        Ok(if is_fast && is_quick { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn main() -> ExitCode {
    let arguments = VerbsArguments::parse();
    let done = match arguments.what {
        None => arguments.compare.run(),
        Some(VerbsCommand::Ours(load)) => load.run(),
        Some(VerbsCommand::Pings(pings)) => pings.run(),
        Some(VerbsCommand::Target(target)) => target.run(),
    };
    exit_code("verbs", done)
}

/// A port for each process, by the names of libibverbs.
#[derive(clap::Args, Clone)]
pub struct Ports {
    /// The device of the writer and the device of the target.
    #[arg(long, value_delimiter = ',', default_values_t = ["rxe0".to_owned(), "rxe1".to_owned()])]
    pub devices: Vec<String>,
    /// The index of the GID of both ports.
    #[arg(long, default_value_t = 1)]
    pub gid: u8,
}

impl Ports {
    /// The port of one process.
    pub fn of(&self, side: ProcessRole) -> BenchResult<&str> {
        let device = self.devices.get(side as usize).map(String::as_str);
        Ok(device.ok_or("--devices must have two names: the writer's device and the target's")?)
    }
}

impl BenchDevices for Ports {
    const PINS: bool = false;

    fn transport(&self, side: ProcessRole) -> BenchResult<TransportConfig> {
        let config = VerbsConfig::default().queue_pairs(1).gid_index(self.gid);
        transport(Verbs::with(config), Some(self.of(side)?))
    }

    fn arguments(&self) -> Vec<String> {
        let gid = self.gid.to_string();
        ["--devices", &self.devices.join(","), "--gid", &gid].map(str::to_owned).into()
    }
}
