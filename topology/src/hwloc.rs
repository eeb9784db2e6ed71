//! Reads a machine by libhwloc: this host, or an XML file of `lstopo`.
//!
//! The result differs from [`sysfs`](crate::sysfs) in some points:
//!
//! - hwloc puts each host bridge below an object. If that object is not the whole machine and has the CPUs of one node,
//!   all functions below the host bridge get that node. On a host with one node, hwloc puts all host bridges below the
//!   machine, whatever the firmware tells; so no function has a node.
//! - hwloc lists a CPU with each node that is near it, also with nodes of memory alone. This module gives each CPU to
//!   the one of these nodes with the fewest CPUs; of two such nodes, to the one with the lower number.
//! - If the system knows no NUMA nodes, hwloc reports one.
//! - PCI domains have 16 bits, unless hwloc was built for more. Functions in larger domains are left out.
//!
//! libhwloc trusts a file that is well-formed XML of its format. A file that contradicts itself, which only an editor
//! produces, can crash it. With debug assertions that happens more often: hwlocality makes libhwloc check everything
//! then, and a check that fails aborts the process.

mod processing_units;

use std::ffi::CStr;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::Path;

use hwlocality::Topology;
use hwlocality::cpu::cpuset::CpuSet;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{
    BridgeAttributes, DownstreamAttributes, ObjectAttributes, PCIDeviceAttributes, UpstreamAttributes,
};
use hwlocality::object::types::{BridgeType, OSDeviceType, ObjectType};
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder, TypeFilter};

use crate::cpus::MAX_CPUS;
use crate::{Address, Core, Cpus, Error, Function, Kind, Machine, Node, Root};

/// The largest file that is read. Real files have some 100 kB, and hwloc counts bytes in an `int`.
const MAX_FILE: u64 = 64 << 20;

/// Reads this host. The allowed CPUs are those that hwloc allows and on which the calling thread may run.
///
/// # Errors
/// hwloc's error. It names `/sys`, which hwloc reads unless the variables `HWLOC_*` name another source.
pub fn this_host() -> Result<Machine, Error> {
    let source = Path::new("/sys");
    let failed = |why: String| Error::unreadable(source, io::Error::other(why));
    let topology = load(Topology::builder()).map_err(failed)?;
    let mut machine = machine(&topology).map_err(|what| Error::malformed(source, what))?;
    if let Some(cpus) = Cpus::of_this_thread() {
        machine.allowed = machine.allowed.and(&cpus);
    }
    Ok(machine)
}

/// Reads an XML file that `lstopo --of xml` or hwloc's functions wrote on another host. The allowed CPUs are those that
/// the writer was allowed to use.
///
/// # Errors
/// - There is no such file.
/// - A newer hwloc wrote the file.
/// - hwloc refuses the file. It prints the reason if `HWLOC_XML_VERBOSE=1` is set.
/// - The file has no bridges, as `lstopo --no-bridges` writes it: distances cannot be found without them.
pub fn read(path: &Path) -> Result<Machine, Error> {
    // The file is not read by hwloc itself: hwloc takes the name "-" for the standard input, and hwlocality panics on
    // some of its errors.
    let about = fs::metadata(path).map_err(|why| Error::unreadable(path, why))?;
    let malformed = |what: String| Error::malformed(path, what);
    if about.len() > MAX_FILE {
        return Err(malformed(format!("{} bytes are too many for an hwloc XML file", about.len())));
    }
    let text = fs::read_to_string(path).map_err(|why| Error::unreadable(path, why))?;
    let library = hwlocality::hwloc_api_version() >> 16;
    if let Some(written) = major(&text).filter(|written| *written > library) {
        return Err(malformed(format!(
            "it was written by hwloc {written} and needs libhwloc {written} or newer, but this is libhwloc {library}: \
             write it by lstopo of hwloc {library}, or copy the /sys of that host and read it as sysfs:DIR"
        )));
    }
    let refused = |why: &dyn Display| malformed(format!("not an hwloc XML file: {why}"));
    let builder =
        Topology::builder().from_xml(&processing_units::add_missing(&text)).map_err(|why| refused(&why))?;
    let topology = load(builder).map_err(|why| refused(&why))?;
    machine(&topology).map_err(malformed)
}

/// The major version of hwloc that a file names: `<topology version="3.0">`. The first versions named none.
fn major(text: &str) -> Option<usize> {
    let (_, element) = text.split_once("<topology")?;
    let (attributes, _) = element.split_once('>')?;
    let (_, version) = attributes.split_once("version=")?;
    version.trim_start_matches(['"', '\'']).split('.').next()?.parse().ok()
}

fn load(builder: TopologyBuilder) -> Result<Topology, String> {
    let flags = BuildFlags::INCLUDE_DISALLOWED
        | BuildFlags::DONT_CHANGE_BINDING
        | BuildFlags::IGNORE_DISTANCES
        | BuildFlags::IGNORE_MEMORY_ATTRIBUTES
        | BuildFlags::IGNORE_CPU_KINDS;
    let builder = builder.with_flags(flags).map_err(|why| why.to_string())?;
    let builder = builder.with_io_type_filter(TypeFilter::KeepAll).map_err(|why| why.to_string())?;
    builder.build().map_err(|why| why.to_string())
}

fn machine(topology: &Topology) -> Result<Machine, String> {
    let nodes = nodes(topology)?;
    let cores = cores(topology, &nodes)?;
    let mut functions = Vec::new();
    for object in topology.pci_devices().chain(topology.bridges()) {
        functions.extend(pci(object).map(|pci| function(object, pci, &nodes)).transpose()?);
    }
    let machine = Machine::new(functions, nodes, cores, cpus(&topology.allowed_cpuset())?);
    match machine.functions.windows(2).find(|pair| pair[0].address == pair[1].address) {
        Some(pair) => Err(format!("{} is in the file twice", pair[0].address)),
        None => Ok(machine),
    }
}

/// The PCI attributes of an object, if it is a PCI function.
fn pci(object: &TopologyObject) -> Option<&PCIDeviceAttributes> {
    match object.attributes()? {
        ObjectAttributes::PCIDevice(pci) => Some(pci),
        ObjectAttributes::Bridge(bridge) => match bridge.upstream_attributes()? {
            UpstreamAttributes::PCI(pci) => Some(pci),
        },
        _ => None,
    }
}

fn function(object: &TopologyObject, pci: &PCIDeviceAttributes, nodes: &[Node]) -> Result<Function, String> {
    let address = address(pci);
    let above = || object.ancestors().take_while(|object| object.object_type().is_io());
    let mut bridges: Vec<Address> = above().filter_map(self::pci).map(self::address).collect();
    bridges.reverse();
    let Some(root) = above().last().and_then(root) else {
        return Err(format!("{address} is not below a host bridge: write the file with all bridges"));
    };
    let (class, vendor, device) = (pci.class_id(), pci.vendor_id(), pci.device_id());
    let rdma = names(object, OSDeviceType::OpenFabrics);
    Ok(Function {
        address,
        root,
        bridges,
        class,
        vendor,
        device,
        node: object.first_non_io_ancestor().and_then(|place| node(place, nodes)),
        kind: Kind::of(class, vendor, device, !rdma.is_empty()),
        rdma,
        net: names(object, OSDeviceType::Network),
        redirects: None,
        physical: None,
    })
}

fn address(pci: &PCIDeviceAttributes) -> Address {
    let (bus, device, function) = (pci.bus_id(), pci.bus_device(), pci.function());
    Address { domain: pci.domain().into(), bus, device, function }
}

/// The host bridge, if an object is one.
fn root(object: &TopologyObject) -> Option<Root> {
    let Some(ObjectAttributes::Bridge(bridge)) = object.attributes() else { return None };
    let DownstreamAttributes::PCI(below) = downstream(bridge)?;
    let root = Root { domain: below.domain().into(), bus: below.secondary_bus() };
    (bridge.upstream_type() == BridgeType::Host).then_some(root)
}

/// The PCI bus below a bridge, if there is one. hwlocality panics if it is asked about a bridge to another bus, which a
/// file may contain.
fn downstream(bridge: &BridgeAttributes) -> Option<DownstreamAttributes<'_>> {
    (bridge.downstream_type() == BridgeType::PCI).then(|| bridge.downstream_attributes()).flatten()
}

/// The names of an object's OS devices of one type.
fn names(object: &TopologyObject, of: OSDeviceType) -> Vec<String> {
    let is_of_type = |device: &&TopologyObject| matches!(device.attributes(), Some(ObjectAttributes::OSDevice(device)) if device.device_type() == of);
    let name = |device: &TopologyObject| device.name().map(CStr::to_string_lossy).map(Into::into);
    let mut names: Vec<String> = object.io_children().filter(is_of_type).filter_map(name).collect();
    names.sort();
    names
}

/// The node of the objects below `place`.
fn node(place: &TopologyObject, nodes: &[Node]) -> Option<u32> {
    let local = place.nodeset().filter(|_| place.object_type() != ObjectType::Machine)?;
    let mut near = nodes.iter().filter(|node| local.is_set(node.number as usize) && !node.cpus.0.is_empty());
    near.next().filter(|_| near.next().is_none()).map(|node| node.number)
}

fn nodes(topology: &Topology) -> Result<Vec<Node>, String> {
    let mut nodes = Vec::new();
    for object in topology.objects_with_type(ObjectType::NUMANode) {
        // A node's number must fit hwloc's sets of nodes.
        let number = object.os_index().filter(|number| *number < MAX_CPUS as usize);
        let number = number.ok_or("a NUMA node has no number")? as u32;
        nodes.push(Node { number, cpus: cpus_of(object)? });
    }
    nodes.sort_by_key(|node| (node.cpus.0.len(), node.number));
    let mut taken = std::collections::BTreeSet::new();
    nodes.iter_mut().for_each(|node| node.cpus.0.retain(|cpu| taken.insert(*cpu)));
    Ok(nodes)
}

/// The cores. Each CPU without a core counts as a core.
fn cores(topology: &Topology, nodes: &[Node]) -> Result<Vec<Core>, String> {
    let objects = topology.objects_with_type(ObjectType::Core);
    let mut threads = objects.map(cpus_of).collect::<Result<Vec<Cpus>, String>>()?;
    let mut alone = cpus(&topology.cpuset())?;
    threads.iter().for_each(|core| alone.0.retain(|cpu| !core.has(*cpu)));
    threads.extend(alone.0.iter().map(|cpu| Cpus::from_iter([*cpu])));
    threads.retain(|cpus| !cpus.0.is_empty());
    let core = |cpus: Cpus| {
        let near = nodes.iter().find(|node| cpus.0.first().is_some_and(|cpu| node.cpus.has(*cpu)));
        Core { node: near.map(|node| node.number), cpus }
    };
    Ok(threads.into_iter().map(core).collect())
}

fn cpus_of(object: &TopologyObject) -> Result<Cpus, String> {
    let what = || format!("a {} has no CPU set", object.object_type());
    let set = object.cpuset().ok_or_else(what)?;
    cpus(&set)
}

/// The CPUs of a set, unless the set is infinite or too large.
fn cpus(set: &CpuSet) -> Result<Cpus, String> {
    let last = set.last_set().map(usize::from);
    if set.weight().is_none() || last.is_some_and(|last| last >= MAX_CPUS as usize) {
        return Err(format!("{set} is too large for a set of CPUs"));
    }
    Ok(set.iter_set().map(|cpu| usize::from(cpu) as u32).collect())
}
