//! Where the machine is read from: its cards, GPUs, NUMA nodes and cores.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use topology::{Address, Description, Machine, sysfs};
use transport_core::{Error, ErrorKind, RailGroups, Result};

use crate::environment::given;

/// The source of this host's machine, as [`MachineSource`] reads it.
pub(crate) const TOPOLOGY: &str = "MULTIRAIL_TOPOLOGY";
/// Rail groups, as [`RailGroups`] reads them.
pub(crate) const RAIL_GROUPS: &str = "MULTIRAIL_RAIL_GROUPS";
/// PCI addresses of the GPUs to be served, with commas.
pub(crate) const GPUS: &str = "MULTIRAIL_GPUS";

/// A machine, by where it is described: what `multirail topo --from` and `MULTIRAIL_TOPOLOGY` name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineSource {
    /// This host, by its `/sys`: `sysfs`.
    ThisHost,
    /// A copy of a `/sys`: `sysfs:DIR`.
    Sysfs(PathBuf),
    /// XML of lstopo's, `hwloc:FILE`, or this host through libhwloc, `hwloc`.
    Hwloc(Option<PathBuf>),
    /// A [`Description`] in TOML: `file:FILE`.
    File(PathBuf),
    /// The description that is built in: `p5.48xlarge`.
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
                let context = format!("{text:?}: write sysfs:DIR, hwloc:FILE, hwloc, file:FILE or {P5}");
                Err(Error::new(ErrorKind::InvalidRequest, "choose a machine", context))
            }
        }
    }
}

impl MachineSource {
    /// Where this host's machine is read from: as `MULTIRAIL_TOPOLOGY` says, else from `/sys`.
    ///
    /// # Errors
    /// `InvalidRequest` where the variable makes no sense.
    pub fn of_this_host() -> Result<Self> {
        let source = given(TOPOLOGY).map_or(Ok(Self::ThisHost), |text| text.parse());
        source.map_err(|why| unclear(TOPOLOGY, why.context()))
    }

    /// The machine, and what it is called.
    ///
    /// # Errors
    /// `Io` with the file that cannot be read or understood; `Unsupported` where hwloc is asked for
    /// and this build lacks its feature.
    pub fn read(&self) -> Result<(String, Machine)> {
        let (name, machine) = match self {
            Self::ThisHost => (host_name(), sysfs::this_host().map_err(failure)?),
            Self::Sysfs(folder) => (called(folder), sysfs::read(folder).map_err(failure)?),
            Self::Hwloc(file) => hwloc(file.as_deref())?,
            Self::File(file) => {
                let description = Description::read(file).map_err(failure)?;
                let machine = description.machine();
                (
                    description.name,
                    machine.map_err(|why| unreadable(format!("{}: {}", called(file), words(&why))))?,
                )
            }
            Self::P5 => (P5.to_owned(), Description::p5().machine().map_err(failure)?),
        };
        if machine.functions.is_empty() && machine.cores.is_empty() {
            let from = if let Self::File(file) = self { called(file) } else { name };
            return Err(unreadable(format!(
                "{from} has neither a PCI function nor a core: a copy of /sys has bus/pci/devices and \
                 devices/system/cpu, a description has [[function]] and [[node]]"
            )));
        }
        Ok((name, machine))
    }
}

#[cfg(feature = "hwloc")]
fn hwloc(file: Option<&Path>) -> Result<(String, Machine)> {
    match file {
        Some(file) => Ok((called(file), topology::hwloc::read(file).map_err(failure)?)),
        None => Ok((host_name(), topology::hwloc::this_host().map_err(failure)?)),
    }
}

#[cfg(not(feature = "hwloc"))]
fn hwloc(_: Option<&Path>) -> Result<(String, Machine)> {
    let context = "this multirail is built without hwloc: build it with `cargo build --features hwloc`, which needs \
                   libhwloc (Debian: libhwloc-dev), or take sysfs:DIR";
    Err(Error::new(ErrorKind::Unsupported, "read the machine", context))
}

/// What the environment says of the machine and of rail groups.
pub(crate) struct Wishes {
    pub groups: Option<RailGroups>,
    pub gpus: Option<Vec<Address>>,
    /// Without the CPUs that this process may not use.
    pub machine: Option<Machine>,
}

impl Wishes {
    pub fn from_environment() -> Result<Self> {
        Ok(Self { groups: Self::groups()?, gpus: Self::gpus()?, machine: Self::machine()? })
    }

    fn groups() -> Result<Option<RailGroups>> {
        let groups = given(RAIL_GROUPS).map(|text| text.parse::<RailGroups>()).transpose();
        groups.map_err(|why| unclear(RAIL_GROUPS, why.context()))
    }

    /// The GPUs to be served; all without.
    pub fn gpus() -> Result<Option<Vec<Address>>> {
        let address = |text: &str| text.trim().parse::<Address>();
        let gpus =
            given(GPUS).map(|text| text.split(',').map(address).collect::<std::result::Result<_, _>>());
        gpus.transpose().map_err(|why| unclear(GPUS, why))
    }

    fn machine() -> Result<Option<Machine>> {
        let Some(source) = given(TOPOLOGY) else { return Ok(None) };
        let named = |why: Error| {
            Error::new(why.kind(), "read the environment", format!("{TOPOLOGY}: {}", why.context()))
        };
        let (_, mut machine) =
            source.parse::<MachineSource>().and_then(|source| source.read()).map_err(named)?;
        if let Some(cpus) = topology::Cpus::of_this_thread() {
            machine.allowed = machine.allowed.and(&cpus);
        }
        Ok(Some(machine))
    }
}

/// The error for a variable that makes no sense.
fn unclear(variable: &str, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidRequest, "read the environment", format!("{variable}: {why}"))
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn called(path: &Path) -> String {
    path.display().to_string()
}

fn failure(error: topology::Error) -> Error {
    unreadable(words(&error))
}

fn unreadable(context: String) -> Error {
    Error::new(ErrorKind::Io, "read the machine", context)
}

/// In one line: a parser's words come with a drawing of the place.
fn words(error: &topology::Error) -> String {
    let said = error.to_string();
    let mut lines = said.lines();
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
    fn what_is_read_has_a_name() {
        let (name, machine) = MachineSource::P5.read().unwrap();
        assert_eq!((name.as_str(), machine.functions.len() > 40), (P5, true));
        let missing = MachineSource::File("no/such.toml".into()).read().unwrap_err();
        assert!(missing.to_string().contains("no/such.toml"), "{missing}");
    }

    #[test]
    fn sources_are_told_apart() {
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
