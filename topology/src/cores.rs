//! Which core drives which group.

use std::collections::BTreeMap;

use crate::{Core, Machine, RailGroup};

/// Gives each group its share of the physical cores near it, and its worker one of them, as
/// [`pick_core`] does where nobody else works.
///
/// A group near no node, or near one without a CPU that is allowed, draws from all cores.
pub(crate) fn share_cores(machine: &Machine, groups: &mut [RailGroup]) {
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

/// The CPU for a worker near `node` whose group's share of the cores is `share`, where so many workers
/// are on these CPUs already: on the physical core with the fewest, not on that of CPU 0, which serves
/// most interrupts, and within the share, in this order. `None` where no CPU is allowed.
pub fn pick_core(
    machine: &Machine,
    node: Option<u32>,
    share: &[u32],
    workers: &BTreeMap<u32, usize>,
) -> Option<u32> {
    let busy = |core: &Core| core.cpus.0.iter().filter_map(|cpu| workers.get(cpu)).sum::<usize>();
    let price = |(cpu, core): &(u32, &Core)| (busy(core), core.cpus.has(0), !share.contains(cpu));
    usable(machine, pool_of(machine, node)).min_by_key(price).map(|(cpu, _)| cpu)
}

/// The node from whose cores a group near `node` draws; `None` for all.
fn pool_of(machine: &Machine, node: Option<u32>) -> Option<u32> {
    node.filter(|node| usable(machine, Some(*node)).next().is_some())
}

/// The first allowed CPU of each physical core near `node`, or of all.
fn usable(machine: &Machine, node: Option<u32>) -> impl Iterator<Item = (u32, &Core)> {
    let near = machine.cores.iter().filter(move |core| node.is_none() || core.node == node);
    near.filter_map(|core| Some((core.cpus.and(&machine.allowed).0.first().copied()?, core)))
}
