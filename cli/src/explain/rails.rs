//! The rail group, the worker's core, and the path between the memory and the cards.

use multirail::BackendGroups;
use topology::p2p::{PeerToPeer, forwards_peers};
use topology::{Cpus, Machine};

use super::super::topo::label;
use super::{Choice, GroupDescription, Memory};

const RAILS: &str = "rails";

/// Whether each rail group is chosen. For a chosen group, also its core and its path.
pub fn choices(
    machine: &Machine,
    groups: &[GroupDescription],
    memory: &Memory<'_>,
    is_here: bool,
) -> Vec<Choice> {
    if groups.is_empty() {
        let why = "no RDMA card: loopback moves bytes within this host";
        return vec![Choice::left(RAILS, "none", why)];
    }
    let mut choices = Vec::new();
    let (taken, left): (Vec<_>, Vec<_>) =
        groups.iter().enumerate().partition(|(_, group)| memory.is_served_by(group));
    for (number, group) in taken {
        choices.push(Choice::taken(RAILS, name(number, group), why(memory, group)));
        choices.push(core(machine, number, group, groups));
        choices.extend(path(machine, group, memory, is_here));
    }
    for (number, group) in left {
        choices.push(Choice::left(RAILS, name(number, group), why_not(machine, group, memory)));
    }
    choices
}

/// The option of the cards of `other`, which are not used if both sides have the preferred backend `first`.
pub fn not_preferred(machine: &Machine, first: &str, other: &BackendGroups) -> Choice {
    let cards = other.groups.iter().flat_map(|group| &group.cards);
    let cards: Vec<String> = cards.map(|card| label::card(machine, *card)).collect();
    let backend = other.backend;
    let why =
        format!("{first} is preferred if both sides have it; use `--backend {backend}` for these cards only");
    Choice::left(RAILS, format!("{backend}: {}", cards.join(" ")), why)
}

fn name(number: usize, group: &GroupDescription) -> String {
    format!("group {number}: {}", group.rails.join(" "))
}

fn why(memory: &Memory<'_>, group: &GroupDescription) -> String {
    let shared = match group.gpus.len() {
        0 | 1 => String::new(),
        others => format!("; {} share the group", label::count(others, "GPU")),
    };
    match (memory, group.distance) {
        (Memory::Gpu(..), Some(distance)) => format!("nearest to the GPU: {distance}{shared}"),
        (Memory::Host(Some(node)), _) => {
            format!(
                "its cards are on NUMA node {node}: the buffer is registered near it (register_near), not on all rails"
            )
        }
        _ => "host memory is registered on all rails, unless register_near names a group".to_owned(),
    }
}

fn why_not(machine: &Machine, group: &GroupDescription, memory: &Memory<'_>) -> String {
    match memory {
        Memory::Gpu(_, gpu) => {
            let cards = group.cards.iter().filter_map(|card| machine.function(*card));
            match cards.map(|card| machine.distance(gpu, card)).min() {
                Some(distance) if group.gpus.is_empty() => {
                    format!("{distance}; the group serves host memory")
                }
                Some(distance) => format!("{distance}; the group is nearer to {}", list(group)),
                None => "its location is unknown".to_owned(),
            }
        }
        Memory::Host(_) => format!("its cards are on {}", label::node(machine, group.node)),
    }
}

fn list(group: &GroupDescription) -> String {
    let gpus: Vec<String> = group.gpus.iter().map(ToString::to_string).collect();
    format!("the GPU at {}", gpus.join(", "))
}

fn core(machine: &Machine, number: usize, group: &GroupDescription, others: &[GroupDescription]) -> Choice {
    const CORE: &str = "worker's core";
    let cores: Cpus = group.cores.iter().copied().collect();
    let Some(core) = group.core else {
        return Choice::left(CORE, "none", "no core is known or requested: the worker runs on any core");
    };
    let mut why = match group.cores.contains(&core) {
        true => format!("one of group {number}'s cores, {cores}"),
        false => "requested, or free of other workers".to_owned(),
    };
    if machine.cores.iter().any(|known| known.cpus.has(core) && known.cpus.has(0)) {
        why.push_str("; CPU 0 is on this core, because no other core is free");
    }
    let sharing = others.iter().filter(|other| other.core == Some(core)).count() - 1;
    if sharing > 0 {
        why.push_str(&format!("; shared with {}", label::count(sharing, "other worker")));
    }
    Choice::taken(CORE, core.to_string(), why)
}

/// Whether the cards can access the GPU's memory peer to peer. Equal paths are listed once.
fn path(machine: &Machine, group: &GroupDescription, memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    const PATH: &str = "peer to peer";
    let Memory::Gpu(_, gpu) = memory else { return Vec::new() };
    let cpuinfo =
        if is_here { std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default() } else { String::new() };
    let forwards = forwards_peers(&cpuinfo);
    let mut paths: Vec<(PeerToPeer, Vec<String>)> = Vec::new();
    for card in group.cards.iter().filter_map(|card| machine.function(*card)) {
        let path = PeerToPeer::between(machine, gpu, card, forwards);
        let name = label::card(machine, card.address);
        match paths.iter_mut().find(|(known, _)| *known == path) {
            Some((_, cards)) => cards.push(name),
            None => paths.push((path, vec![name])),
        }
    }
    let choice = |(path, cards): (PeerToPeer, Vec<String>)| {
        let why = match path.is_possible() || is_here {
            true => path.to_string(),
            false => "above the PCIe switch: depends on the machine's CPU, run the command there".to_owned(),
        };
        Choice { question: PATH, choice: cards.join(" "), taken: path.is_possible(), why }
    };
    paths.into_iter().map(choice).collect()
}
