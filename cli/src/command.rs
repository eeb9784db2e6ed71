//! The command line: parses the arguments and runs one command.

#[cfg(all(test, feature = "directories", feature = "metrics"))]
mod reference;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use crate::common::Common;
use crate::dump::Dumps;
use crate::failure::CommandFailure;
#[cfg(feature = "directories")]
use crate::peers;
use crate::{
    bench, completions, device, doctor, explain, info, manual, nixl, output, program, send, serve, simulate,
    top, topo, trace,
};

/// Moves memory and files between processes and machines.
#[derive(Parser)]
#[command(name = "multirail", version, about)]
struct Arguments {
    #[command(flatten)]
    common: Common,

    #[command(subcommand)]
    command: Command,
}

/// The exit codes of most commands, for `--help`.
pub const EXIT: &str = "Exit code: 0 if the command did its work, 1 if it failed (stderr has the reason), 2 if the arguments are \
    invalid.";

#[derive(Subcommand)]
enum Command {
    /// List the backends: available, or the reason and the fix
    #[command(
        after_help = "Exit code: 0 if the list is complete, 1 if a requested backend (--backend, --provider, \
        --domains, --node) is unavailable, 2 if the arguments are invalid."
    )]
    Info,
    /// Show the GPUs and cards of a machine, their distances, and the rail groups
    #[command(after_help = EXIT)]
    Topo(topo::TopoArguments),
    /// Explain which cards, core and registration a buffer would use, and why
    #[command(after_help = EXIT)]
    Explain(explain::ExplainArguments),
    /// Check this host for settings that slow or stop transfers, and show the fixes
    Doctor(doctor::DoctorArguments),
    /// Measure a transfer, compare it with memcpy in the same run, and verify every byte
    Bench(Box<bench::BenchArguments>),
    /// Receive files into a directory
    #[command(
        after_help = "Exit code: 0 if it was stopped (or, with --once, its sender was served) and no file is unfinished, \
        1 if it failed or files are unfinished (stderr has the reason), 2 if the arguments are invalid."
    )]
    Serve(serve::ServeArguments),
    /// Send files to a `multirail serve`
    #[command(
        after_help = "Exit code: 0 if everything was sent, 1 if not (stderr has the reason), 2 if the arguments are invalid."
    )]
    Send(send::SendArguments),
    /// Run the engine in virtual time against simulated cards
    #[command(after_help = EXIT)]
    Simulate(simulate::SimulateArguments),
    /// Look at the rails of a running process, and take devices out of service and back
    Device(device::DeviceArguments),
    /// Watch a running process: its rails, peers, operations and stalls
    #[command(after_help = top::EXIT, after_long_help = format!("{}\n\n{}\n\n{}", device::SOCKET, top::KEYS, top::EXIT))]
    Top(top::TopArguments),
    /// Print a recording made with --dump, or convert it for a trace viewer
    #[command(after_help = EXIT)]
    Trace(trace::TraceArguments),
    /// Add the plug-in MULTIRAIL to NIXL in a Python environment, or remove it
    #[command(after_help = EXIT)]
    Nixl(nixl::NixlArguments),
    /// List the members of a directory: those who have joined it, and where they listen
    #[cfg(feature = "directories")]
    Peers(peers::PeersArguments),
    /// Print the script by which a shell completes the words of this command
    #[command(after_help = EXIT, after_long_help = format!("{}\n\n{EXIT}", completions::PLACES))]
    Completions(completions::CompletionArguments),
    /// Print the manual page, or write those of all commands into a folder
    #[command(after_help = EXIT)]
    Man(manual::ManualArguments),
}

impl Command {
    /// The first given option that the command ignores.
    fn ignored_option(&self, common: &Common) -> Option<&'static str> {
        let (backend, security, dump, json) = match self {
            Self::Bench(bench) if bench.is_ladder() => (true, false, false, true),
            Self::Bench(_) | Self::Serve(_) | Self::Send(_) => (true, true, true, true),
            Self::Info | Self::Explain(_) | Self::Doctor(_) => (true, true, false, true),
            Self::Topo(_) => (true, false, false, true),
            Self::Simulate(_) => (false, false, false, true),
            Self::Nixl(_) | Self::Device(_) => (false, false, false, true),
            Self::Top(_) | Self::Trace(_) | Self::Completions(_) | Self::Man(_) => {
                (false, false, false, false)
            }
            #[cfg(feature = "directories")]
            Self::Peers(_) => (false, false, false, true),
        };
        let given = [
            (backend, common.backend.is_some(), "--backend"),
            (backend || matches!(self, Self::Simulate(_)), common.provider.name().is_some(), "--provider"),
            (backend, common.provider.has_place(), "--domains or --node"),
            (security, common.security.is_given(), "--token-file or --tls-..."),
            (dump, common.dump.is_some(), "--dump"),
            (json, common.json, "--json"),
        ];
        given.into_iter().find_map(|(is_used, is_given, name)| (is_given && !is_used).then_some(name))
    }
}

/// Parses the arguments and runs the command. Prints one sentence if it failed.
pub fn run() -> ExitCode {
    ExitCode::from(run_arguments(Arguments::parse()))
}

/// As [`run`], in a program that is not the command itself. `arguments` begin with the command's name. `words` start the
/// command in a process of its own: a program, and arguments that come before the command's. Returns the exit code; for
/// wrong arguments it ends the process.
pub fn run_with(arguments: impl IntoIterator<Item = OsString>, words: Vec<OsString>) -> u8 {
    program::set(words);
    run_arguments(Arguments::parse_from(arguments))
}

fn run_arguments(mut arguments: Arguments) -> u8 {
    log_to_stderr(arguments.common.verbose);
    if let Some(option) = arguments.command.ignored_option(&arguments.common) {
        output::print_error(&format!("{option} has no effect on this command; remove it"));
        return 2;
    }
    match Dumps::new(arguments.common.dump.as_deref(), matches!(arguments.command, Command::Bench(_))) {
        Ok(dumps) => arguments.common.dumps = Arc::new(dumps),
        Err(failure) => {
            output::print_error(failure.message());
            return 1;
        }
    }
    let common = &arguments.common;
    let done = match arguments.command {
        Command::Info => info::run(common),
        Command::Explain(explain) => explain::run(common, &explain),
        Command::Topo(topo) => topo::run(common, &topo),
        Command::Doctor(doctor) => return doctor::run(common, &doctor),
        Command::Bench(bench) => bench::run(common, *bench),
        Command::Serve(serve) => serve::run(common, serve),
        Command::Send(send) => send::run(common, send),
        Command::Simulate(simulate) => simulate::run(common, simulate),
        Command::Device(device) => device::run(common, &device),
        Command::Top(top) => top::run(&top),
        Command::Trace(trace) => trace::run(&trace),
        Command::Nixl(nixl) => nixl::run(common, &nixl),
        #[cfg(feature = "directories")]
        Command::Peers(peers) => peers::run(common, &peers),
        Command::Completions(completions) => completions::run(Arguments::command(), &completions),
        Command::Man(manual) => manual::run(Arguments::command(), &manual),
    };
    match done {
        Ok(()) | Err(CommandFailure::ClosedPipe) => 0,
        Err(failure) => {
            output::print_error(failure.message());
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
    use super::*;

    #[test]
    fn arguments_are_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_help_lists_the_exit_codes() {
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
