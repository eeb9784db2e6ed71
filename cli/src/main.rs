//! The command `multirail`.

fn main() -> std::process::ExitCode {
    multirail_cli::run()
}
