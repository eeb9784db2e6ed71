//! Which cards serve which GPU.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::cores::share_cores;
use crate::{Address, Distance, Function, Kind, Machine, Root};

/// Cards that one worker drives, and whom they serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RailGroup {
    /// The GPUs whose nearest cards these are; none where the cards serve host memory alone.
    pub gpus: Vec<Address>,
    /// At least one.
    pub cards: Vec<Address>,
    /// The NUMA node of the cards, else of the GPUs.
    pub node: Option<u32>,
    /// From a GPU to a card of the group, at the farthest.
    pub distance: Option<Distance>,
    /// The group's share of the physical cores near it: each core's first CPU that is allowed.
    pub cores: Vec<u32>,
    /// The CPU for its worker; `None` where no CPU is known.
    pub core: Option<u32>,
}

impl RailGroup {
    fn new(gpus: Vec<Address>, cards: Vec<Address>) -> Self {
        Self { gpus, cards, node: None, distance: None, cores: Vec::new(), core: None }
    }

    /// GPUs per card, in hundredths, if there were one GPU more.
    fn load_with_another(&self) -> usize {
        (self.gpus.len() + 1) * 100 / self.cards.len()
    }
}

/// The groups of all cards of a machine, whichever backend drives them; none where there is no card.
/// A fabric makes groups of each backend's cards apart: [`rail_groups_of`].
pub fn rail_groups(machine: &Machine) -> Vec<RailGroup> {
    let cards: Vec<Address> = machine.of_kind(Kind::Nic).map(|card| card.address).collect();
    rail_groups_of(machine, &cards)
}

/// The groups of those cards, for all GPUs of the machine. A virtual function beside its physical one
/// counts with that.
pub fn rail_groups_of(machine: &Machine, cards: &[Address]) -> Vec<RailGroup> {
    let is_whole = |gpu: &&Function| gpu.physical.is_none_or(|whole| machine.function(whole).is_none());
    let gpus: Vec<Address> = machine.of_kind(Kind::Gpu).filter(is_whole).map(|gpu| gpu.address).collect();
    rail_groups_for(machine, &gpus, cards)
}

/// The groups of those cards, for those GPUs.
///
/// Every GPU gets the nearest cards, level by level: those behind its switch, else of its host
/// bridge, its NUMA node, the machine. Where several GPUs come to the same cards, these are dealt
/// out evenly, and where there are fewer cards than GPUs, a card's GPUs share it. Cards that are
/// nearest to no GPU serve host memory, a group per NUMA node.
///
/// Groups come in the order of their first GPUs, those without one last. What is no function of
/// the machine is left out.
pub fn rail_groups_for(machine: &Machine, gpus: &[Address], cards: &[Address]) -> Vec<RailGroup> {
    let placed = |addresses: &[Address]| {
        let known: BTreeSet<Address> = addresses.iter().copied().collect();
        let known = known.into_iter().filter_map(|at| machine.function(at));
        known.map(|function| Placed { address: function.address, path: path(machine, function) }).collect()
    };
    let mut settled = Settled::at(0, placed(gpus), placed(cards));
    let node = |address: Address| machine.function(address).and_then(|function| machine.node_of(function));
    let mut rest: BTreeMap<Option<u32>, Vec<Address>> = BTreeMap::new();
    for card in settled.cards.drain(..) {
        rest.entry(node(card.address)).or_default().push(card.address);
    }
    let mut groups = settled.groups;
    groups.sort_by_key(|group| group.gpus.iter().min().copied());
    groups.extend(rest.into_values().map(|cards| RailGroup::new(Vec::new(), cards)));
    for group in &mut groups {
        group.gpus.sort();
        group.cards.sort();
        group.node = group.cards.iter().chain(&group.gpus).find_map(|at| node(*at));
        let pairs = group.gpus.iter().flat_map(|gpu| group.cards.iter().map(move |card| (gpu, card)));
        let distance = |(gpu, card): (&Address, &Address)| {
            Some(machine.distance(machine.function(*gpu)?, machine.function(*card)?))
        };
        group.distance = pairs.filter_map(distance).max();
    }
    share_cores(machine, &mut groups);
    groups
}

/// A step from the machine towards a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Node(u32),
    Root(Root),
    Bridge(Address),
}

fn path(machine: &Machine, function: &Function) -> Vec<Step> {
    let node = machine.node_of(function).map(Step::Node);
    let bridges = function.bridges.iter().copied().map(Step::Bridge);
    node.into_iter().chain([Step::Root(function.root)]).chain(bridges).collect()
}

struct Placed {
    address: Address,
    path: Vec<Step>,
}

/// A part of the machine, from which GPUs and cards may be left over for the whole.
#[derive(Default)]
struct Settled {
    groups: Vec<RailGroup>,
    gpus: Vec<Placed>,
    cards: Vec<Placed>,
}

impl Settled {
    /// What lies `depth` steps down one path: first each part of it by itself, then what is left.
    fn at(depth: usize, gpus: Vec<Placed>, cards: Vec<Placed>) -> Self {
        let mut parts: BTreeMap<Option<Step>, (Vec<Placed>, Vec<Placed>)> = BTreeMap::new();
        for gpu in gpus {
            parts.entry(gpu.path.get(depth).copied()).or_default().0.push(gpu);
        }
        for card in cards {
            parts.entry(card.path.get(depth).copied()).or_default().1.push(card);
        }
        let mut whole = Self::default();
        for (step, (gpus, cards)) in parts {
            let part = match step {
                Some(_) => Self::at(depth + 1, gpus, cards),
                None => Self { groups: Vec::new(), gpus, cards },
            };
            whole.groups.extend(part.groups);
            whole.gpus.extend(part.gpus);
            whole.cards.extend(part.cards);
        }
        whole.meet();
        whole
    }

    /// The GPUs left over take the cards left over, or else join others' groups.
    fn meet(&mut self) {
        if self.gpus.is_empty() || (self.cards.is_empty() && self.groups.is_empty()) {
            return;
        }
        let by_address = |placed: &mut Vec<Placed>| {
            let mut addresses: Vec<Address> = placed.drain(..).map(|placed| placed.address).collect();
            addresses.sort();
            addresses
        };
        let (gpus, cards) = (by_address(&mut self.gpus), by_address(&mut self.cards));
        let count = gpus.len().min(cards.len());
        let (first, others) = gpus.split_at(count);
        for (turn, gpu) in first.iter().enumerate() {
            let mine = turn * cards.len() / count..(turn + 1) * cards.len() / count;
            self.groups.push(RailGroup::new(vec![*gpu], cards[mine].to_vec()));
        }
        for gpu in others {
            if let Some(group) = self.groups.iter_mut().min_by_key(|group| group.load_with_another()) {
                group.gpus.push(*gpu);
            }
        }
    }
}
