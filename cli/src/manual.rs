//! `multirail man`: the manual pages, one for each command.

use std::fs;
use std::path::PathBuf;

use clap_mangen::Man;

use super::failure::{CommandFailure, CommandResult};
use super::output;

#[derive(clap::Args)]
pub struct ManualArguments {
    /// The folder for the pages; it is made if it is missing [default: print the page of `multirail`]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Writes the pages of `command` and of all commands in it, or prints its own page.
pub fn run(command: clap::Command, arguments: &ManualArguments) -> CommandResult {
    let command = buildable(command);
    let Some(folder) = &arguments.dir else { return output::text(&page(command)?.1) };
    let failed = |error| CommandFailure::new(format!("cannot write {}: {error}", folder.display()));
    fs::create_dir_all(folder).map_err(failed)?;
    for command in commands(&command) {
        let (name, text) = page(command)?;
        fs::write(folder.join(name), text).map_err(failed)?;
    }
    Ok(())
}

/// The command with everything that its options and the names of its pages need.
fn buildable(command: clap::Command) -> clap::Command {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    command
}

/// `command`, and the commands in it that help shows.
fn commands(command: &clap::Command) -> Vec<clap::Command> {
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    let inner = shown.filter(|command| command.get_name() != "help").flat_map(commands);
    std::iter::once(command.clone()).chain(inner).collect()
}

/// The name of a page's file, and its text. The text has no date, so that a version always has the same pages.
fn page(command: clap::Command) -> CommandResult<(String, String)> {
    let version = format!("multirail {}", env!("CARGO_PKG_VERSION"));
    let page = Man::new(command).source(version).manual("multirail");
    let mut text = Vec::new();
    page.render(&mut text)?;
    Ok((page.get_filename(), String::from_utf8_lossy(&text).into_owned()))
}
