//! `multirail send`: sends files and directories to a `multirail serve`.

mod list;
mod window_packer;
mod window_writer;

mod path_results;
mod progress;

mod sender;
mod server_channel;
mod source;
mod transfer;

use std::path::PathBuf;
use std::time::Duration;

use super::discovery::LookupOptions;
use super::failure::CommandResult;
use super::{Common, output, units};
use list::{List, ListRules};
use transfer::Transfer;

#[derive(clap::Args)]
pub struct SendArguments {
    /// Files, and directories with their content
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// The address that the server printed
    #[arg(long, value_name = "ADDRESS")]
    to: String,

    #[command(flatten)]
    lookup: LookupOptions,

    /// Continue an interrupted attempt: files that the server has with the same content are not
    /// sent again, and partial files are continued where they end or differ
    #[arg(long)]
    resume: bool,

    /// When the connection to the server is lost, wait for the server to come back at the same address,
    /// for at most this time, such as 30s or 10min, and continue
    #[arg(
        long,
        value_name = "LIMIT",
        requires = "resume",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1min",
        value_parser = units::duration
    )]
    reconnect: Option<Duration>,

    /// Skip pipes, sockets, devices, and links out of the tree, and print their names
    #[arg(long)]
    skip_special: bool,

    /// Send holes as zeros
    #[arg(long)]
    no_sparse: bool,

    /// Print a JSON row with the bytes sent so far, before each window
    #[arg(long)]
    progress: bool,
}

/// Sends every path. The first entry that fails ends the command.
pub fn run(common: &Common, arguments: SendArguments) -> CommandResult {
    let rules = ListRules { skip_special: arguments.skip_special, sparse: !arguments.no_sparse };
    let list = List::new(&arguments.paths, rules)?;
    list.skipped.iter().for_each(|why| output::print_error(&format!("skipped: {why}")));
    if list.special_bits > 0 {
        output::print_error(&format!(
            "setuid, setgid and sticky bits are not sent; {} files have such bits",
            list.special_bits
        ));
    }
    let server = arguments.lookup.source(&arguments.to)?;
    Transfer::new(common, &arguments, server, list).run()
}
