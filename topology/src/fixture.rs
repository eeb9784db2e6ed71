//! A described machine as the files that the readers read.

mod xml;

use std::fs;
use std::io;
use std::path::Path;

use crate::Machine;

pub use xml::hwloc_xml;
#[cfg(feature = "hwloc")]
pub(crate) use xml::mask;

/// Writes what [`sysfs::read`](crate::sysfs::read) reads of `machine` into the folder `root`.
#[cfg(unix)]
pub fn write_sysfs(machine: &Machine, root: &Path) -> io::Result<()> {
    let links = root.join("bus/pci/devices");
    fs::create_dir_all(&links)?;
    for function in &machine.functions {
        let place = Path::new("devices").join(function.sysfs_path());
        let folder = root.join(&place);
        fs::create_dir_all(&folder)?;
        let node = function.node.map_or(-1, i64::from);
        for (file, text) in [
            ("class", format!("0x{:04x}00\n", function.class)),
            ("vendor", format!("0x{:04x}\n", function.vendor)),
            ("device", format!("0x{:04x}\n", function.device)),
            ("numa_node", format!("{node}\n")),
        ] {
            fs::write(folder.join(file), text)?;
        }
        for (kind, names) in [("infiniband", &function.rdma), ("net", &function.net)] {
            names.iter().try_for_each(|name| fs::create_dir_all(folder.join(kind).join(name)))?;
        }
        std::os::unix::fs::symlink(
            Path::new("../../..").join(place),
            links.join(function.address.to_string()),
        )?;
    }
    for node in &machine.nodes {
        let folder = root.join(format!("devices/system/node/node{}", node.number));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("cpulist"), format!("{}\n", node.cpus))?;
    }
    let cpus = root.join("devices/system/cpu");
    fs::create_dir_all(&cpus)?;
    fs::write(cpus.join("online"), format!("{}\n", machine.allowed))?;
    for core in &machine.cores {
        for cpu in &core.cpus.0 {
            let folder = cpus.join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&folder)?;
            fs::write(folder.join("core_cpus_list"), format!("{}\n", core.cpus))?;
        }
    }
    Ok(())
}
