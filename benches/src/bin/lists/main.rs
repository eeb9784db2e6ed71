//! Transfers of long lists over many regions by loopback, between two processes: the multirail side of `benches/lists/compare.py`.
//!
//! `lists initiator` starts a target and serves the commands `write` and `read`, one a line of its input. It answers
//! each with a line of JSON: the times of transfers of the whole list. It ends with its input.

mod initiator;
mod memory;
mod target;

use std::process::ExitCode;
use std::time::Duration;

use backend_loopback::{Loopback, LoopbackConfig};
use benches::processes::transport;
use benches::{BenchResult, LIMIT, exit_code};
use clap::{Parser, Subcommand};
use transport_core::{Fabric, FabricBuilder};

/// How long a process may be silent. `compare.py` stops both processes while another program runs.
const PAUSE: Duration = Duration::from_secs(600);

#[derive(Parser)]
struct ListsArguments {
    #[command(subcommand)]
    what: ListsCommand,
}

#[derive(Subcommand)]
enum ListsCommand {
    /// Starts a target, and measures transfers to it and from it.
    Initiator(ListsConfig),
    /// The other side.
    #[command(hide = true)]
    Target(ListsConfig),
}

fn main() -> ExitCode {
    let done = match ListsArguments::parse().what {
        ListsCommand::Initiator(config) => config.checked().and_then(|config| initiator::run(&config)),
        ListsCommand::Target(config) => config.checked().and_then(|config| target::run(&config)),
    };
    exit_code("lists", done.map(|()| ExitCode::SUCCESS))
}

/// The lists of both processes, and how they are transferred.
#[derive(clap::Args, Clone)]
pub struct ListsConfig {
    /// Regions of each process.
    #[arg(long, default_value_t = 80)]
    pub regions: u32,
    /// Entries of the whole list, of 4 KiB each. A multiple of the regions.
    #[arg(long, default_value_t = 112_000)]
    pub entries: u32,
    /// Private memory, which the other process cannot map. The kernel copies it.
    #[arg(long)]
    pub private: bool,
    /// Threads of a process that copy. By default two, or one on a single core.
    #[arg(long)]
    pub threads: Option<u32>,
}

impl ListsConfig {
    fn checked(self) -> BenchResult<Self> {
        if self.regions == 0 || self.entries == 0 || !self.entries.is_multiple_of(self.regions) {
            return Err("--entries must be a multiple of --regions, and neither may be 0".into());
        }
        Ok(self)
    }

    /// The arguments that give another process the same lists.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--regions", Some(self.regions)),
            ("--entries", Some(self.entries)),
            ("--threads", self.threads),
        ];
        let numbers =
            numbers.into_iter().filter_map(|(name, number)| Some([name.to_owned(), number?.to_string()]));
        numbers.flatten().chain(self.private.then(|| "--private".to_owned())).collect()
    }

    /// Opens loopback with workers, as the command `multirail` does.
    pub fn open(&self) -> BenchResult<Fabric> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or(cores.min(2) as u32);
        let loopback = Loopback::with(LoopbackConfig::default().devices(threads).groups(threads));
        let builder = FabricBuilder::new().transport(transport(loopback, None)?);
        Ok(builder.handshake_limit(LIMIT).peer_timeout(PAUSE).open()?)
    }
}
