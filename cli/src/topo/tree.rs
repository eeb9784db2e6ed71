//! The machine as a tree: NUMA nodes, host bridges, switches, and the devices behind them.

use std::collections::BTreeMap;

use topology::{Address, Cpus, Function, Kind, Machine, RailGroup, Root};

use super::label;

/// A summary line, then the tree of GPUs and cards, and of disks if `disks` is true.
///
/// A chain of bridges without branches is one line. Bridges without a shown device are left out.
pub fn text(name: &str, machine: &Machine, groups: &[RailGroup], disks: bool) -> String {
    let mut text = format!("{name}: {}\n", label::summary(machine, groups.len()));
    if let Some(line) = restriction(machine) {
        text.push_str(&line);
    }
    let nodes = nodes(machine, disks);
    let all_nodes_known = nodes.iter().all(|(node, _)| node.is_some());
    for (node, roots) in nodes {
        text.push_str(&format!("\n{}", label::node(machine, node)));
        let known = machine.nodes.iter().find(|known| Some(known.number) == node);
        if let Some(cpus) = known.map(|known| &known.cpus).filter(|cpus| !cpus.0.is_empty()) {
            text.push_str(&format!(", CPUs {}", label::cpus(cpus, 60)));
        }
        text.push_str(if roots.is_empty() && all_nodes_known { ": no GPU and no card\n" } else { "\n" });
        let mut branches: Vec<Branch<'_>> =
            roots.into_iter().map(|(root, below)| host(root, &below)).collect();
        print(&mut text, groups, "", &mut branches);
    }
    text.push('\n');
    text
}

/// A line that lists the allowed CPUs, if this process may not use all.
fn restriction(machine: &Machine) -> Option<String> {
    let all: Cpus = machine.cores.iter().flat_map(|core| core.cpus.0.iter().copied()).collect();
    let allowed = all.and(&machine.allowed);
    (allowed != all).then(|| {
        format!("this process may use CPUs {} of {}\n", label::cpus(&allowed, 30), label::cpus(&all, 30))
    })
}

/// The shown devices by host bridge.
type Roots<'a> = BTreeMap<Root, Vec<&'a Function>>;

/// NUMA nodes by number, and last the devices on an unknown node. Nodes without CPUs are left out.
fn nodes(machine: &Machine, disks: bool) -> Vec<(Option<u32>, Roots<'_>)> {
    let with_cpus = machine.nodes.iter().filter(|node| !node.cpus.0.is_empty());
    let mut nodes: BTreeMap<Option<u32>, Roots<'_>> =
        with_cpus.map(|node| (Some(node.number), Roots::new())).collect();
    let is_shown = |function: &&Function| match function.kind {
        Kind::Gpu | Kind::Nic => true,
        Kind::Storage => disks,
        Kind::Bridge | Kind::Other => false,
    };
    for function in machine.functions.iter().filter(is_shown) {
        let roots = nodes.entry(machine.node_of(function)).or_default();
        roots.entry(function.root).or_default().push(function);
    }
    let unplaced = nodes.remove(&None);
    nodes.into_iter().chain(unplaced.map(|roots| (None, roots))).collect()
}

/// A line of the tree, and the lines below it.
struct Branch<'a> {
    /// The bridges of the line, from the root.
    chain: Vec<String>,
    leaf: Option<&'a Function>,
    below: Vec<Branch<'a>>,
}

/// A host bridge, with the bridges that all devices below it share.
fn host<'a>(root: Root, functions: &[&'a Function]) -> Branch<'a> {
    let mut below = branches(root, 0, functions);
    let mut chain = vec![format!("host bridge {root}")];
    if let [only] = &mut below[..]
        && only.leaf.is_none()
    {
        chain.append(&mut only.chain);
        below = std::mem::take(&mut only.below);
    }
    Branch { chain, leaf: None, below }
}

/// The branches that are `depth` bridges below `root`.
fn branches<'a>(root: Root, depth: usize, functions: &[&'a Function]) -> Vec<Branch<'a>> {
    let mut bridges: BTreeMap<Address, Vec<&'a Function>> = BTreeMap::new();
    let mut found = Vec::new();
    for function in functions {
        match function.bridges.get(depth) {
            Some(bridge) => bridges.entry(*bridge).or_default().push(function),
            None => found.push(Branch { chain: Vec::new(), leaf: Some(*function), below: Vec::new() }),
        }
    }
    for (bridge, functions) in bridges {
        let mut below = branches(root, depth + 1, &functions);
        let mut branch = match (below.pop(), below.is_empty()) {
            (Some(only), true) => only,
            (last, _) => {
                below.extend(last);
                Branch { chain: Vec::new(), leaf: None, below }
            }
        };
        branch.chain.insert(0, short(root, bridge));
        found.push(branch);
    }
    found
}

/// The address of a bridge, without the domain if the host bridge has the same domain.
fn short(root: Root, bridge: Address) -> String {
    let text = bridge.to_string();
    match text.split_once(':') {
        Some((_, rest)) if bridge.domain == root.domain => rest.to_owned(),
        _ => text,
    }
}

/// The widths of a device's columns: kind, address, RDMA devices, vendor. The last column is the rail group.
const WIDTHS: [usize; 4] = [4, 12, 10, 16];

fn print(text: &mut String, groups: &[RailGroup], indent: &str, branches: &mut [Branch<'_>]) {
    let chains: Vec<String> = branches.iter().map(|branch| branch.chain.join(" ─ ")).collect();
    let leaves = branches.iter().zip(&chains).filter(|(branch, _)| branch.leaf.is_some());
    let width = leaves.map(|(_, chain)| chain.chars().count()).max().unwrap_or(0);
    let count = branches.len();
    for (number, (branch, chain)) in branches.iter_mut().zip(&chains).enumerate() {
        let (corner, rule) = if number + 1 == count { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let mut line = format!("{indent}{corner}{chain}");
        if let Some(function) = branch.leaf {
            line = format!("{indent}{corner}{chain:<width$}{}", if width > 0 { "   " } else { "" });
            for (cell, width) in cells(function, groups).iter().zip(WIDTHS.iter().chain([&0])) {
                line.push_str(&format!("{cell:<width$}  "));
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
        print(text, groups, &format!("{indent}{rule}"), &mut branch.below);
    }
}

fn cells(function: &Function, groups: &[RailGroup]) -> [String; 5] {
    let what = match function.kind {
        Kind::Gpu => "GPU",
        Kind::Nic => "card",
        Kind::Storage => "disk",
        Kind::Bridge | Kind::Other => "",
    };
    let id = format!("{:04x}:{:04x}", function.vendor, function.device);
    let at = &function.address;
    let is_in = |group: &RailGroup| group.gpus.contains(at) || group.cards.contains(at);
    // A GPU is in one group per backend.
    let numbers =
        groups.iter().enumerate().filter(|(_, group)| is_in(group)).map(|(number, _)| number.to_string());
    let numbers = numbers.collect::<Vec<_>>().join(", ");
    [
        what.to_owned(),
        at.to_string(),
        label::devices(function),
        label::maker(function).map_or(id.clone(), |maker| format!("{maker} {id}")),
        if numbers.is_empty() { numbers } else { format!("group {numbers}") },
    ]
}

#[cfg(test)]
mod tests;
