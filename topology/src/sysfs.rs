//! Reads a machine from `/sys`, or from a copy of another host's `/sys`.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use crate::{Address, Core, Cpus, Error, Function, Kind, Machine, Node, Root, acs};

/// Reads this host. The allowed CPUs are those of the calling thread.
pub fn this_host() -> Result<Machine, Error> {
    read_this_host(true)
}

/// As [`this_host`], but without the bridges' [`acs`], for which each bridge's configuration is read.
pub fn this_host_without_acs() -> Result<Machine, Error> {
    read_this_host(false)
}

fn read_this_host(with_acs: bool) -> Result<Machine, Error> {
    let mut machine = read_root(Path::new("/sys"), with_acs)?;
    if let Some(cpus) = Cpus::of_this_thread() {
        machine.allowed = cpus;
    }
    Ok(machine)
}

/// Reads the host whose `/sys` is at `root`. All of its CPUs that are online are allowed.
///
/// The files of PCI functions, NUMA nodes and the CPUs' siblings may be missing, as some hosts have none.
///
/// # Errors
/// A file that exists is unreadable or malformed.
pub fn read(root: &Path) -> Result<Machine, Error> {
    read_root(root, true)
}

fn read_root(root: &Path, with_acs: bool) -> Result<Machine, Error> {
    fs::metadata(root).map_err(|why| Error::unreadable(root, why))?;
    let nodes = nodes(&root.join("devices/system/node"))?;
    let (cores, online) = cores(&root.join("devices/system/cpu"), &nodes)?;
    Ok(Machine::new(functions(root, with_acs)?, nodes, cores, online))
}

fn functions(root: &Path, with_acs: bool) -> Result<Vec<Function>, Error> {
    let links = root.join("bus/pci/devices");
    let mut functions = Vec::new();
    for name in entries(&links)? {
        let link = links.join(name);
        match function(&link, with_acs) {
            Ok(function) => functions.push(function),
            // The function was removed meanwhile.
            Err(_) if fs::symlink_metadata(&link).is_err() => {}
            Err(why) => return Err(why),
        }
    }
    Ok(functions)
}

fn function(link: &Path, with_acs: bool) -> Result<Function, Error> {
    // The link's target names the bridges. The links of a copy may lead out of the copy, so only their names are used.
    let place = fs::canonicalize(link).map_err(|why| Error::unreadable(link, why))?;
    let names: Vec<_> = place.components().filter_map(name).collect();
    let of_root = |name: &&str| name.strip_prefix("pci").and_then(|name| name.parse::<Root>().ok());
    let Some((at, host)) = names.iter().enumerate().find_map(|(at, name)| Some((at, of_root(name)?))) else {
        return Err(Error::malformed(
            link,
            format!("leads to {}, which is not below a host bridge", place.display()),
        ));
    };
    // Some components of the path are not functions, for example below a VMD.
    let mut bridges: Vec<Address> = names[at + 1..].iter().filter_map(|name| name.parse().ok()).collect();
    let Some(address) = bridges.pop() else {
        return Err(Error::malformed(
            link,
            format!("leads to {}, which is not a PCI function", place.display()),
        ));
    };
    let number = |file: &str, bits: u32| -> Result<u32, Error> {
        let path = place.join(file);
        let text = text(&path)?.unwrap_or_default();
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        let number = u32::from_str_radix(digits, 16).ok().filter(|number| number >> bits == 0);
        number.ok_or_else(|| {
            Error::malformed(&path, format!("{text:?} is not a hexadecimal number of {bits} bits"))
        })
    };
    let (class, vendor, device) =
        ((number("class", 24)? >> 8) as u16, number("vendor", 16)? as u16, number("device", 16)? as u16);
    let rdma = entries(&place.join("infiniband"))?;
    Ok(Function {
        address,
        root: host,
        class,
        vendor,
        device,
        // The kernel shows -1 if the firmware does not tell the node.
        node: parsed::<i32>(&place.join("numa_node"))?.and_then(|node| node.try_into().ok()),
        kind: Kind::of(class, vendor, device, !rdma.is_empty()),
        rdma,
        net: entries(&place.join("net"))?,
        redirects: if with_acs && class == BRIDGE { redirects(&place.join("config"))? } else { None },
        physical: physical(&place),
        bridges,
    })
}

/// The physical function of a virtual one.
fn physical(place: &Path) -> Option<Address> {
    fs::read_link(place.join("physfn")).ok()?.file_name()?.to_str()?.parse().ok()
}

/// The class of a PCI-to-PCI bridge.
const BRIDGE: u16 = 0x0604;

fn redirects(path: &Path) -> Result<Option<bool>, Error> {
    let config = match fs::read(path) {
        Ok(config) => config,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(why) => return Err(Error::unreadable(path, why)),
    };
    acs::redirects(&config).map_err(|why| Error::malformed(path, why))
}

fn name<'a>(component: Component<'a>) -> Option<&'a str> {
    match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    }
}

fn nodes(folder: &Path) -> Result<Vec<Node>, Error> {
    let numbered = numbered(folder, "node")?.into_iter();
    let node = |(number, path): (u32, PathBuf)| {
        let cpus = parsed(&path.join("cpulist"))?.unwrap_or_default();
        Ok(Node { number, cpus })
    };
    numbered.map(node).collect()
}

/// The cores with a CPU that is online, and all CPUs that are online.
fn cores(folder: &Path, nodes: &[Node]) -> Result<(Vec<Core>, Cpus), Error> {
    let cpus = numbered(folder, "cpu")?;
    let online = match parsed::<Cpus>(&folder.join("online"))? {
        Some(online) => online,
        None if cpus.is_empty() => nodes.iter().flat_map(|node| node.cpus.0.iter().copied()).collect(),
        None => cpus.iter().map(|(number, _)| *number).collect(),
    };
    let mut cores: Vec<Core> = Vec::new();
    for number in &online.0 {
        if cores.iter().any(|core| core.cpus.has(*number)) {
            continue;
        }
        let about = folder.join(format!("cpu{number}/topology"));
        // Kernels before 5.0 have only the second name.
        let siblings = match parsed::<Cpus>(&about.join("core_cpus_list"))? {
            Some(siblings) => Some(siblings),
            None => parsed(&about.join("thread_siblings_list"))?,
        };
        let mut cpus = siblings.unwrap_or_default().and(&online);
        cpus.0.insert(*number);
        let node = nodes.iter().find(|node| node.cpus.has(*number)).map(|node| node.number);
        cores.push(Core { cpus, node });
    }
    Ok((cores, online))
}

/// The entries of a folder, sorted. Empty if there is no such folder.
pub(crate) fn entries(folder: &Path) -> Result<Vec<String>, Error> {
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(why) => return Err(Error::unreadable(folder, why)),
    };
    let mut names = Vec::new();
    for entry in listed {
        let entry = entry.map_err(|why| Error::unreadable(folder, why))?;
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// The entries whose name is `prefix` and a number, by number.
fn numbered(folder: &Path, prefix: &str) -> Result<Vec<(u32, PathBuf)>, Error> {
    let number = |name: &String| name.strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<(u32, PathBuf)> =
        entries(folder)?.iter().filter_map(|name| Some((number(name)?, folder.join(name)))).collect();
    found.sort();
    Ok(found)
}

/// The text of a file, without the end of the line. `None` if there is no such file.
fn text(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(why) => Err(Error::unreadable(path, why)),
    }
}

/// The parsed text of a file. `None` if there is no such file.
pub(crate) fn parsed<T: FromStr>(path: &Path) -> Result<Option<T>, Error>
where
    T::Err: std::fmt::Display,
{
    let Some(text) = text(path)? else { return Ok(None) };
    text.parse().map(Some).map_err(|why| Error::malformed(path, format!("{text:?}: {why}")))
}
