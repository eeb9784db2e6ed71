//! `docs/cli.md`: the reference of the command line, made of what clap knows. The test compares the page, or writes it if
//! `MULTIRAIL_WRITE_DOCS` is set.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, Command, CommandFactory};

use super::Arguments;

const INTRODUCTION: &str = "\
# The command line

This page lists every command and option of `multirail`, as `multirail COMMAND --help` does. A test makes it from the
command's own description: `MULTIRAIL_WRITE_DOCS=1 cargo test -p multirail-cli --lib reference` writes it anew.
[settings.md](settings.md) has the environment variables; an option wins over its variable.

Sizes are numbers with B, KiB, MiB or GiB, times with ms, s or min.
";

#[test]
fn the_page_in_docs_is_the_reference() {
    let page = page();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    if !docs.is_dir() {
        eprintln!("skipped: the package was taken out of the repository");
        return;
    }
    let path = docs.join("cli.md");
    if std::env::var_os("MULTIRAIL_WRITE_DOCS").is_some() {
        std::fs::write(&path, page).expect("docs/cli.md");
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/cli.md is not what the command has now; write it anew: \
         MULTIRAIL_WRITE_DOCS=1 cargo test -p multirail-cli --lib reference"
    );
}

fn page() -> String {
    let mut root = Arguments::command();
    root.build();
    let mut page = INTRODUCTION.to_owned();
    page.push_str("\n| command | what it does |\n|---|---|\n");
    for command in commands(&root) {
        let (name, anchor) = (command.get_name(), anchor(&format!("multirail {}", command.get_name())));
        writeln!(page, "| [`{name}`](#{anchor}) | {} |", about(command)).expect("a string");
    }
    page.push_str("\n## Options of every command\n\nA command refuses those that have no effect on it.\n");
    options(&mut page, root.get_arguments().filter(|argument| argument.is_global_set()));
    for command in commands(&root) {
        section(&mut page, command, "multirail", 2);
    }
    page
}

/// The commands that help shows.
fn commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn section(page: &mut String, command: &Command, parents: &str, level: usize) {
    let name = format!("{parents} {}", command.get_name());
    writeln!(page, "\n{} `{name}`\n\n{}.", "#".repeat(level), about(command)).expect("a string");
    let usage = command.clone().render_usage().to_string();
    let usage: Vec<_> = usage.trim_start_matches("Usage:").lines().map(str::trim).collect();
    writeln!(page, "\n```text\n{}\n```", usage.join("\n")).expect("a string");
    let arguments = command.get_arguments().filter(|argument| !argument.is_global_set());
    options(page, arguments);
    let after = command.get_after_long_help().or(command.get_after_help());
    if let Some(after) = after {
        writeln!(page, "\n{}", escaped(&after.to_string())).expect("a string");
    }
    commands(command).for_each(|command| section(page, command, &name, level + 1));
}

fn options<'a>(page: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    let shown = |argument: &&Arg| {
        !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
    };
    let rows: Vec<_> = arguments.filter(shown).map(row).collect();
    if !rows.is_empty() {
        writeln!(page, "\n| option | meaning | default |\n|---|---|---|\n{}", rows.join("\n"))
            .expect("a string");
    }
}

/// The row of an option: its names and value, its help, its default.
fn row(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default().join(" ");
    let takes_value = argument.get_action().takes_values();
    let mut names = Vec::new();
    if let Some(short) = argument.get_short() {
        names.push(format!("`-{short}`"));
    }
    match argument.get_long() {
        Some(long) if takes_value => names.push(format!("`--{long} {values}`")),
        Some(long) => names.push(format!("`--{long}`")),
        None if names.is_empty() => names.push(format!("`{values}`")),
        None => {}
    }
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    // Some help texts end with what the default is.
    let (help, said) = match help.split_once("[default: ") {
        Some((help, default)) => {
            (help.trim().to_owned(), default.trim_end().trim_end_matches(']').to_owned())
        }
        None => (help, String::new()),
    };
    let mut help = escaped(&help);
    let possible: Vec<_> = match takes_value && !argument.is_hide_possible_values_set() {
        true => argument.get_possible_values(),
        false => Vec::new(),
    };
    if !possible.is_empty() {
        let possible: Vec<_> = possible.iter().map(|value| format!("`{}`", value.get_name())).collect();
        write!(help, ": {}", possible.join(", ")).expect("a string");
    }
    let defaults: Vec<_> = match takes_value {
        true => argument
            .get_default_values()
            .iter()
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect(),
        false => Vec::new(),
    };
    let default = if defaults.is_empty() { escaped(&said) } else { defaults.join(" ") };
    format!("| {} | {help} | {default} |", names.join(", "))
}

fn about(command: &Command) -> String {
    escaped(&command.get_about().map(ToString::to_string).unwrap_or_default())
}

/// One paragraph of Markdown: no line breaks, no cell ends, no HTML.
fn escaped(text: &str) -> String {
    let paragraphs: Vec<_> = text
        .split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    paragraphs.join("\n\n").replace('|', "\\|").replace('<', "&lt;").replace('*', "\\*")
}

/// The anchor that GitHub and mdBook give a heading.
fn anchor(heading: &str) -> String {
    heading.to_lowercase().replace(' ', "-")
}
