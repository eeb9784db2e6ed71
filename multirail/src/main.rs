//! The command `multirail`: what is here, how fast it is, and files across.
#![deny(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
