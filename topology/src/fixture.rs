//! Writes a machine as the files that the sources read: a sysfs tree, or an hwloc XML file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
#[cfg(unix)]
use std::fs;
#[cfg(unix)]
use std::io;
#[cfg(unix)]
use std::path::Path;

use crate::{Address, Cpus, Function, Machine, Node, Root};

/// Writes `machine` into the folder `root` as the files that [`sysfs::read`](crate::sysfs::read) reads.
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

/// `machine` as an XML text that `hwloc::read` reads, in version 2 of hwloc's format.
///
/// The format cannot hold every machine. All functions below a host bridge get the node of the first of them, if that
/// node has CPUs. A machine without nodes gets one. Functions in domains of more than 16 bits are lost.
pub fn hwloc_xml(machine: &Machine) -> String {
    let mut out = Xml { text: String::new(), depth: 1, objects: 0 };
    out.text.push_str("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    out.text.push_str("<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">\n");
    out.machine(machine);
    out.text.push_str("</topology>\n");
    out.text
}

/// A set of CPUs or nodes as hwloc writes it: words of 32 bits, the highest first.
pub(crate) fn bit_mask(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut words = vec![0_u32];
    for number in numbers {
        let word = number as usize / 32;
        words.resize(words.len().max(word + 1), 0);
        words[word] |= 1 << (number % 32);
    }
    let words: Vec<String> = words.iter().rev().map(|word| format!("0x{word:08x}")).collect();
    words.join(",")
}

struct Xml {
    text: String,
    depth: usize,
    objects: u32,
}

impl Xml {
    /// Writes an object, and what `inside` writes into it.
    fn object(&mut self, kind: &str, attributes: &str, inside: impl FnOnce(&mut Self)) {
        self.objects += 1;
        let (indent, number) = ("  ".repeat(self.depth), self.objects);
        let _ = writeln!(self.text, "{indent}<object type=\"{kind}\" gp_index=\"{number}\" {attributes}>");
        self.depth += 1;
        inside(self);
        self.depth -= 1;
        let _ = writeln!(self.text, "{indent}</object>");
    }

    /// Writes an object with CPUs and nodes.
    fn object_with_cpus(
        &mut self,
        kind: &str,
        number: u32,
        cpus: &Cpus,
        nodes: &str,
        inside: impl FnOnce(&mut Self),
    ) {
        let cpus = bit_mask(cpus.0.iter().copied());
        let sets = format!(
            "cpuset=\"{cpus}\" complete_cpuset=\"{cpus}\" nodeset=\"{nodes}\" complete_nodeset=\"{nodes}\""
        );
        self.object(kind, &format!("os_index=\"{number}\" {sets}"), inside);
    }

    fn machine(&mut self, machine: &Machine) {
        let cpus: Cpus = machine.cores.iter().flat_map(|core| core.cpus.0.iter().copied()).collect();
        let made_up = [Node { number: 0, cpus: Cpus::default() }];
        let nodes = if machine.nodes.is_empty() { &made_up[..] } else { &machine.nodes };
        let all_nodes = bit_mask(nodes.iter().map(|node| node.number));
        let allowed = bit_mask(machine.allowed.0.iter().copied());
        let all_cpus = bit_mask(cpus.0.iter().copied());
        let sets = format!(
            "os_index=\"0\" cpuset=\"{all_cpus}\" complete_cpuset=\"{all_cpus}\" allowed_cpuset=\"{allowed}\" \
             nodeset=\"{all_nodes}\" complete_nodeset=\"{all_nodes}\" allowed_nodeset=\"{all_nodes}\""
        );
        // A host bridge is written into the node of the first function below it.
        let mut places: BTreeMap<Option<u32>, BTreeMap<Root, Vec<&Function>>> = BTreeMap::new();
        let mut place_of: BTreeMap<Root, Option<u32>> = BTreeMap::new();
        for function in &machine.functions {
            let has_cpus = |node: &&Node| Some(node.number) == function.node && !node.cpus.0.is_empty();
            let place = nodes.iter().find(has_cpus).map(|node| node.number);
            let place = *place_of.entry(function.root).or_insert(place);
            places.entry(place).or_default().entry(function.root).or_default().push(function);
        }
        self.object("Machine", &sets, |out| {
            for node in nodes.iter().filter(|node| node.cpus.0.is_empty()) {
                // hwloc counts all CPUs of the surrounding object as near to the memory.
                out.object_with_cpus("NUMANode", node.number, &cpus, &bit_mask([node.number]), |_| ());
            }
            let mut with_cpus: Vec<&Node> = nodes.iter().filter(|node| !node.cpus.0.is_empty()).collect();
            with_cpus.sort_by_key(|node| node.cpus.0.first());
            for node in with_cpus {
                let itself = bit_mask([node.number]);
                out.object_with_cpus("Package", node.number, &node.cpus, &itself, |out| {
                    out.object_with_cpus("NUMANode", node.number, &node.cpus, &itself, |_| ());
                    out.cores(machine, Some(node.number), &itself);
                    out.roots(machine, places.get(&Some(node.number)));
                });
            }
            out.cores(machine, None, &all_nodes);
            out.roots(machine, places.get(&None));
        });
    }

    fn cores(&mut self, machine: &Machine, node: Option<u32>, nodes: &str) {
        for core in machine.cores.iter().filter(|core| core.node == node) {
            let number = core.cpus.0.first().copied().unwrap_or_default();
            self.object_with_cpus("Core", number, &core.cpus, nodes, |out| {
                for cpu in &core.cpus.0 {
                    out.object_with_cpus("PU", *cpu, &Cpus::from_iter([*cpu]), nodes, |_| ());
                }
            });
        }
    }

    fn roots(&mut self, machine: &Machine, roots: Option<&BTreeMap<Root, Vec<&Function>>>) {
        for (root, below) in roots.into_iter().flatten() {
            let last = below.iter().map(|function| function.address.bus).max().unwrap_or(root.bus);
            let buses = format!("{:04x}:[{:02x}-{last:02x}]", root.domain, root.bus);
            let bridge = format!("bridge_type=\"0-1\" depth=\"0\" bridge_pci=\"{buses}\"");
            self.object("Bridge", &bridge, |out| out.functions(machine, below, 0));
        }
    }

    /// Writes functions that share their first `depth` bridges.
    fn functions(&mut self, machine: &Machine, shared: &[&Function], depth: usize) {
        let mut steps: BTreeMap<Address, Vec<&Function>> = BTreeMap::new();
        for function in shared {
            match function.bridges.get(depth) {
                Some(bridge) => steps.entry(*bridge).or_default().push(*function),
                None => drop(steps.entry(function.address).or_default()),
            }
        }
        for (address, below) in steps {
            let function = machine.function(address);
            let number = |of: fn(&Function) -> u16, default| function.map_or(default, of);
            let class = number(|function| function.class, 0x0604);
            let (vendor, device) =
                (number(|function| function.vendor, 0), number(|function| function.device, 0));
            let pci = format!(
                "pci_busid=\"{address}\" pci_type=\"{class:04x} [{vendor:04x}:{device:04x}] [0000:0000] 00\" \
                 pci_link_speed=\"0.000000\""
            );
            let buses = || below.iter().map(|function| function.address.bus);
            match (buses().min(), buses().max()) {
                (Some(first), Some(last)) => {
                    let buses = format!("{:04x}:[{first:02x}-{last:02x}]", address.domain);
                    let depth_below = depth + 1;
                    let bridge =
                        format!("bridge_type=\"1-1\" depth=\"{depth_below}\" bridge_pci=\"{buses}\"");
                    self.object("Bridge", &format!("{bridge} {pci}"), |out| {
                        out.functions(machine, &below, depth_below);
                        function.into_iter().for_each(|function| out.devices(function));
                    });
                }
                _ => self.object("PCIDev", &pci, |out| {
                    function.into_iter().for_each(|function| out.devices(function));
                }),
            }
        }
    }

    /// Writes a function's RDMA devices and network interfaces: hwloc's types 3 and 2.
    fn devices(&mut self, function: &Function) {
        for (kind, names) in [(3, &function.rdma), (2, &function.net)] {
            for name in names {
                let name = name.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
                self.object("OSDev", &format!("name=\"{name}\" osdev_type=\"{kind}\""), |_| ());
            }
        }
    }
}
