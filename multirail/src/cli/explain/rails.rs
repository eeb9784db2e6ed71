//! Which cards, which core, and the way between the memory and the cards.

use topology::p2p::{PeerToPeer, forwards_peers};
use topology::{Cpus, Machine, RailGroup};

use super::super::topo::label;
use super::{Choice, Memory};

const RAILS: &str = "rails";

/// For each group whether it is taken; of those taken, the core and the way.
pub fn choices(machine: &Machine, groups: &[RailGroup], memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    if groups.is_empty() {
        let why = "there is no RDMA card: bytes move within one host, by loopback";
        return vec![Choice::left(RAILS, "none", why)];
    }
    let mut choices = Vec::new();
    let (taken, left): (Vec<_>, Vec<_>) =
        groups.iter().enumerate().partition(|(_, group)| memory.is_served_by(group));
    for (number, group) in taken {
        choices.push(Choice::taken(RAILS, name(machine, number, group), why(memory, group)));
        choices.push(core(number, group));
        choices.extend(way(machine, group, memory, is_here));
    }
    for (number, group) in left {
        choices.push(Choice::left(RAILS, name(machine, number, group), why_not(machine, group, memory)));
    }
    choices
}

fn name(machine: &Machine, number: usize, group: &RailGroup) -> String {
    let cards: Vec<String> = group.cards.iter().map(|card| label::card(machine, *card)).collect();
    format!("group {number}: {}", cards.join(" "))
}

fn why(memory: &Memory<'_>, group: &RailGroup) -> String {
    let shared = match group.gpus.len() {
        0 | 1 => String::new(),
        others => format!("; {} share it", label::count(others, "GPU")),
    };
    match (memory, group.distance) {
        (Memory::Gpu(..), Some(distance)) => format!("nearest: {distance}{shared}"),
        (Memory::Host(Some(node)), _) => format!("its cards are on NUMA node {node}"),
        _ => "host memory is near to all cards unless --numa says where it lies".to_owned(),
    }
}

fn why_not(machine: &Machine, group: &RailGroup, memory: &Memory<'_>) -> String {
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

fn list(group: &RailGroup) -> String {
    let gpus: Vec<String> = group.gpus.iter().map(ToString::to_string).collect();
    format!("the GPU at {}", gpus.join(", "))
}

fn core(number: usize, group: &RailGroup) -> Choice {
    const CORE: &str = "worker's core";
    let cores: Cpus = group.cores.iter().copied().collect();
    match group.core {
        Some(core) if group.cores.contains(&core) => {
            let why = format!("of group {number}'s share {cores}: not CPU 0, and no other worker's");
            Choice::taken(CORE, core.to_string(), why)
        }
        Some(core) => {
            let why =
                format!("group {number}'s share {cores} has none left that is not CPU 0 or another worker's");
            Choice::taken(CORE, core.to_string(), why)
        }
        None => Choice::left(CORE, "none", "no core is known: the worker runs anywhere"),
    }
}

/// Whether the cards reach a GPU's memory past the processor's, each way once.
fn way(machine: &Machine, group: &RailGroup, memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
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
    let choice = |(way, cards): (PeerToPeer, Vec<String>)| Choice {
        question: WAY,
        choice: cards.join(" "),
        taken: way.is_possible(),
        why: way.to_string(),
    };
    ways.into_iter().map(choice).collect()
}
