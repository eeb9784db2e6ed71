//! What the backend `verbs` costs beside perftest and beside libibverbs itself.
//!
//! `cargo run --profile dist -p benches --bin verbs` compares them in `ci/rdma-vm`'s machine, on
//! soft-RoCE; with `--here`, on this one, over the devices that `--devices` names.

mod comparisons;
mod perftest;

use std::process::ExitCode;

use backend_verbs::{Verbs, VerbsConfig};
use benches::ends::{BenchDevices, ProcessRole, Target, transport};
use benches::{BenchResult, inside};
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
    /// On this machine's devices, not in a virtual machine.
    #[arg(long)]
    here: bool,
    /// Pairs of runs of each.
    #[arg(long, default_value_t = 41)]
    pairs: usize,
    /// One of both figures alone.
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
    /// The same for a ping-pong.
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
    match done {
        Ok(code) => code,
        Err(why) => {
            eprintln!("verbs: {why}");
            ExitCode::FAILURE
        }
    }
}

/// A port for each side, as libibverbs calls them.
#[derive(clap::Args, Clone)]
pub struct Ports {
    /// The writer's and the target's.
    #[arg(long, value_delimiter = ',', default_values_t = ["rxe0".to_owned(), "rxe1".to_owned()])]
    pub devices: Vec<String>,
    /// The GID of both, by its index.
    #[arg(long, default_value_t = 1)]
    pub gid: u8,
}

impl Ports {
    /// A side's.
    pub fn of(&self, side: ProcessRole) -> BenchResult<&str> {
        let device = self.devices.get(side as usize).map(String::as_str);
        Ok(device.ok_or("--devices is two names: the writer's and the target's")?)
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
