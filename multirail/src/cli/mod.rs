//! The command line: arguments in, one sentence out if it fails.

mod bench;
mod content;
mod doctor;
mod dump;
mod explain;
mod failure;
#[cfg(fuzzing)]
pub mod fuzz;
mod info;
mod output;
mod pages;
mod provider;
mod security;
mod send;
mod serve;
mod simulate;
mod tally;
mod topo;
mod trace;
mod units;
mod wait;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgAction, Parser, Subcommand};
use multirail::{BackendChoice, Fabric};
use tracing_subscriber::filter::LevelFilter;

use dump::Dumps;
use failure::{Done, Failure};

/// Moves memory and files between processes and machines.
#[derive(Parser)]
#[command(name = "multirail", version, about)]
struct Arguments {
    #[command(flatten)]
    common: Common,

    #[command(subcommand)]
    command: Command,
}

/// What every command understands.
#[derive(clap::Args, Clone)]
struct Common {
    /// The backend to use: auto, loopback, efa or verbs [default: $MULTIRAIL_BACKEND, or auto]
    #[arg(long, global = true, value_name = "NAME")]
    backend: Option<BackendChoice>,

    /// Print one JSON object per row instead of a table
    #[arg(long, global = true)]
    json: bool,

    /// Log to stderr; twice for debug, three times for everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    #[command(flatten)]
    provider: provider::Provider,

    #[command(flatten)]
    security: security::Security,

    /// Record what the transports are doing to this file on SIGUSR1, on a stall and
    /// when a peer dies; read it with `multirail trace`
    #[arg(long, global = true, value_name = "FILE")]
    dump: Option<PathBuf>,

    /// Where dumps of the opened fabrics go.
    #[arg(skip)]
    dumps: Arc<Dumps>,
}

#[derive(Subcommand)]
enum Command {
    /// List the backends: available, or why not and what would mend it
    Info,
    /// Show the GPUs and cards of a machine, which is near which, and the rail groups
    Topo(topo::TopoArguments),
    /// Say which cards, core and registration some memory would take, and why nothing else
    Explain(explain::ExplainArguments),
    /// Say what of this host slows transfers down or stops them, and how to mend it
    Doctor(doctor::DoctorArguments),
    /// Measure a transfer against the memcpy limit of the same run, and verify every byte
    Bench(bench::BenchArguments),
    /// Receive files into a directory
    Serve(serve::ServeArguments),
    /// Send files to a `multirail serve`
    Send(send::SendArguments),
    /// Run the engine in virtual time against modelled cards
    Simulate(simulate::SimulateArguments),
    /// Print a recording made with --dump, or convert it for a trace viewer
    Trace(trace::TraceArguments),
}

impl Common {
    /// The backend asked for by the option, else by the environment.
    fn choice(&self) -> Done<BackendChoice> {
        match &self.backend {
            Some(choice) => Ok(choice.clone()),
            None => Ok(BackendChoice::from_env()?),
        }
    }

    /// A fabric of that backend.
    fn open(&self) -> Done<Fabric> {
        self.dumps.open(self.security.apply(self.provider.registry()?.builder(&self.choice()?)?)?)
    }
}

/// Parses the arguments, runs the command, and says in one sentence if it failed.
pub fn run() -> ExitCode {
    let mut arguments = Arguments::parse();
    log_to_stderr(arguments.common.verbose);
    match Dumps::new(arguments.common.dump.as_deref(), matches!(arguments.command, Command::Bench(_))) {
        Ok(dumps) => arguments.common.dumps = Arc::new(dumps),
        Err(failure) => {
            output::complain(failure.sentence());
            return ExitCode::FAILURE;
        }
    }
    let common = &arguments.common;
    let done = match arguments.command {
        Command::Info => info::run(common),
        Command::Explain(explain) => explain::run(common, &explain),
        Command::Topo(topo) => topo::run(common, &topo),
        Command::Doctor(doctor) => return doctor::run(common, &doctor),
        Command::Bench(bench) => bench::run(common, bench),
        Command::Serve(serve) => serve::run(common, serve),
        Command::Send(send) => send::run(common, send),
        Command::Simulate(simulate) => simulate::run(common, simulate),
        Command::Trace(trace) => trace::run(&trace),
    };
    match done {
        Ok(()) | Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(Failure::Sentence(sentence)) => {
            output::complain(&sentence);
            ExitCode::FAILURE
        }
    }
}

fn log_to_stderr(verbosity: u8) {
    let level = match verbosity {
        0 => return,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false).init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_well_formed() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
