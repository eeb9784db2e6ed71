//! Names of devices, distances and nodes for the text output and the picture.

use topology::{Address, Cpus, Distance, Function, Machine};

use super::super::failure::printable;

/// The name of a card: its RDMA devices, or its address.
pub fn card(machine: &Machine, address: Address) -> String {
    match machine.function(address).map(devices) {
        Some(devices) if !devices.is_empty() => devices,
        _ => address.to_string(),
    }
}

/// The names of a function's RDMA devices, or an empty text.
pub fn devices(function: &Function) -> String {
    printable(&function.rdma.join(", "))
}

/// The vendor, if it is a known one.
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

/// A short name of a distance, which fits a column or a box.
pub fn distance(distance: Distance) -> &'static str {
    match distance {
        Distance::Card => "same card",
        Distance::Switch(_) => "same PCIe switch",
        Distance::Root => "same host bridge",
        Distance::Node => "same NUMA node",
        Distance::Machine => "across the machine",
    }
}

/// The name of a NUMA node, which may be unknown or missing.
pub fn node(machine: &Machine, node: Option<u32>) -> String {
    match node {
        Some(number) => format!("NUMA node {number}"),
        None if machine.nodes.is_empty() => "no NUMA node".to_owned(),
        None => "unknown NUMA node".to_owned(),
    }
}

/// A list of CPUs in at most `most` characters. The list is long on hosts whose CPU numbers alternate between nodes.
pub fn cpus(cpus: &Cpus, most: usize) -> String {
    let list = cpus.to_string();
    if list.len() <= most {
        return list;
    }
    let end = format!(",… ({} CPUs)", cpus.0.len());
    let room = most.saturating_sub(end.chars().count());
    // The list is ASCII. It is cut between numbers.
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

/// The summary of a machine in one line.
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
        assert_eq!(text, "0,2,4,6,8,10,12,14,… (48 CPUs)");
        assert_eq!(text.chars().count(), 30);
        assert_eq!(cpus(&(0..96).collect(), 30), "0-95");
    }

    #[test]
    fn nothing_and_one_and_more() {
        assert_eq!([0, 1, 2].map(|number| count(number, "GPU")), ["no GPU", "1 GPU", "2 GPUs"]);
    }
}
