//! Our writes compared with libfabric's own.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use benches::compare::{Compared, compile, read};
use benches::{BenchResult, inside};

use crate::{LibfabricProvider, WriteLoop};

/// A size, the compared figure, and the minimum of the ratio's lower bound.
const SIZES: [(usize, &str, f64); 2] = [(65_536, "gb_per_s", 0.95), (8, "mops", 0.9)];

/// Our loop compared with libfabric's.
#[derive(clap::Args)]
pub struct Overhead {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Pairs of runs of each.
    #[arg(long, default_value_t = 61)]
    pairs: usize,
    /// Writes under way.
    #[arg(long, default_value_t = 1024)]
    inflight: usize,
    /// How long a run measures, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    millis: u64,
}

impl Overhead {
    /// Prints a table. Fails if a ratio is below its minimum.
    pub fn run(self) -> BenchResult<ExitCode> {
        if let Some(code) = inside::network_namespace()? {
            return Ok(code);
        }
        let writes = Writes::compile()?;
        let mut code = ExitCode::SUCCESS;
        println!("{} pairs of {} ms, {} writes under way", self.pairs, self.millis, self.inflight);
        println!("provider      size  figure      ours    theirs  median ratio  surely (95 %)  asked");
        for provider in &self.providers {
            for (size, figure, asked) in SIZES {
                let inflight = self.inflight;
                let load = WriteLoop {
                    inflight,
                    millis: self.millis,
                    ..WriteLoop::of(LibfabricProvider::of(provider), size)
                };
                let compared = Compared::of(
                    self.pairs,
                    || read(load.command()?, figure),
                    || read(writes.command(&load), figure),
                )?;
                let surely = compared.at_least();
                println!(
                    "{provider:<10} {size:>7}  {figure:<8} {:>7.4}   {:>7.4}  {:>12.3}  {surely:>13.3}  {asked:>5}",
                    compared.ours(),
                    compared.theirs(),
                    compared.ratio(),
                );
                if surely < asked {
                    code = ExitCode::FAILURE;
                }
            }
        }
        Ok(code)
    }
}

/// The loop in C, `benches/libfabric/writes.c`.
pub struct Writes(PathBuf);

impl Writes {
    /// Compiles the loop beside this program.
    pub fn compile() -> BenchResult<Self> {
        compile("libfabric/writes", "fabric", "libfabric-dev").map(Self)
    }

    /// The command that runs `load`. A write completes when it is delivered, as ours do.
    pub fn command(&self, load: &WriteLoop) -> Command {
        let mut command = Command::new(&self.0);
        command.arg("--delivery").args(load.arguments());
        if let Some(node) = load.devices.node() {
            command.args(["--node", node]);
        }
        command
    }
}
