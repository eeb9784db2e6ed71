//! Rail groups: which cards serve which GPU, and which core drives them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::{Address, Core, Distance, Function, Kind, Machine, Root};

/// The cards that one worker drives, and the GPUs that they serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RailGroup {
    /// The GPUs whose nearest cards these are. Empty if the cards serve only host memory.
    pub gpus: Vec<Address>,
    /// The cards, at least one.
    pub cards: Vec<Address>,
    /// The NUMA node of the cards; if that is unknown, of the GPUs.
    pub node: Option<u32>,
    /// The largest distance between a GPU and a card of the group.
    pub distance: Option<Distance>,
    /// The group's share of the physical cores near it. Each core is named by its first allowed CPU.
    pub cores: Vec<u32>,
    /// The CPU for the group's worker; `None` if no CPU is known.
    pub core: Option<u32>,
}

impl RailGroup {
    fn new(gpus: Vec<Address>, cards: Vec<Address>) -> Self {
        Self { gpus, cards, node: None, distance: None, cores: Vec::new(), core: None }
    }

    /// GPUs per card in hundredths, if the group had one GPU more.
    fn load_with_another(&self) -> usize {
        (self.gpus.len() + 1) * 100 / self.cards.len()
    }
}

/// The groups of all cards of a machine, whichever backends drive them. A fabric makes the groups of each backend's
/// cards separately, by [`rail_groups_of`].
pub fn rail_groups(machine: &Machine) -> Vec<RailGroup> {
    let cards: Vec<Address> = machine.of_kind(Kind::Nic).map(|card| card.address).collect();
    rail_groups_of(machine, &cards)
}

/// The groups of these cards, for all GPUs of the machine. A virtual function of a GPU is left out if its physical
/// function is in the machine, too.
pub fn rail_groups_of(machine: &Machine, cards: &[Address]) -> Vec<RailGroup> {
    let is_whole = |gpu: &&Function| gpu.physical.is_none_or(|whole| machine.function(whole).is_none());
    let gpus: Vec<Address> = machine.of_kind(Kind::Gpu).filter(is_whole).map(|gpu| gpu.address).collect();
    rail_groups_for(machine, &gpus, cards)
}

/// The groups of these cards, for these GPUs.
///
/// Every GPU gets its nearest cards: those behind its switch; if there are none, those below its host bridge, on its
/// NUMA node, or in the machine. If several GPUs have the same nearest cards, the cards are divided evenly between the
/// GPUs. If there are fewer cards than GPUs, several GPUs share a card. Cards that are nearest to no GPU serve host
/// memory, in one group per NUMA node.
///
/// The groups are in the order of their first GPUs, and groups without a GPU are last. Addresses that are not in the
/// machine are left out.
pub fn rail_groups_for(machine: &Machine, gpus: &[Address], cards: &[Address]) -> Vec<RailGroup> {
    let located = |addresses: &[Address]| {
        let known: BTreeSet<Address> = addresses.iter().copied().collect();
        let known = known.into_iter().filter_map(|at| machine.function(at));
        known.map(|function| Located { address: function.address, path: path(machine, function) }).collect()
    };
    let mut assignment = Assignment::below(0, located(gpus), located(cards));
    let node = |address: Address| machine.function(address).and_then(|function| machine.node_of(function));
    let mut rest: BTreeMap<Option<u32>, Vec<Address>> = BTreeMap::new();
    for card in assignment.cards.drain(..) {
        rest.entry(node(card.address)).or_default().push(card.address);
    }
    let mut groups = assignment.groups;
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

/// The CPU for a worker near `node`. `share` is its group's share of the cores, and `workers` is the number of workers
/// that run on each CPU already.
///
/// Takes a physical core with the fewest workers. Among equal ones it prefers, in this order: not the core of CPU 0,
/// which serves most interrupts; a core within the share. `None` if no CPU is allowed.
pub fn pick_core(
    machine: &Machine,
    node: Option<u32>,
    share: &[u32],
    workers: &BTreeMap<u32, usize>,
) -> Option<u32> {
    let busy = |core: &Core| core.cpus.0.iter().filter_map(|cpu| workers.get(cpu)).sum::<usize>();
    let cost = |(cpu, core): &(u32, &Core)| (busy(core), core.cpus.has(0), !share.contains(cpu));
    usable(machine, pool_of(machine, node)).min_by_key(cost).map(|(cpu, _)| cpu)
}

/// Gives each group a share of the physical cores near it, and its worker one of them: by [`pick_core`], as if only the
/// workers of these groups were running.
///
/// A group without a node, or on a node without an allowed CPU, gets its share of all cores.
fn share_cores(machine: &Machine, groups: &mut [RailGroup]) {
    let mut pools: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for (number, group) in groups.iter().enumerate() {
        pools.entry(pool_of(machine, group.node)).or_default().push(number);
    }
    let mut workers: BTreeMap<u32, usize> = BTreeMap::new();
    for (node, members) in pools {
        let pool: Vec<u32> = usable(machine, node).map(|(cpu, _)| cpu).collect();
        for (turn, number) in members.iter().enumerate() {
            let (from, to) = (turn * pool.len() / members.len(), (turn + 1) * pool.len() / members.len());
            let group = &mut groups[*number];
            group.cores = pool.get(from..to.max(from + 1)).unwrap_or_default().to_vec();
            group.core = pick_core(machine, group.node, &group.cores, &workers);
            if let Some(core) = group.core {
                *workers.entry(core).or_default() += 1;
            }
        }
    }
}

/// The node whose cores a group near `node` uses; `None` for the cores of all nodes.
fn pool_of(machine: &Machine, node: Option<u32>) -> Option<u32> {
    node.filter(|node| usable(machine, Some(*node)).next().is_some())
}

/// The physical cores of a node, or of all nodes if `node` is `None`, with the first allowed CPU of each.
fn usable(machine: &Machine, node: Option<u32>) -> impl Iterator<Item = (u32, &Core)> {
    let near = machine.cores.iter().filter(move |core| node.is_none() || core.node == node);
    near.filter_map(|core| Some((core.cpus.and(&machine.allowed).0.first().copied()?, core)))
}

/// One step of the path from the machine down to a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PathStep {
    Node(u32),
    Root(Root),
    Bridge(Address),
}

/// The path from the machine down to a function.
fn path(machine: &Machine, function: &Function) -> Vec<PathStep> {
    let node = machine.node_of(function).map(PathStep::Node);
    let bridges = function.bridges.iter().copied().map(PathStep::Bridge);
    node.into_iter().chain([PathStep::Root(function.root)]).chain(bridges).collect()
}

/// A GPU or a card, and its path.
struct Located {
    address: Address,
    path: Vec<PathStep>,
}

/// The groups within a part of the machine, and the GPUs and cards that are in none of them yet.
#[derive(Default)]
struct Assignment {
    groups: Vec<RailGroup>,
    gpus: Vec<Located>,
    cards: Vec<Located>,
}

impl Assignment {
    /// Groups GPUs and cards that share the first `depth` steps of their paths: first within each smaller part, and
    /// then those that are left.
    fn below(depth: usize, gpus: Vec<Located>, cards: Vec<Located>) -> Self {
        let mut parts: BTreeMap<Option<PathStep>, (Vec<Located>, Vec<Located>)> = BTreeMap::new();
        for gpu in gpus {
            parts.entry(gpu.path.get(depth).copied()).or_default().0.push(gpu);
        }
        for card in cards {
            parts.entry(card.path.get(depth).copied()).or_default().1.push(card);
        }
        let mut whole = Self::default();
        for (step, (gpus, cards)) in parts {
            let part = match step {
                Some(_) => Self::below(depth + 1, gpus, cards),
                None => Self { groups: Vec::new(), gpus, cards },
            };
            whole.groups.extend(part.groups);
            whole.gpus.extend(part.gpus);
            whole.cards.extend(part.cards);
        }
        whole.assign_rest();
        whole
    }

    /// Gives the GPUs that are left the cards that are left. GPUs that get no card join existing groups.
    fn assign_rest(&mut self) {
        if self.gpus.is_empty() || (self.cards.is_empty() && self.groups.is_empty()) {
            return;
        }
        let by_address = |located: &mut Vec<Located>| {
            let mut addresses: Vec<Address> = located.drain(..).map(|located| located.address).collect();
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
