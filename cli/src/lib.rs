//! The command `multirail`: arguments in, one sentence out if it fails.
//!
//! The crate is the command's; [`run`] is its `main`. Programs depend on the library `multirail`. Tests and fuzzers
//! share the protocol of `send` and `serve` through the hidden `files`.
#![deny(unsafe_code)]

mod bench;
mod content;
mod doctor;
mod dump;
mod explain;
mod failure;
#[doc(hidden)]
pub mod files;
#[cfg(fuzzing)]
pub mod fuzz;
mod info;
mod meeting;
mod output;
mod pages;
mod provider;
mod security;
mod send;
mod serve;
mod simulate;
mod table;
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
use multirail::{BackendChoice, Fabric, FabricBuilder, Registry};
use tracing_subscriber::filter::LevelFilter;

use crate::dump::Dumps;
use crate::failure::{Done, Failure};

/// The backend that the options of `provider` belong to.
const LIBFABRIC: &str = "efa";

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

/// What exit codes mean, for `--help`.
const EXIT: &str = "Exit code: 0 if the command did its work, 1 if it failed (stderr says why), 2 if the arguments make \
    no sense.";

#[derive(Subcommand)]
enum Command {
    /// List the backends: available, or why not and what would mend it
    #[command(
        after_help = "Exit code: 0 if the list is complete, 1 if a backend that was asked for (--backend, --provider, \
        --domains, --node) is unavailable, 2 if the arguments make no sense."
    )]
    Info,
    /// Show the GPUs and cards of a machine, which is near which, and the rail groups
    #[command(after_help = EXIT)]
    Topo(topo::TopoArguments),
    /// Say which cards, core and registration some memory would take, and why nothing else
    #[command(after_help = EXIT)]
    Explain(explain::ExplainArguments),
    /// Say what of this host slows transfers down or stops them, and how to mend it
    Doctor(doctor::DoctorArguments),
    /// Measure a transfer against the memcpy limit of the same run, and verify every byte
    Bench(bench::BenchArguments),
    /// Receive files into a directory
    #[command(
        after_help = "Exit code: 0 if it was stopped (or, with --once, its sender was served) and no file is unfinished, \
        1 if it failed or files are unfinished (stderr says why), 2 if the arguments make no sense."
    )]
    Serve(serve::ServeArguments),
    /// Send files to a `multirail serve`
    #[command(
        after_help = "Exit code: 0 if everything was sent, 1 if not (stderr says why), 2 if the arguments make no sense."
    )]
    Send(send::SendArguments),
    /// Run the engine in virtual time against modelled cards
    #[command(after_help = EXIT)]
    Simulate(simulate::SimulateArguments),
    /// Print a recording made with --dump, or convert it for a trace viewer
    #[command(after_help = EXIT)]
    Trace(trace::TraceArguments),
}

impl Command {
    /// The first option given that this command takes no notice of.
    fn ignored_option(&self, common: &Common) -> Option<&'static str> {
        let (backend, security, dump, json) = match self {
            Self::Bench(bench) if bench.is_ladder() => (true, false, false, true),
            Self::Bench(_) | Self::Serve(_) | Self::Send(_) => (true, true, true, true),
            Self::Info | Self::Explain(_) | Self::Doctor(_) => (true, true, false, true),
            Self::Topo(_) => (true, false, false, true),
            Self::Simulate(_) => (false, false, false, true),
            Self::Trace(_) => (false, false, false, false),
        };
        let given = [
            (backend, common.backend.is_some(), "--backend"),
            (backend, common.provider.is_given(), "--provider, --domains or --node"),
            (security, common.security.is_given(), "--token-file or --tls-..."),
            (dump, common.dump.is_some(), "--dump"),
            (json, common.json, "--json"),
        ];
        given.into_iter().find_map(|(is_used, is_given, name)| (is_given && !is_used).then_some(name))
    }
}

impl Common {
    /// The backend asked for by the option, else by the environment.
    fn choice(&self) -> Done<BackendChoice> {
        match &self.backend {
            Some(choice) => Ok(choice.clone()),
            None => Ok(BackendChoice::from_env()?),
        }
    }

    /// Whether `backend` was asked for by name, or by options that are its own.
    fn asks_for(&self, choice: &BackendChoice, backend: &str) -> bool {
        match choice {
            BackendChoice::Named(name) => name == backend,
            BackendChoice::Auto => backend == LIBFABRIC && self.provider.is_given(),
        }
    }

    /// All backends, as the options have them.
    fn registry(&self) -> Done<Registry> {
        match self.choice()? {
            BackendChoice::Named(name) if name != LIBFABRIC && self.provider.is_given() => {
                Err(Failure::new(format!(
                    "--provider, --domains and --node are options of the backend {LIBFABRIC}, and {name} was asked for"
                )))
            }
            _ => self.provider.registry(),
        }
    }

    /// Fails if a backend that was asked for is unavailable.
    fn demand(&self, registry: &Registry) -> Done {
        let asked = match self.choice()? {
            BackendChoice::Auto if self.provider.is_given() => BackendChoice::Named(LIBFABRIC.to_owned()),
            BackendChoice::Auto => return Ok(()),
            named => named,
        };
        registry.transports(&asked)?;
        Ok(())
    }

    /// Fails if a token or certificate that was asked for cannot be read.
    fn check_security(&self) -> Done {
        self.security.apply(FabricBuilder::new()).map(drop)
    }

    /// A fabric of the chosen backends.
    fn open(&self) -> Done<Fabric> {
        let registry = self.registry()?;
        self.demand(&registry)?;
        self.dumps.open(self.security.apply(registry.builder(&self.choice()?)?)?)
    }
}

/// Parses the arguments, runs the command, and says in one sentence if it failed.
pub fn run() -> ExitCode {
    let mut arguments = Arguments::parse();
    log_to_stderr(arguments.common.verbose);
    if let Some(option) = arguments.command.ignored_option(&arguments.common) {
        output::complain(&format!("{option} has no effect on this command: leave it out"));
        return ExitCode::from(2);
    }
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
        Err(failure) => {
            output::complain(failure.sentence());
            failure.exit_code()
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
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn arguments_are_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_tells_its_exit_codes() {
        fn check(command: &mut clap::Command) {
            for help in [command.render_help(), command.render_long_help()] {
                assert!(help.to_string().contains("Exit code: 0 "), "{}: {help}", command.get_name());
            }
            command.get_subcommands_mut().filter(|command| command.get_name() != "help").for_each(check);
        }
        let mut command = Arguments::command();
        command.build();
        command.get_subcommands_mut().filter(|command| command.get_name() != "help").for_each(check);
    }
}
