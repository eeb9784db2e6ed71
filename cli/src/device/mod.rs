//! `multirail device`: looks at the rails of a running process, and takes devices out of service and back, over the
//! process's admin socket.

mod rail_table;

use std::path::PathBuf;
use std::time::Duration;

use multirail::admin::AdminRequest;

use super::Common;
use super::admin_client::AdminClient;
use super::command::EXIT;
use super::failure::CommandResult;
use super::output;
use super::units;

/// How an admin socket is opened, for `--help`.
pub const SOCKET: &str = "The process opens its admin socket by `serve --admin PATH`, `bench ... --admin PATH`, or, in a \
    program, by FabricBuilder::admin_socket. Only the user of the process, and root, may connect.";

#[derive(clap::Args)]
#[command(after_help = EXIT, after_long_help = format!("{SOCKET}\n\n{EXIT}"))]
pub struct DeviceArguments {
    #[command(subcommand)]
    action: DeviceAction,
}

#[derive(clap::Subcommand)]
enum DeviceAction {
    /// List the rails of the process: their state and counters
    #[command(after_help = EXIT)]
    List {
        #[command(flatten)]
        socket: SocketOptions,
    },
    /// Take a device out of service, and wait until no operation uses it
    ///
    /// New operations use other devices, and what running ones have not posted on it goes over other devices of its
    /// rail group. If the wait is over early, the device stays out of service.
    #[command(after_help = EXIT)]
    Drain {
        #[command(flatten)]
        socket: SocketOptions,
        /// The device's name, as `device list` prints it
        #[arg(value_name = "NAME")]
        device: String,
    },
    /// Take a device back into service
    #[command(after_help = EXIT)]
    Restore {
        #[command(flatten)]
        socket: SocketOptions,
        /// The device's name, as `device list` prints it
        #[arg(value_name = "NAME")]
        device: String,
    },
}

#[derive(clap::Args)]
struct SocketOptions {
    /// The admin socket of the process
    #[arg(long, value_name = "PATH")]
    admin: PathBuf,

    /// How long to wait for the process's answer
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = units::duration)]
    timeout: Duration,
}

/// Asks the process, and prints its answer.
pub fn run(common: &Common, arguments: &DeviceArguments) -> CommandResult {
    match &arguments.action {
        DeviceAction::List { socket } => rail_table::print(common, &socket.connect()?.rails()?),
        DeviceAction::Drain { socket, device } => {
            socket.connect()?.ask(&AdminRequest::Drain { device: device.clone() })?;
            report(common, device, "out_of_service", "is out of service, and no operation uses it")
        }
        DeviceAction::Restore { socket, device } => {
            socket.connect()?.ask(&AdminRequest::Restore { device: device.clone() })?;
            report(common, device, "in_service", "goes back into service, unless it is lost")
        }
    }
}

impl SocketOptions {
    fn connect(&self) -> CommandResult<AdminClient> {
        AdminClient::connect(&self.admin, self.timeout)
    }
}

fn report(common: &Common, device: &str, state: &str, words: &str) -> CommandResult {
    match common.json {
        true => output::json(&serde_json::json!({ "device": device, "requested": state })),
        false => output::print_text(&format!("{device} {words}")),
    }
}
