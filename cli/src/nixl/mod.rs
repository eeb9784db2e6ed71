//! `multirail nixl`: adds the plug-in MULTIRAIL to the wheels of NIXL in a Python environment, and removes it.

mod installation;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde::Serialize;

use super::command::EXIT;
use super::failure::{CommandFailure, CommandResult};
use super::output::TextTable;
use super::{Common, output, program};
pub use installation::{Installation, PLUGIN_FILE, PluginState};

/// The variable that names the plug-in's file.
const PLUGIN_VARIABLE: &str = "MULTIRAIL_PLUGIN_FILE";

#[derive(clap::Args)]
pub struct NixlArguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Copy the plug-in into each wheel of NIXL (nixl-cu12, nixl-cu13) in the environment
    #[command(after_help = EXIT)]
    Install(Places),
    /// Remove the plug-in from them
    #[command(after_help = EXIT)]
    Uninstall(Places),
    /// Show the wheels, and whether they have the plug-in
    #[command(
        after_help = "Exit code: 0 if every wheel has this plug-in, 1 if one has not or there is no wheel, 2 if the \
            arguments are invalid."
    )]
    Status(Places),
}

#[derive(clap::Args)]
struct Places {
    /// The virtual environment, or a folder of packages (site-packages) [VIRTUAL_ENV, CONDA_PREFIX, or that of the
    /// Python that runs this command]
    #[arg(long, value_name = "DIR")]
    venv: Option<PathBuf>,

    /// The plug-in's file [MULTIRAIL_PLUGIN_FILE, or libplugin_MULTIRAIL.so beside this command]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
}

/// A row of `status`.
#[derive(Serialize)]
struct Row<'a> {
    wheel: &'a str,
    version: &'a str,
    plugin: &'static str,
    folder: &'a Path,
}

pub fn run(common: &Common, arguments: &NixlArguments) -> CommandResult {
    match &arguments.action {
        Action::Install(places) => install(places),
        Action::Uninstall(places) => uninstall(places),
        Action::Status(places) => status(common, places),
    }
}

/// The environments that a command without `--venv` looks into: the active one, or that of the Python that runs it.
pub fn environments() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().find_map(std::env::var_os).map(PathBuf::from);
    let of_python = || {
        let program = PathBuf::from(program::words().ok()?.into_iter().next()?);
        let is_python = program.file_name()?.to_str()?.starts_with("python");
        // `bin/python` of a virtual environment is a link, which must not be followed.
        is_python.then(|| Some(program.parent()?.parent()?.to_owned())).flatten()
    };
    active.or_else(of_python).into_iter().collect()
}

fn install(places: &Places) -> CommandResult {
    let plugin = places.plugin()?;
    for wheel in places.wheels()? {
        match wheel.state(Some(&plugin))? {
            PluginState::Same => output::line(&format!("{wheel}: has this plug-in already"))?,
            state => {
                wheel.install(&plugin)?;
                let done = if state == PluginState::Missing { "added" } else { "replaced" };
                output::line(&format!("{wheel}: {done} {}", wheel.plugin().display()))?;
            }
        }
    }
    warn_of_other_folder()
}

fn uninstall(places: &Places) -> CommandResult {
    for wheel in places.wheels()? {
        let done = if wheel.uninstall()? { "removed the plug-in" } else { "has no plug-in MULTIRAIL" };
        output::line(&format!("{wheel}: {done}"))?;
    }
    Ok(())
}

fn status(common: &Common, places: &Places) -> CommandResult {
    let plugin = places.plugin().ok();
    let wheels = places.wheels()?;
    let mut table = TextTable::named_by(1).text("wheel").text("version").text("plug-in").text("folder");
    let mut lacking = 0;
    for wheel in &wheels {
        let state = wheel.state(plugin.as_deref())?;
        lacking += usize::from(matches!(state, PluginState::Missing | PluginState::Other));
        let row =
            Row { wheel: &wheel.name, version: &wheel.version, plugin: state.word(), folder: &wheel.plugins };
        match common.json {
            true => output::json(&row)?,
            false => table.row(vec![
                row.wheel.to_owned(),
                row.version.to_owned(),
                row.plugin.to_owned(),
                row.folder.display().to_string(),
            ]),
        }
    }
    if !common.json {
        table.print()?;
    }
    warn_of_other_folder()?;
    match lacking {
        0 => Ok(()),
        _ => Err(CommandFailure::new("a wheel lacks this plug-in: run `multirail nixl install`")),
    }
}

/// NIXL looks into the folder of this variable, and then not into its own.
fn warn_of_other_folder() -> CommandResult {
    let Some(folder) = std::env::var_os("NIXL_PLUGIN_DIR").map(PathBuf::from) else { return Ok(()) };
    if !folder.join(PLUGIN_FILE).exists() {
        output::print_error(&format!(
            "NIXL_PLUGIN_DIR is set, and {} has no {PLUGIN_FILE}: NIXL will look there alone; remove the variable, or copy \
             the plug-in there",
            folder.display()
        ));
    }
    Ok(())
}

impl Places {
    /// The wheels of NIXL in the environment.
    fn wheels(&self) -> CommandResult<Vec<Installation>> {
        let places = match &self.venv {
            Some(venv) => vec![venv.clone()],
            None => environments(),
        };
        let Some(place) = places.first() else {
            return Err(CommandFailure::Invalid("name the environment of NIXL: --venv DIR".into()));
        };
        let found = Installation::find(place)?;
        if found.is_empty() {
            let why =
                "has no wheel of NIXL (nixl-cu12, nixl-cu13): pip install nixl, or name another with --venv";
            return Err(CommandFailure::new(format!("{} {why}", place.display())));
        }
        Ok(found)
    }

    /// The file of the plug-in.
    fn plugin(&self) -> CommandResult<PathBuf> {
        if let Some(named) = self.plugin.clone().or_else(|| std::env::var_os(PLUGIN_VARIABLE).map(Into::into))
        {
            return match named.is_file() {
                true => Ok(named),
                false => Err(CommandFailure::new(format!("there is no file {}", named.display()))),
            };
        }
        let beside = std::env::current_exe().ok().and_then(|this| Some(this.parent()?.to_owned()));
        let candidates = beside
            .into_iter()
            .flat_map(|folder| [folder.join(PLUGIN_FILE), folder.join("../lib").join(PLUGIN_FILE)]);
        candidates.into_iter().find(|file| file.is_file()).ok_or_else(|| {
            let why = "this command comes without the plug-in: use the one of `pip install multirail`, or name the file with \
                       --plugin";
            CommandFailure::new(why)
        })
    }
}
