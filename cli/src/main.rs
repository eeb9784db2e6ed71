//! The command `multirail`: what is here, how fast it is, and files across.

fn main() -> std::process::ExitCode {
    multirail_cli::run()
}
