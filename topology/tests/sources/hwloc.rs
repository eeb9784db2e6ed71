//! Through an hwloc XML file, and this host by hwloc.

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
fn hwloc_carries_all_of_a_machine_with_nodes() {
    let mut restricted = super::rich();
    restricted.allowed = "2-47,60,100-110".parse().unwrap();
    for machine in [super::p5(), super::rich(), super::nodeless(), restricted] {
        let read = through_xml(&machine);
        assert_eq!(read, machine);
        assert_eq!(super::groups(&read), super::groups(&machine));
    }
}

/// A node below one host bridge is not carried where another function there has another, or none.
#[test]
fn hwloc_has_one_node_per_host_bridge() {
    let mut machine = super::p5();
    let (one, whole) = (machine.functions[3].address, super::p5());
    machine.functions[3].node = None;
    assert_eq!(through_xml(&machine), whole, "{one}");
    assert_eq!(super::groups(&machine), super::groups(&whole));
}

#[test]
fn hwloc_makes_up_a_node_where_there_is_none() {
    let mut machine = super::nodeless();
    machine.nodes.clear();
    machine.cores.iter_mut().for_each(|core| core.node = None);
    let read = through_xml(&machine);
    assert_eq!(read.nodes, [Node { number: 0, cpus: machine.allowed.clone() }]);
    assert!(read.cores.iter().all(|core| core.node == Some(0)));
    assert_eq!((&read.functions, &read.allowed), (&machine.functions, &machine.allowed));
    // The one node is then everybody's; nothing else differs.
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

/// hwloc puts memory alone into a package with CPUs, whose CPUs it then says are near.
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

/// hwloc does not tell what sysfs says of nodes on a host with one, and has one where sysfs has none;
/// its domains are of 16 bits, and it does not show access control. Interfaces of virtual cards it finds also below other drivers' folders.
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
        println!("skipped: nodes; this kernel knows none");
    } else {
        assert_eq!((by_hwloc.nodes, by_hwloc.cores), (by_sysfs.nodes, by_sysfs.cores));
    }
    assert_eq!(by_hwloc.allowed, by_sysfs.allowed);
}
