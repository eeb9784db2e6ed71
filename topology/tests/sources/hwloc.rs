//! A machine that is written to an hwloc XML file, and read from it; and this host by hwloc.

use multirail_topology::{Core, Cpus, Function, Machine, Node, fixture, hwloc, sysfs};

fn from_xml(text: &str) -> Machine {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machine.xml");
    std::fs::write(&path, text).unwrap();
    hwloc::read(&path).unwrap()
}

fn through_xml(machine: &Machine) -> Machine {
    from_xml(&fixture::hwloc_xml(machine))
}

#[test]
fn hwloc_keeps_all_of_a_machine_with_nodes() {
    let mut restricted = super::rich();
    restricted.allowed = "2-47,60,100-110".parse().unwrap();
    for machine in [super::p5(), super::rich(), super::nodeless(), restricted] {
        let read = through_xml(&machine);
        assert_eq!(read, machine);
        assert_eq!(super::groups(&read), super::groups(&machine));
    }
}

/// All functions below a host bridge get the same node, even if their nodes differ in sysfs.
#[test]
fn hwloc_has_one_node_per_host_bridge() {
    let mut machine = super::p5();
    let (one, whole) = (machine.functions[3].address, super::p5());
    machine.functions[3].node = None;
    assert_eq!(through_xml(&machine), whole, "{one}");
    assert_eq!(super::groups(&machine), super::groups(&whole));
}

#[test]
fn hwloc_adds_a_node_to_a_machine_without_nodes() {
    let mut machine = super::nodeless();
    machine.nodes.clear();
    machine.cores.iter_mut().for_each(|core| core.node = None);
    let read = through_xml(&machine);
    assert_eq!(read.nodes, [Node { number: 0, cpus: machine.allowed.clone() }]);
    assert!(read.cores.iter().all(|core| core.node == Some(0)));
    assert_eq!((&read.functions, &read.allowed), (&machine.functions, &machine.allowed));
    // All groups get this one node. Nothing else differs.
    let mut groups = super::groups(&machine);
    groups.iter_mut().for_each(|group| group.node = Some(0));
    assert_eq!(super::groups(&read), groups);
}

#[test]
fn memory_alone_has_no_cpus() {
    let mut machine = super::p5();
    machine.nodes.extend([2, 3].map(|number| Node { number, cpus: Cpus::default() }));
    assert_eq!(through_xml(&machine), machine);
}

/// hwloc puts a node of memory alone into a package with CPUs, and then lists these CPUs with the node.
#[test]
fn memory_next_to_cpus_has_none_either() {
    let mut machine = super::p5();
    let text = fixture::hwloc_xml(&machine)
        .replace("nodeset=\"0x00000003\"", "nodeset=\"0x00000007\"")
        .replace("nodeset=\"0x00000001\"", "nodeset=\"0x00000005\"");
    let at = text.find("<object type=\"NUMANode\"").unwrap();
    let (before, (tag, after)) = (&text[..at], text[at..].split_once('>').unwrap());
    let first = tag.replace("nodeset=\"0x00000005\"", "nodeset=\"0x00000001\"");
    let second = tag.replace("nodeset=\"0x00000005\"", "nodeset=\"0x00000004\"").replace(
        "<object type=\"NUMANode\" gp_index=\"3\" os_index=\"0\"",
        "<object type=\"NUMANode\" gp_index=\"9999\" os_index=\"2\"",
    );
    let read = from_xml(&format!("{before}{first}/>{second}>{after}"));
    machine.nodes.push(Node { number: 2, cpus: Cpus::default() });
    assert_eq!(read, machine);
}

/// The known differences between the two sources are left out. On a host with one node, hwloc does not tell a
/// function's node. If sysfs has no node, hwloc has one. hwloc's PCI domains have 16 bits, and it does not tell ACS. It
/// also finds network interfaces below other drivers' folders.
#[test]
#[cfg(target_os = "linux")]
fn this_host_is_the_same_to_both() {
    let (by_sysfs, by_hwloc) = (sysfs::this_host().unwrap(), hwloc::this_host().unwrap());
    let few = by_sysfs.nodes.iter().filter(|node| !node.cpus.0.is_empty()).count() < 2;
    let shared = |function: &Function| {
        let mut function = function.clone();
        function.node = function.node.filter(|_| !few);
        function.net.clear();
        function.redirects = None;
        function
    };
    let plain = |machine: &Machine| -> Vec<Function> {
        machine.functions.iter().filter(|function| function.address.domain <= 0xffff).map(shared).collect()
    };
    assert_eq!(plain(&by_hwloc), plain(&by_sysfs));
    for function in &by_sysfs.functions {
        let known = by_hwloc.function(function.address).map_or(&[][..], |function| &function.net);
        assert!(function.net.iter().all(|name| known.contains(name)), "{known:?}, {function:?}");
    }
    let cpus = |cores: &[Core]| cores.iter().map(|core| core.cpus.clone()).collect::<Vec<Cpus>>();
    assert_eq!(cpus(&by_hwloc.cores), cpus(&by_sysfs.cores));
    if by_sysfs.nodes.is_empty() {
        println!("skipped: the comparison of nodes, because this kernel knows none");
    } else {
        assert_eq!((by_hwloc.nodes, by_hwloc.cores), (by_sysfs.nodes, by_sysfs.cores));
    }
    assert_eq!(by_hwloc.allowed, by_sysfs.allowed);
}
