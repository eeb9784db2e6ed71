//! Which core drives which group.

use std::collections::BTreeMap;

use crate::{Machine, RailGroup};

/// Gives each group its share of the physical cores near it, and its worker one of them: not the
/// one with CPU 0, which serves most interrupts, and none twice while there are others.
///
/// A group near no node, or near one without a CPU that is allowed, draws from all cores.
pub(crate) fn share_cores(machine: &Machine, groups: &mut [RailGroup]) {
    let mut pools: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for (number, group) in groups.iter().enumerate() {
        let node = group.node.filter(|node| !usable(machine, Some(*node)).is_empty());
        pools.entry(node).or_default().push(number);
    }
    let mut workers: BTreeMap<u32, usize> = BTreeMap::new();
    for (node, members) in pools {
        let pool = usable(machine, node);
        for (turn, number) in members.iter().enumerate() {
            let (from, to) = (turn * pool.len() / members.len(), (turn + 1) * pool.len() / members.len());
            let mine = pool.get(from..to.max(from + 1)).unwrap_or_default();
            let price = |cpu: &u32| (workers.get(cpu).copied(), *cpu == 0, !mine.contains(cpu));
            let core = pool.iter().copied().min_by_key(price);
            let group = &mut groups[*number];
            (group.core, group.cores) = (core, mine.to_vec());
            if let Some(core) = core {
                *workers.entry(core).or_default() += 1;
            }
        }
    }
}

/// The first allowed CPU of each physical core near `node`, or of all.
fn usable(machine: &Machine, node: Option<u32>) -> Vec<u32> {
    let near = machine.cores.iter().filter(|core| node.is_none() || core.node == node);
    near.filter_map(|core| core.cpus.and(&machine.allowed).0.first().copied()).collect()
}
