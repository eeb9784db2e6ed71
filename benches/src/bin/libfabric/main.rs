//! What the backend `efa` costs beside libfabric itself, on providers that need no card.
//!
//! `cargo run --profile dist -p benches --bin libfabric -- overhead` compiles
//! `benches/libfabric/writes.c`, a bare loop of `fi_writemsg`, and runs it and the same loop
//! of ours in turn. `instructions`, `idle` and `registration` print what their names say.

mod idle;
mod instructions;
mod network;
mod overhead;
mod provider;
mod registration;
mod theirs;

use std::process::ExitCode;

use benches::ends::Target;
use clap::{Parser, Subcommand};

use provider::LibfabricProvider;

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
    /// Instructions of a 64 KiB write, ours and libfabric's, by callgrind.
    Instructions(instructions::Instructions),
    /// What an idle fabric costs, and the first write after a pause.
    Idle(idle::Idle),
    /// Latencies of writes while a gigabyte is registered, beside those without.
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
    match done {
        Ok(code) => code,
        Err(why) => {
            eprintln!("libfabric: {why}");
            ExitCode::FAILURE
        }
    }
}
