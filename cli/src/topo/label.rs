//! What things are called on the screen and in the picture.

use topology::{Address, Cpus, Distance, Function, Machine};

use super::super::failure::printable;

/// A card by its RDMA devices, else by its address.
pub fn card(machine: &Machine, address: Address) -> String {
    match machine.function(address).map(devices) {
        Some(devices) if !devices.is_empty() => devices,
        _ => address.to_string(),
    }
}

/// The RDMA devices of a function; empty if it has none.
pub fn devices(function: &Function) -> String {
    printable(&function.rdma.join(", "))
}

/// Who made it, if that is one of the usual.
pub fn maker(function: &Function) -> Option<&'static str> {
    match function.vendor {
        0x1002 => Some("AMD"),
        0x10de => Some("NVIDIA"),
        0x14e4 => Some("Broadcom"),
        0x15b3 => Some("Mellanox"),
        0x1d0f => Some("Amazon"),
        0x8086 => Some("Intel"),
        _ => None,
    }
}

/// A distance in the few words that fit a column or a box.
pub fn distance(distance: Distance) -> &'static str {
    match distance {
        Distance::Card => "same card",
        Distance::Switch(_) => "same PCIe switch",
        Distance::Root => "same host bridge",
        Distance::Node => "same NUMA node",
        Distance::Machine => "across the machine",
    }
}

/// A NUMA node; that it is not told; or that the machine has none.
pub fn node(machine: &Machine, node: Option<u32>) -> String {
    match node {
        Some(number) => format!("NUMA node {number}"),
        None if machine.nodes.is_empty() => "no NUMA node".to_owned(),
        None => "unknown NUMA node".to_owned(),
    }
}

/// CPUs as a list of at most so many characters: some hosts' alternate between the nodes.
pub fn cpus(cpus: &Cpus, most: usize) -> String {
    let list = cpus.to_string();
    if list.len() <= most {
        return list;
    }
    let end = format!(",… ({} of them)", cpus.0.len());
    let room = most.saturating_sub(end.chars().count());
    // The list is ASCII; a number is not cut in two.
    let cut = list.as_bytes().iter().take(room + 1).rposition(|byte| *byte == b',').unwrap_or_default();
    format!("{}{end}", &list[..cut])
}

/// `no GPU`, `1 GPU`, `8 GPUs`.
pub fn count(number: usize, noun: &str) -> String {
    match number {
        0 => format!("no {noun}"),
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// What a machine has, in a line.
pub fn summary(machine: &Machine, groups: usize) -> String {
    use topology::Kind::{Gpu, Nic};
    [
        count(machine.of_kind(Gpu).count(), "GPU"),
        count(machine.of_kind(Nic).count(), "RDMA card"),
        count(groups, "rail group"),
        count(machine.cores.len(), "core"),
        count(machine.nodes.len(), "NUMA node"),
    ]
    .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_between_numbers() {
        let even: Cpus = (0..48).map(|n| n * 2).collect();
        let text = cpus(&even, 30);
        assert_eq!(text, "0,2,4,6,8,10,12,… (48 of them)");
        assert_eq!(text.chars().count(), 30);
        assert_eq!(cpus(&(0..96).collect(), 30), "0-95");
    }

    #[test]
    fn nothing_and_one_and_more() {
        assert_eq!([0, 1, 2].map(|number| count(number, "GPU")), ["no GPU", "1 GPU", "2 GPUs"]);
    }
}
