//! The sources of a machine: its cards, GPUs, NUMA nodes and cores.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use topology::{Description, Machine, sysfs};
use transport_core::{Error, ErrorKind, Result};

use crate::environment::{TOPOLOGY, given, invalid_variable};

/// The source of a machine, as `multirail topo --from` and `MULTIRAIL_TOPOLOGY` name it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineSource {
    /// This host's `/sys`: `sysfs`.
    ThisHost,
    /// A copy of a host's `/sys`: `sysfs:DIR`.
    Sysfs(PathBuf),
    /// XML of lstopo: `hwloc:FILE`. Or this host through libhwloc: `hwloc`.
    Hwloc(Option<PathBuf>),
    /// A [`Description`] in TOML: `file:FILE`.
    File(PathBuf),
    /// The built-in description: `p5.48xlarge`.
    P5,
}

const P5: &str = "p5.48xlarge";

impl FromStr for MachineSource {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.split_once(':')) {
            ("sysfs", _) => Ok(Self::ThisHost),
            ("hwloc", _) => Ok(Self::Hwloc(None)),
            (P5, _) => Ok(Self::P5),
            (_, Some(("sysfs", folder))) if !folder.is_empty() => Ok(Self::Sysfs(folder.into())),
            (_, Some(("hwloc", file))) if !file.is_empty() => Ok(Self::Hwloc(Some(file.into()))),
            (_, Some(("file", file))) if !file.is_empty() => Ok(Self::File(file.into())),
            _ => {
                let context =
                    format!("unknown source {text:?}; use sysfs:DIR, hwloc:FILE, hwloc, file:FILE or {P5}");
                Err(Error::new(ErrorKind::InvalidRequest, "choose a machine", context))
            }
        }
    }
}

impl MachineSource {
    /// The source of this host's machine: the value of `MULTIRAIL_TOPOLOGY`, or `/sys`.
    ///
    /// # Errors
    /// `InvalidRequest` if the variable's value is invalid.
    pub fn of_this_host() -> Result<Self> {
        let source = given(TOPOLOGY).map_or(Ok(Self::ThisHost), |text| text.parse());
        source.map_err(|why| invalid_variable(TOPOLOGY, why.context()))
    }

    /// Reads the machine and its name.
    ///
    /// # Errors
    /// `Io` if a file cannot be read or parsed, with its name. `Unsupported` for hwloc if this build lacks the feature.
    pub fn read(&self) -> Result<(String, Machine)> {
        let (name, machine) = match self {
            Self::ThisHost => (host_name(), sysfs::this_host().map_err(failure)?),
            Self::Sysfs(folder) => (display_name(folder), sysfs::read(folder).map_err(failure)?),
            Self::Hwloc(file) => hwloc(file.as_deref())?,
            Self::File(file) => {
                let description = Description::read(file).map_err(failure)?;
                let machine = description.machine();
                (
                    description.name,
                    machine
                        .map_err(|why| unreadable(format!("{}: {}", display_name(file), one_line(&why))))?,
                )
            }
            Self::P5 => (P5.to_owned(), Description::p5().machine().map_err(failure)?),
        };
        if machine.functions.is_empty() && machine.cores.is_empty() {
            let from = if let Self::File(file) = self { display_name(file) } else { name };
            return Err(unreadable(format!(
                "{from} has neither a PCI function nor a core; a copy of /sys needs bus/pci/devices and \
                 devices/system/cpu, a description needs [[function]] and [[node]]"
            )));
        }
        Ok((name, machine))
    }
}

#[cfg(feature = "hwloc")]
fn hwloc(file: Option<&Path>) -> Result<(String, Machine)> {
    match file {
        Some(file) => Ok((display_name(file), topology::hwloc::read(file).map_err(failure)?)),
        None => Ok((host_name(), topology::hwloc::this_host().map_err(failure)?)),
    }
}

#[cfg(not(feature = "hwloc"))]
fn hwloc(_: Option<&Path>) -> Result<(String, Machine)> {
    let context = "this multirail is built without hwloc; build it with `cargo build --features hwloc`, which needs \
                   libhwloc (Debian: libhwloc-dev), or use sysfs:DIR";
    Err(Error::new(ErrorKind::Unsupported, "read the machine", context))
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn display_name(path: &Path) -> String {
    path.display().to_string()
}

fn failure(error: topology::Error) -> Error {
    unreadable(one_line(&error))
}

fn unreadable(context: String) -> Error {
    Error::new(ErrorKind::Io, "read the machine", context)
}

/// The text of an error in one line. A parser's error has several lines that show the position.
fn one_line(error: &topology::Error) -> String {
    let text = error.to_string();
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    match lines.rfind(|line| !line.trim().is_empty()) {
        Some(last) => format!("{first}: {}", last.trim()),
        None => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_names() {
        let (name, machine) = MachineSource::P5.read().unwrap();
        assert_eq!((name.as_str(), machine.functions.len() > 40), (P5, true));
        let missing = MachineSource::File("no/such.toml".into()).read().unwrap_err();
        assert!(missing.to_string().contains("no/such.toml"), "{missing}");
    }

    #[test]
    fn sources_parse() {
        for (text, source) in [
            ("sysfs", MachineSource::ThisHost),
            ("sysfs:/a:b", MachineSource::Sysfs("/a:b".into())),
            ("hwloc", MachineSource::Hwloc(None)),
            ("hwloc:a.xml", MachineSource::Hwloc(Some("a.xml".into()))),
            ("file:a.toml", MachineSource::File("a.toml".into())),
            ("p5.48xlarge", MachineSource::P5),
        ] {
            assert_eq!(text.parse::<MachineSource>().unwrap(), source, "{text}");
        }
        for wrong in ["", "p4", "file", "file:", "sysfs:", "hwloc:", "/sys"] {
            assert!(wrong.parse::<MachineSource>().unwrap_err().context().contains("sysfs:DIR"), "{wrong}");
        }
    }
}
