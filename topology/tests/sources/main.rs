//! Descriptions, sysfs and hwloc give the same machine.

mod broken;
#[cfg(feature = "hwloc")]
mod hwloc;
#[cfg(unix)]
mod p5;

use multirail_topology::{Address, Core, Cpus, Description, Machine, Node, RailGroup, fixture, sysfs};

/// The machine of the built-in description.
fn p5() -> Machine {
    Description::p5().machine().unwrap()
}

/// A p5 with parts that its description lacks: a second hardware thread per core, network interfaces, a card with two
/// RDMA devices, an NVSwitch, and another PCI domain.
fn rich() -> Machine {
    let p5 = p5();
    let (mut functions, mut cores, mut nodes) = (p5.functions, p5.cores, p5.nodes);
    let at = |at: &str| at.parse::<Address>().unwrap();
    let mut switch =
        functions.iter().find(|function| function.address == at("0000:53:00.0")).unwrap().clone();
    switch.address = at("10ab:01:1f.7");
    switch.root = "10ab:00".parse().unwrap();
    switch.bridges = vec![at("10ab:00:02.0")];
    (switch.class, switch.vendor, switch.device) = (0x0680, 0x10de, 0x22a3);
    switch.kind = multirail_topology::Kind::Bridge;
    let mut bridge = switch.clone();
    (bridge.address, bridge.bridges) = (switch.bridges[0], Vec::new());
    bridge.class = 0x0604;
    functions.extend([bridge, switch]);
    for function in &mut functions {
        if function.address == at("0000:4f:00.0") {
            function.rdma.push("rdmap79s1".into());
            function.net = vec!["a<b>&c".into(), "enp79s0".into()];
        }
    }
    let second = |cpus: &Cpus| cpus.0.iter().flat_map(|cpu| [*cpu, cpu + 96]).collect();
    cores.iter_mut().for_each(|core: &mut Core| core.cpus = second(&core.cpus));
    nodes.iter_mut().for_each(|node: &mut Node| node.cpus = second(&node.cpus));
    let mut machine = Machine::new(functions, nodes, cores, p5.allowed);
    machine.allowed = machine.cores.iter().flat_map(|core| core.cpus.0.iter().copied()).collect();
    machine
}

/// A p5 whose firmware does not tell the node of any function.
fn nodeless() -> Machine {
    let mut machine = p5();
    machine.functions.iter_mut().for_each(|function| function.node = None);
    machine
}

fn groups(machine: &Machine) -> Vec<RailGroup> {
    let groups = multirail_topology::rail_groups(machine);
    assert_eq!(groups.len(), 8);
    groups
}

#[test]
fn sysfs_keeps_all_of_a_machine() {
    for machine in [p5(), rich(), nodeless()] {
        let folder = tempfile::tempdir().unwrap();
        fixture::write_sysfs(&machine, folder.path()).unwrap();
        let read = sysfs::read(folder.path()).unwrap();
        assert_eq!(read, machine);
        assert_eq!(groups(&read), groups(&machine));
    }
}

#[test]
fn an_empty_folder_is_a_machine_without_anything() {
    let folder = tempfile::tempdir().unwrap();
    let read = sysfs::read(folder.path()).unwrap();
    assert!(read.functions.is_empty() && read.nodes.is_empty() && read.cores.is_empty());
    assert!(multirail_topology::rail_groups(&read).is_empty());
}
