//! `multirail completions`: the script by which a shell completes the command's words.

use clap_complete::Shell;

use super::failure::CommandResult;
use super::output;

/// Where each shell looks for the script, for `--help`.
pub const PLACES: &str = "\
bash reads the script from ~/.local/share/bash-completion/completions/multirail, fish from \
~/.config/fish/completions/multirail.fish, and zsh from _multirail in a folder of its $fpath. The packages of a release \
have all three.";

#[derive(clap::Args)]
pub struct CompletionArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script for `command`.
pub fn run(mut command: clap::Command, arguments: &CompletionArguments) -> CommandResult {
    output::text(&script(&mut command, arguments.shell))
}

fn script(command: &mut clap::Command, shell: Shell) -> String {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
