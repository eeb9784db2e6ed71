//! A wheel of NIXL that is installed in a Python environment.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::failure::{CommandFailure, CommandResult};

/// The name that NIXL looks for: `libplugin_<backend>.so`.
pub const PLUGIN_FILE: &str = "libplugin_MULTIRAIL.so";

/// The packages of NIXL's wheels, one for each release of CUDA.
const PACKAGES: [&str; 2] = ["nixl_cu12", "nixl_cu13"];

/// Whether a wheel has the plug-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginState {
    Missing,
    /// It has the file that would be installed.
    Same,
    /// It has another build.
    Other,
    /// It has one, and there is none to compare it with.
    Unknown,
}

impl PluginState {
    pub fn word(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Same => "installed",
            Self::Other => "another build",
            Self::Unknown => "installed, not compared",
        }
    }
}

/// A wheel of NIXL: its name, its version, and the folder that it loads plug-ins from.
#[derive(Debug)]
pub struct Installation {
    pub name: String,
    pub version: String,
    pub plugins: PathBuf,
}

impl Installation {
    /// The wheels in a virtual environment, or in a folder of packages.
    pub fn find(place: &Path) -> CommandResult<Vec<Self>> {
        if !place.is_dir() {
            return Err(CommandFailure::new(format!("there is no folder {}", place.display())));
        }
        let mut found = Vec::new();
        for folder in package_folders(place) {
            found.extend(PACKAGES.into_iter().filter_map(|package| Self::of_package(&folder, package)));
        }
        Ok(found)
    }

    fn of_package(folder: &Path, package: &str) -> Option<Self> {
        let plugins = folder.join(format!(".{package}.mesonpy.libs")).join("plugins");
        if !plugins.is_dir() {
            return None;
        }
        let prefix = format!("{package}-");
        let version = names(folder)
            .into_iter()
            .find_map(|name| name.strip_prefix(&prefix)?.strip_suffix(".dist-info").map(str::to_owned));
        let version = version.unwrap_or_else(|| "unknown".into());
        Some(Self { name: package.replace('_', "-"), version, plugins })
    }

    /// Where the plug-in is, or would be.
    pub fn plugin(&self) -> PathBuf {
        self.plugins.join(PLUGIN_FILE)
    }

    /// Whether the wheel has this plug-in.
    pub fn state(&self, plugin: Option<&Path>) -> CommandResult<PluginState> {
        let file = self.plugin();
        if !file.exists() {
            return Ok(PluginState::Missing);
        }
        let Some(plugin) = plugin else { return Ok(PluginState::Unknown) };
        let bytes = |path: &Path| fs::read(path).map_err(|error| of_file(path, &error));
        Ok(if bytes(&file)? == bytes(plugin)? { PluginState::Same } else { PluginState::Other })
    }

    /// Copies the plug-in there. A process that has loaded the old file keeps it: the new one takes its name.
    pub fn install(&self, plugin: &Path) -> CommandResult {
        let (file, new) =
            (self.plugin(), self.plugins.join(format!(".{PLUGIN_FILE}.{}", std::process::id())));
        let copied = fs::copy(plugin, &new).and_then(|_| fs::rename(&new, &file));
        copied.map_err(|error| {
            // It may not be there.
            let _ = fs::remove_file(&new);
            of_file(&file, &error)
        })
    }

    /// Removes the plug-in. Returns whether there was one.
    pub fn uninstall(&self) -> CommandResult<bool> {
        let file = self.plugin();
        match fs::remove_file(&file) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(of_file(&file, &error)),
        }
    }
}

impl fmt::Display for Installation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

fn of_file(path: &Path, error: &io::Error) -> CommandFailure {
    CommandFailure::new(format!("{}: {error}", path.display()))
}

/// The folders of packages of an environment: those of each Python 3 in it, or the folder itself.
fn package_folders(place: &Path) -> Vec<PathBuf> {
    let mut folders = vec![place.to_owned()];
    for libraries in ["lib", "lib64", "local/lib"] {
        let libraries = place.join(libraries);
        // `lib64` is a link to `lib` in a virtual environment.
        if libraries.is_symlink() {
            continue;
        }
        let pythons = names(&libraries).into_iter().filter(|name| name.starts_with("python3"));
        for python in pythons {
            folders.extend(
                ["site-packages", "dist-packages"].map(|packages| libraries.join(&python).join(packages)),
            );
        }
    }
    folders
}

/// The names in a folder, in order; none if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
