//! The cost of the backend `efa` compared with libfabric itself, on providers that need no card.
//!
//! `cargo run --profile dist -p benches --bin libfabric -- overhead` compiles
//! `benches/libfabric/writes.c`, a bare loop of `fi_writemsg`, and runs it and our loop in turn. `instructions` counts
//! instructions, `idle` measures an idle fabric, and `registration` measures writes while memory is registered.

mod idle;
mod instructions;
mod overhead;
mod registration;

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use benches::processes::{BenchDevices, ProcessRole, Target, transport};
use benches::{BenchResult, exit_code};
use clap::{Parser, Subcommand};
use staging::{Staged, StagingPolicy};
use transport_core::{CoalescePolicy, TransportConfig};

/// A loop of our writes.
type WriteLoop = benches::load::WriteLoop<LibfabricProvider>;

#[derive(Parser)]
struct LibfabricArguments {
    #[command(subcommand)]
    what: LibfabricCommand,
}

#[derive(Subcommand)]
enum LibfabricCommand {
    /// Our writes against libfabric's own, in turn.
    Overhead(overhead::Overhead),
    /// Instructions of a 64 KiB write, ours and libfabric's, counted by callgrind.
    Instructions(instructions::Instructions),
    /// The cost of an idle fabric, and of the first write after a pause.
    Idle(idle::Idle),
    /// Latencies of writes while a gigabyte is registered, and without.
    Registration(registration::RegistrationLatency),
    /// The measured side of a pair of processes; prints one line.
    #[command(hide = true)]
    Ours(WriteLoop),
    /// The other side.
    #[command(hide = true)]
    Target(Target<LibfabricProvider>),
}

fn main() -> ExitCode {
    let done = match LibfabricArguments::parse().what {
        LibfabricCommand::Overhead(overhead) => overhead.run(),
        LibfabricCommand::Instructions(instructions) => instructions.run(),
        LibfabricCommand::Idle(idle) => idle.run(),
        LibfabricCommand::Registration(registration) => registration.run(),
        LibfabricCommand::Ours(load) => load.run(),
        LibfabricCommand::Target(target) => target.run(),
    };
    exit_code("libfabric", done)
}

/// The first device of a provider of libfabric, for both processes.
#[derive(clap::Args, Clone)]
pub struct LibfabricProvider {
    /// tcp, shm, ...
    #[arg(long, default_value = "tcp")]
    pub provider: String,
    /// Stage all memory, as GPU memory is staged if a card refuses it.
    #[arg(long)]
    pub staged: bool,
    /// Coalesce all small pages.
    #[arg(long, conflicts_with = "staged")]
    pub coalesced: bool,
}

impl LibfabricProvider {
    /// The provider `name`.
    pub fn of(name: &str) -> Self {
        Self { provider: name.to_owned(), staged: false, coalesced: false }
    }

    /// The local address. Sockets stay on this host; shm and cards have no address.
    pub fn node(&self) -> Option<&'static str> {
        let has_none = matches!(self.provider.as_str(), "shm" | "efa" | "efa-direct");
        (!has_none).then_some("127.0.0.1")
    }
}

impl BenchDevices for LibfabricProvider {
    const PINS: bool = true;

    fn transport(&self, _: ProcessRole) -> BenchResult<TransportConfig> {
        let config = EfaConfig::default().provider(&self.provider);
        let inner = Efa::with(self.node().into_iter().fold(config, EfaConfig::node));
        if self.staged {
            return transport(Staged::new(Arc::new(inner), StagingPolicy::Always), None);
        }
        if self.coalesced {
            let staged = Staged::new(Arc::new(inner), StagingPolicy::Never);
            return transport(staged.coalescing(CoalescePolicy::Always), None);
        }
        transport(inner, None)
    }

    fn arguments(&self) -> Vec<String> {
        let mut all = vec!["--provider".to_owned(), self.provider.clone()];
        all.extend(self.staged.then(|| "--staged".to_owned()));
        all.extend(self.coalesced.then(|| "--coalesced".to_owned()));
        all
    }
}
