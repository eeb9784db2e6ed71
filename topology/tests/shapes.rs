//! Rail groups on hosts of many shapes, each written as a description.

use std::collections::BTreeSet;

use multirail_topology::{
    Address, DescribedFunction, DescribedNode, Description, Distance, Machine, RailGroup, rail_groups,
    rail_groups_of,
};

/// The distance of two functions at different ports of one switch.
const BESIDE: Distance = Distance::Switch(2);

/// A host with two NUMA nodes of `cores_per_node` cores. Each core has two threads.
fn host(cores_per_node: u32) -> Description {
    let node = |number: u32| DescribedNode {
        number,
        cores: format!("{}-{}", number * cores_per_node, (number + 1) * cores_per_node - 1),
        sibling: Some(2 * cores_per_node),
    };
    Description { name: "a test's".into(), nodes: vec![node(0), node(1)], functions: Vec::new() }
}

fn put(host: &mut Description, path: String, class: &str, id: &str, node: Option<u32>) {
    host.functions.push(DescribedFunction { path, class: class.into(), id: id.into(), node, rdma: None });
}

fn put_gpu(host: &mut Description, path: String, node: Option<u32>) {
    put(host, path, "0302", "10de:2330", node);
}

fn put_card(host: &mut Description, path: String, node: Option<u32>) {
    put(host, path, "0207", "15b3:1021", node);
}

/// The groups of all cards, after [`check`].
fn groups(machine: &Machine) -> Vec<RailGroup> {
    check(machine, rail_groups(machine))
}

/// Checks what holds on every host: each GPU is in one group, each card is in one group, and workers share no core if
/// there are enough cores.
fn check(machine: &Machine, groups: Vec<RailGroup>) -> Vec<RailGroup> {
    let gpus: Vec<Address> = groups.iter().flat_map(|group| group.gpus.iter().copied()).collect();
    let all: BTreeSet<Address> =
        machine.of_kind(multirail_topology::Kind::Gpu).map(|gpu| gpu.address).collect();
    if !groups.is_empty() {
        assert_eq!((gpus.len(), gpus.into_iter().collect()), (all.len(), all), "every GPU, once");
    }
    let cards: Vec<Address> = groups.iter().flat_map(|group| group.cards.iter().copied()).collect();
    assert_eq!(cards.iter().collect::<BTreeSet<_>>().len(), cards.len(), "a card in two groups");
    assert!(groups.iter().all(|group| !group.cards.is_empty()), "a group without a card");
    let cores: Vec<u32> = groups.iter().filter_map(|group| group.core).collect();
    let physical: BTreeSet<usize> =
        cores.iter().filter_map(|cpu| machine.cores.iter().position(|core| core.cpus.has(*cpu))).collect();
    if groups.len() <= machine.cores.len() {
        assert_eq!((cores.len(), physical.len()), (groups.len(), groups.len()), "two workers on one core");
    }
    assert!(cores.iter().all(|cpu| machine.allowed.has(*cpu)), "a core that is not allowed");
    if groups.len() < machine.cores.len() {
        let first = machine.cores.iter().position(|core| core.cpus.has(0));
        assert!(first.is_none_or(|first| !physical.contains(&first)), "a worker on the core of CPU 0");
    }
    // No card is idle while a GPU that is as near to it shares other cards.
    let at = |address: &Address| machine.function(*address).unwrap();
    for idle in groups.iter().filter(|group| group.gpus.is_empty()).flat_map(|group| &group.cards) {
        for shared in groups.iter().filter(|group| group.gpus.len() > group.cards.len()) {
            for gpu in &shared.gpus {
                let used = shared.cards.iter().map(|card| machine.distance(at(gpu), at(card))).max().unwrap();
                assert!(machine.distance(at(gpu), at(idle)) > used, "{idle} is idle, {gpu} shares");
            }
        }
    }
    groups
}

fn table(groups: &[RailGroup]) -> Vec<(Vec<String>, Vec<String>, Option<u32>)> {
    let text = |addresses: &[Address]| addresses.iter().map(ToString::to_string).collect();
    groups.iter().map(|group| (text(&group.gpus), text(&group.cards), group.core)).collect()
}

fn counts(groups: &[RailGroup]) -> Vec<(usize, usize)> {
    groups.iter().map(|group| (group.gpus.len(), group.cards.len())).collect()
}

/// Eight GPUs on eight switches, each with `cards` cards on the same switch.
fn eight_gpus(cards: usize) -> Machine {
    let mut host = host(32);
    for gpu in 0..8_u8 {
        let (bus, node) = (0x10 + gpu * 0x10, Some(u32::from(gpu / 4)));
        let switch = format!("0000:{bus:02x}/{bus:02x}:01.0/{:02x}:00.0", bus + 1);
        put_gpu(&mut host, format!("{switch}/{:02x}:00.0/{:02x}:00.0", bus + 2, bus + 3), node);
        for card in 1..=cards as u8 {
            put_card(
                &mut host,
                format!("{switch}/{:02x}:0{card}.0/{:02x}:00.0", bus + 2, bus + 3 + card),
                node,
            );
        }
    }
    host.machine().unwrap()
}

#[test]
fn p5_has_the_eight_groups_of_its_switches() {
    let machine = Description::p5().machine().unwrap();
    let groups = groups(&machine);
    let gpus = [0x53, 0x64, 0x75, 0x86, 0x97, 0xa8, 0xb9, 0xca_u8];
    assert_eq!(groups.len(), 8);
    for (number, (group, gpu)) in groups.iter().zip(gpus).enumerate() {
        let bus = |address: &Address| address.bus;
        assert_eq!(group.gpus.iter().map(bus).collect::<Vec<_>>(), [gpu]);
        assert_eq!(group.cards.iter().map(bus).collect::<Vec<_>>(), [gpu - 4, gpu - 3, gpu - 2, gpu - 1]);
        assert_eq!(group.node, Some(number as u32 / 4));
        assert_eq!(group.distance, Some(BESIDE));
        let first = 12 * number as u32;
        assert_eq!(group.cores, (first..first + 12).collect::<Vec<_>>());
        assert_eq!(group.core, Some(first.max(1)));
    }
    assert_eq!(machine.card("rdmap79s0").unwrap().address.to_string(), "0000:4f:00.0");
}

#[test]
fn sixteen_cards_are_two_for_each_of_eight_gpus() {
    let groups = groups(&eight_gpus(2));
    assert_eq!(counts(&groups), [(1, 2); 8]);
    assert!(groups.iter().all(|group| group.distance == Some(BESIDE)));
    assert_eq!(groups[5].cores.len(), 8);
}

#[test]
fn eight_cards_are_one_for_each_of_eight_gpus() {
    assert_eq!(counts(&groups(&eight_gpus(1))), [(1, 1); 8]);
}

/// Each of two PCI domains has four GPUs, and two cards of two ports. No card is behind a GPU's switch.
#[test]
fn ports_of_other_switches_are_divided_evenly() {
    let mut host = host(16);
    for domain in 0..2_u8 {
        let node = Some(u32::from(domain));
        for gpu in 0..4_u8 {
            let bus = 0x10 + gpu * 8;
            put_gpu(
                &mut host,
                format!(
                    "{domain:04x}:00/00:{gpu:02x}.0/{bus:02x}:00.0/{:02x}:00.0/{:02x}:00.0",
                    bus + 1,
                    bus + 2
                ),
                node,
            );
        }
        for card in 0..2_u8 {
            for port in 0..2 {
                put_card(
                    &mut host,
                    format!("{domain:04x}:00/00:1{card}.0/{:02x}:00.{port}", 0x80 + card),
                    node,
                );
            }
        }
    }
    let groups = groups(&host.machine().unwrap());
    let expected = |gpu: &str, card: &str, core| (vec![gpu.to_owned()], vec![card.to_owned()], Some(core));
    assert_eq!(
        table(&groups),
        [
            expected("0000:12:00.0", "0000:80:00.0", 1),
            expected("0000:1a:00.0", "0000:80:00.1", 4),
            expected("0000:22:00.0", "0000:81:00.0", 8),
            expected("0000:2a:00.0", "0000:81:00.1", 12),
            expected("0001:12:00.0", "0001:80:00.0", 16),
            expected("0001:1a:00.0", "0001:80:00.1", 20),
            expected("0001:22:00.0", "0001:81:00.0", 24),
            expected("0001:2a:00.0", "0001:81:00.1", 28),
        ]
    );
    assert!(groups.iter().all(|group| group.distance == Some(Distance::Root)));
}

/// A container sees two cards of GPU 0, and one card of each of the GPUs 1, 4 and 6.
#[test]
fn five_cards_of_a_p5_serve_all_of_its_gpus() {
    let machine = Description::p5().machine().unwrap();
    let cards = ["0000:4f:00.0", "0000:50:00.0", "0000:60:00.0", "0000:93:00.0", "0000:b5:00.0"];
    let cards: Vec<Address> = cards.iter().map(|card| card.parse().unwrap()).collect();
    let groups = check(&machine, rail_groups_of(&machine, &cards));
    let text = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        table(&groups),
        [
            (
                text(&["0000:53:00.0", "0000:75:00.0", "0000:86:00.0"]),
                text(&["0000:4f:00.0", "0000:50:00.0"]),
                Some(1)
            ),
            (text(&["0000:64:00.0"]), text(&["0000:60:00.0"]), Some(24)),
            (text(&["0000:97:00.0", "0000:a8:00.0"]), text(&["0000:93:00.0"]), Some(48)),
            (text(&["0000:b9:00.0", "0000:ca:00.0"]), text(&["0000:b5:00.0"]), Some(72)),
        ]
    );
    assert_eq!(groups[0].distance, Some(Distance::Node));
    assert_eq!(groups[1].distance, Some(BESIDE));
}

#[test]
fn a_laptop_without_cards_has_no_groups() {
    let mut host = host(4);
    put(&mut host, "0000:00/00:02.0".into(), "0300", "8086:46a6", None);
    put(&mut host, "0000:00/00:1d.0/01:00.0".into(), "0108", "144d:a80a", None);
    assert_eq!(groups(&host.machine().unwrap()), []);
    let bare = Machine::new(Vec::new(), Vec::new(), Vec::new(), multirail_topology::Cpus::default());
    assert_eq!(groups(&bare), []);
}

/// The firmware tells no node, as in many virtual machines. All cards are equally near, and are divided evenly.
#[test]
fn without_numa_nodes_cards_are_divided_evenly() {
    let mut host = host(8);
    for gpu in 0..4_u8 {
        put_gpu(&mut host, format!("0000:00/00:{:02x}.0", 0x04 + gpu), None);
        put_card(&mut host, format!("0000:00/00:{:02x}.0", 0x10 + gpu), None);
    }
    let flat = groups(&host.machine().unwrap());
    assert_eq!(counts(&flat), [(1, 1); 4]);
    assert!(flat.iter().all(|group| group.node.is_none() && group.distance == Some(Distance::Root)));
    assert_eq!(flat.iter().map(|group| group.core.unwrap()).collect::<Vec<_>>(), [1, 4, 8, 12]);

    let mut described = Description::p5();
    described.functions.iter_mut().for_each(|function| function.node = None);
    let p5 = groups(&described.machine().unwrap());
    assert_eq!(counts(&p5), [(1, 4); 8]);
    assert!(p5.iter().all(|group| group.distance == Some(BESIDE)));
    assert_eq!(p5[7].cores, (84..96).collect::<Vec<_>>());
}

#[test]
fn a_gpu_gets_the_near_card_and_host_memory_the_other() {
    let mut host = host(4);
    put_gpu(&mut host, "0000:10/10:00.0/11:00.0/12:00.0/13:00.0".into(), Some(0));
    put_card(&mut host, "0000:10/10:00.0/11:00.0/12:01.0/14:00.0".into(), Some(0));
    put_card(&mut host, "0000:80/80:00.0/81:00.0".into(), Some(1));
    let groups = groups(&host.machine().unwrap());
    assert_eq!(counts(&groups), [(1, 1), (0, 1)]);
    assert_eq!((groups[0].node, groups[1].node), (Some(0), Some(1)));
    assert_eq!((groups[0].distance, groups[1].distance), (Some(BESIDE), None));
    assert_eq!((groups[0].core, groups[1].core), (Some(1), Some(4)));
}

#[test]
fn a_gpu_gets_a_far_card_if_there_is_no_other() {
    let mut host = host(4);
    put_gpu(&mut host, "0000:10/10:00.0/11:00.0".into(), Some(0));
    put_card(&mut host, "0000:80/80:00.0/81:00.0".into(), Some(1));
    let groups = groups(&host.machine().unwrap());
    assert_eq!(counts(&groups), [(1, 1)]);
    assert_eq!((groups[0].distance, groups[0].node), (Some(Distance::Machine), Some(1)));
}

#[test]
fn cards_without_a_gpu_are_grouped_by_node() {
    let mut host = host(4);
    for (bus, node) in [(0x10, 0), (0x20, 0), (0x80, 1)] {
        put_card(&mut host, format!("0000:{bus:02x}/{bus:02x}:00.0/{:02x}:00.0", bus + 1), Some(node));
    }
    let groups = groups(&host.machine().unwrap());
    assert_eq!(counts(&groups), [(0, 2), (0, 1)]);
}

#[test]
fn workers_run_on_allowed_cpus() {
    let mut machine = eight_gpus(1);
    machine.allowed = "72,73,40".parse().unwrap();
    let groups = rail_groups(&machine);
    let cores: Vec<u32> = groups.iter().map(|group| group.core.unwrap()).collect();
    assert_eq!(cores, [72, 73, 73, 72, 40, 40, 40, 40]);
    // Only the second thread of core 0 is allowed, but it is still core 0.
    machine.allowed = "1-127".parse().unwrap();
    assert_eq!(check(&machine, rail_groups(&machine))[0].core, Some(1));
    // No core of node 1 is allowed: its groups use the cores of node 0.
    machine.allowed = "0-3".parse().unwrap();
    let groups = rail_groups(&machine);
    assert!(groups.iter().all(|group| group.core.is_some_and(|core| core < 4)));
}

proptest::proptest! {
    /// Any tree with two host bridges per node, and GPUs and cards anywhere in it.
    #[test]
    fn every_shape_passes_the_checks(places in proptest::collection::vec((0..2_u32, 0..2_u8, 0..3_u8, proptest::bool::ANY), 1..24)) {
        let mut host = host(16);
        for (number, (node, root, switch, is_gpu)) in places.into_iter().enumerate() {
            let bus = 0x10 + (node as u8 * 2 + root) * 0x30;
            let leaf = bus + 4 + number as u8;
            let path = match switch {
                0 => format!("0000:{bus:02x}/{bus:02x}:1{:x}.{}/{leaf:02x}:00.0", number % 8, number / 8),
                _ => format!("0000:{bus:02x}/{bus:02x}:0{switch}.0/{:02x}:00.0/{leaf:02x}:00.0", bus + switch),
            };
            if is_gpu { put_gpu(&mut host, path, Some(node)) } else { put_card(&mut host, path, Some(node)) }
        }
        groups(&host.machine().unwrap());
    }
}
