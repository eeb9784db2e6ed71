//! `multirail peers`: lists the members of a directory, or watches them.

use multirail_discovery::{Directory, Event, Member};
use serde_json::json;

use super::Common;
use super::command::EXIT;
use super::discovery::ask;
use super::failure::{CommandResult, printable};
use super::output::{self, TextTable};

#[derive(clap::Args)]
#[command(after_help = EXIT)]
pub struct PeersArguments {
    /// The directory: file:///PATH (a folder, or a list that ends with .json or .toml), etcd://HOST:PORT/PREFIX or
    /// redis://HOST:PORT/PREFIX; dns:// and k8s:// if the command was built with them
    #[arg(long, value_name = "URL")]
    directory: String,

    /// Print members as they join, leave and change, until the command is stopped
    #[arg(long)]
    watch: bool,
}

/// Lists the members.
pub fn run(common: &Common, arguments: &PeersArguments) -> CommandResult {
    let directory = multirail_discovery::open(&arguments.directory)?;
    if arguments.watch {
        return watch(common, &*directory);
    }
    let members = ask(directory.members())?;
    if common.json {
        return members.iter().try_for_each(|member| output::json(&row(member)));
    }
    let table = TextTable::named_by(1).text("name").text("addresses").text("incarnation").optional(1);
    let mut table = table.text("attributes").optional(2);
    for member in &members {
        table.row(cells(member));
    }
    table.print()
}

fn watch(common: &Common, directory: &dyn Directory) -> CommandResult {
    let mut watch = directory.watch();
    loop {
        let event = pollster::block_on(watch.next());
        let (name, member) = match &event {
            Event::Joined(member) => ("joined", Some(member)),
            Event::Left(member) => ("left", Some(member)),
            Event::Changed { member, .. } => ("changed", Some(member)),
            Event::Outage(error) => {
                output::print_error(&error.to_string());
                ("outage", None)
            }
            Event::Synced => ("synced", None),
            _ => continue,
        };
        match (common.json, member) {
            (true, Some(member)) => output::json(&json!({ "event": name, "member": row(member) }))?,
            (true, None) => output::json(&json!({ "event": name }))?,
            (false, Some(member)) => {
                output::line(&format!("{name}: {}", cells(member).join("  ").trim_end()))?
            }
            (false, None) => output::line(name)?,
        }
    }
}

fn row(member: &Member) -> serde_json::Value {
    json!({
        "name": member.name,
        "addresses": member.addresses,
        "incarnation": member.incarnation,
        "attributes": member.attributes,
        "lease_ms": u64::try_from(member.lease.as_millis()).unwrap_or(u64::MAX),
    })
}

/// A member as text. Another process has chosen it, so what a terminal would obey is left out.
fn cells(member: &Member) -> Vec<String> {
    let attributes: Vec<_> = member.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let incarnation = match member.incarnation {
        0 => String::new(),
        known => format!("{known:016x}"),
    };
    let cells = [member.name.clone(), member.addresses.join(", "), incarnation, attributes.join(", ")];
    cells.into_iter().map(|cell| printable(&cell).to_string()).collect()
}
