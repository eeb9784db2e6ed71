//! Which cards, which core, and the way between the memory and the cards.

use multirail::BackendGroups;
use topology::p2p::{PeerToPeer, forwards_peers};
use topology::{Cpus, Machine};

use super::super::topo::label;
use super::{Choice, Group, Memory};

const RAILS: &str = "rails";

/// For each group whether it is taken; of those taken, the core and the way.
pub fn choices(machine: &Machine, groups: &[Group], memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    if groups.is_empty() {
        let why = "there is no RDMA card: bytes move within one host, by loopback";
        return vec![Choice::left(RAILS, "none", why)];
    }
    let mut choices = Vec::new();
    let (taken, left): (Vec<_>, Vec<_>) =
        groups.iter().enumerate().partition(|(_, group)| memory.is_served_by(group));
    for (number, group) in taken {
        choices.push(Choice::taken(RAILS, name(number, group), why(memory, group)));
        choices.push(core(machine, number, group, groups));
        choices.extend(way(machine, group, memory, is_here));
    }
    for (number, group) in left {
        choices.push(Choice::left(RAILS, name(number, group), why_not(machine, group, memory)));
    }
    choices
}

/// That the cards of `other` carry nothing where both sides have `first`, which is preferred.
pub fn behind(machine: &Machine, first: &str, other: &BackendGroups) -> Choice {
    let cards = other.groups.iter().flat_map(|group| &group.cards);
    let cards: Vec<String> = cards.map(|card| label::card(machine, *card)).collect();
    let backend = other.backend;
    let why = format!(
        "{first} comes before it where both sides have it: `--backend {backend}` asks for these cards alone"
    );
    Choice::left(RAILS, format!("{backend}: {}", cards.join(" ")), why)
}

fn name(number: usize, group: &Group) -> String {
    format!("group {number}: {}", group.rails.join(" "))
}

fn why(memory: &Memory<'_>, group: &Group) -> String {
    let shared = match group.gpus.len() {
        0 | 1 => String::new(),
        others => format!("; {} share it", label::count(others, "GPU")),
    };
    match (memory, group.distance) {
        (Memory::Gpu(..), Some(distance)) => format!("nearest: {distance}{shared}"),
        (Memory::Host(Some(node)), _) => {
            format!("its cards are on NUMA node {node}: registered near it (register_near), not on all rails")
        }
        _ => "host memory is registered on all rails, unless near one group".to_owned(),
    }
}

fn why_not(machine: &Machine, group: &Group, memory: &Memory<'_>) -> String {
    match memory {
        Memory::Gpu(_, gpu) => {
            let cards = group.cards.iter().filter_map(|card| machine.function(*card));
            match cards.map(|card| machine.distance(gpu, card)).min() {
                Some(distance) if group.gpus.is_empty() => format!("{distance}; it serves host memory"),
                Some(distance) => format!("{distance}; it is nearer to {}", list(group)),
                None => "nothing is known of its place".to_owned(),
            }
        }
        Memory::Host(_) => format!("its cards are on {}", label::node(machine, group.node)),
    }
}

fn list(group: &Group) -> String {
    let gpus: Vec<String> = group.gpus.iter().map(ToString::to_string).collect();
    format!("the GPU at {}", gpus.join(", "))
}

fn core(machine: &Machine, number: usize, group: &Group, others: &[Group]) -> Choice {
    const CORE: &str = "worker's core";
    let cores: Cpus = group.cores.iter().copied().collect();
    let Some(core) = group.core else {
        return Choice::left(CORE, "none", "no core is known or asked for: the worker runs anywhere");
    };
    let mut why = match group.cores.contains(&core) {
        true => format!("of group {number}'s share of the cores, {cores}"),
        false => "asked for, or what is left beside other workers".to_owned(),
    };
    if machine.cores.iter().any(|known| known.cpus.has(core) && known.cpus.has(0)) {
        why.push_str("; CPU 0 is there too, for want of others");
    }
    let sharing = others.iter().filter(|other| other.core == Some(core)).count() - 1;
    if sharing > 0 {
        why.push_str(&format!("; with {}", label::count(sharing, "other worker")));
    }
    Choice::taken(CORE, core.to_string(), why)
}

/// Whether the cards reach a GPU's memory past the processor's, each way once.
fn way(machine: &Machine, group: &Group, memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    const WAY: &str = "peer to peer";
    let Memory::Gpu(_, gpu) = memory else { return Vec::new() };
    let cpuinfo =
        if is_here { std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default() } else { String::new() };
    let forwards = forwards_peers(&cpuinfo);
    let mut ways: Vec<(PeerToPeer, Vec<String>)> = Vec::new();
    for card in group.cards.iter().filter_map(|card| machine.function(*card)) {
        let way = PeerToPeer::between(machine, gpu, card, forwards);
        let name = label::card(machine, card.address);
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, cards)) => cards.push(name),
            None => ways.push((way, vec![name])),
        }
    }
    let choice = |(way, cards): (PeerToPeer, Vec<String>)| {
        let why = match way.is_possible() || is_here {
            true => way.to_string(),
            false => "past the switch: depends on the machine's processor, ask there".to_owned(),
        };
        Choice { question: WAY, choice: cards.join(" "), taken: way.is_possible(), why }
    };
    ways.into_iter().map(choice).collect()
}
