//! What the backend `efa` costs beside libfabric itself, on providers that need no card.
//!
//! `cargo run --release -p benches --bin libfabric -- overhead` compiles
//! `benches/libfabric/writes.c`, a bare loop of `fi_writemsg`, and runs it and the same loop
//! of ours in turn. `instructions`, `idle` and `registration` print what their names say.

mod ends;
mod idle;
mod instructions;
mod network;
mod ours;
mod overhead;
mod registration;
mod side;
mod theirs;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use ours::Load;

/// Anything that can go wrong, in words.
type Done<T> = Result<T, Box<dyn std::error::Error>>;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Our writes against libfabric's own, in turn.
    Overhead(overhead::Overhead),
    /// Instructions of a 64 KiB write, ours and libfabric's, by callgrind.
    Instructions(instructions::Instructions),
    /// What an idle fabric costs, and the first write after a pause.
    Idle(idle::Idle),
    /// Latencies of writes while a gigabyte is registered, beside those without.
    Registration(registration::Registration),
    /// The measured side of a pair of processes; prints one line.
    #[command(hide = true)]
    Ours(Load),
    /// The other side.
    #[command(hide = true)]
    Target(ends::Target),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Overhead(overhead) => overhead.run(),
        What::Instructions(instructions) => instructions.run(),
        What::Idle(idle) => idle.run(),
        What::Registration(registration) => registration.run(),
        What::Ours(load) => load.run(),
        What::Target(target) => target.run(),
    };
    match done {
        Ok(code) => code,
        Err(why) => {
            eprintln!("libfabric: {why}");
            ExitCode::FAILURE
        }
    }
}
