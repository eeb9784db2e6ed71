//! The model of a host.

use std::fmt;

use serde::Serialize;

use crate::{Address, Cpus, Root};

/// A host: its PCI functions, NUMA nodes and cores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Machine {
    /// All PCI functions, by address.
    pub functions: Vec<Function>,
    /// The NUMA nodes, by number. Empty if the system knows none.
    pub nodes: Vec<Node>,
    /// The physical cores, by their first CPU.
    pub cores: Vec<Core>,
    /// The CPUs that this process may use.
    pub allowed: Cpus,
}

/// A PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// The address of the function.
    pub address: Address,
    /// The host bridge above it.
    pub root: Root,
    /// The bridges between the host bridge and the function, the one next to the function last.
    pub bridges: Vec<Address>,
    /// Class and subclass, for example `0x0302` (PCI Code and ID Assignment Specification, section 1).
    pub class: u16,
    /// The vendor ID, for example `0x10de`.
    pub vendor: u16,
    /// The device ID, which the vendor assigns.
    pub device: u16,
    /// The NUMA node, if the firmware tells it. In many virtual machines it does not.
    pub node: Option<u32>,
    /// What the function is used for.
    pub kind: Kind,
    /// The physical function of a virtual one (SR-IOV). Only sysfs tells it.
    pub physical: Option<Address>,
    /// The names of its RDMA devices, for example `rdmap79s0`. Some cards have one per port.
    pub rdma: Vec<String>,
    /// The names of its network interfaces.
    pub net: Vec<String>,
    /// For a bridge: whether it sends requests between its devices up to the root complex ([`acs`](crate::acs)). `None`
    /// if that is unknown: only root can read it, and hwloc does not tell it.
    pub redirects: Option<bool>,
}

/// What a function is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A GPU or another accelerator.
    Gpu,
    /// A card that can do RDMA.
    Nic,
    /// A bridge, or a port of a switch.
    Bridge,
    /// A disk.
    Storage,
    /// Anything else, for example a network card without RDMA.
    Other,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The system's number for the node.
    pub number: u32,
    /// The CPUs next to its memory. Empty for a node of memory alone.
    pub cpus: Cpus,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Core {
    /// The core's hardware threads.
    pub cpus: Cpus,
    /// The NUMA node next to the core.
    pub node: Option<u32>,
}

impl Machine {
    /// A machine with these parts, which are sorted here.
    pub fn new(
        mut functions: Vec<Function>,
        mut nodes: Vec<Node>,
        mut cores: Vec<Core>,
        allowed: Cpus,
    ) -> Self {
        functions.sort_by_key(|function| function.address);
        nodes.sort_by_key(|node| node.number);
        cores.sort_by_key(|core| core.cpus.0.first().copied());
        Self { functions, nodes, cores, allowed }
    }

    /// The function at `address`.
    pub fn function(&self, address: Address) -> Option<&Function> {
        let at = self.functions.binary_search_by_key(&address, |function| function.address).ok()?;
        Some(&self.functions[at])
    }

    /// The functions of a kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(move |function| function.kind == kind)
    }

    /// The card with the RDMA device `name`.
    pub fn card(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.rdma.iter().any(|known| known == name))
    }

    /// The NUMA node of a function: its own; if that is unknown, the node of another function below the same host
    /// bridge; else the machine's node, if it has only one.
    pub fn node_of(&self, function: &Function) -> Option<u32> {
        let siblings = || self.functions.iter().filter(|other| other.root == function.root);
        let only = || match self.nodes.as_slice() {
            [only] => Some(only.number),
            _ => None,
        };
        function.node.or_else(|| siblings().find_map(|other| other.node)).or_else(only)
    }

    /// How far two functions of the machine are apart.
    pub fn distance(&self, a: &Function, b: &Function) -> Distance {
        Distance::between(a, b, self.node_of(a), self.node_of(b))
    }
}

impl Function {
    /// The function's path below `devices` in sysfs, for example `pci0000:44/0000:44:00.0/0000:45:00.0`.
    pub fn sysfs_path(&self) -> String {
        let steps = self.bridges.iter().chain([&self.address]);
        steps.fold(format!("pci{}", self.root), |path, step| format!("{path}/{step}"))
    }
}

const AMAZON: u16 = 0x1d0f;
const MELLANOX: u16 = 0x15b3;
const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

/// Whether these are the vendor and device IDs of an EFA card (the kernel's `efa_main.c`).
pub fn is_efa(vendor: u16, device: u16) -> bool {
    vendor == AMAZON && (0xefa0..=0xefa3).contains(&device)
}

impl Kind {
    /// The kind of a function with this class, vendor and device ID. `has_rdma` is whether it has an RDMA device.
    pub fn of(class: u16, vendor: u16, device: u16, has_rdma: bool) -> Self {
        match (class >> 8, class) {
            _ if has_rdma => Self::Nic,
            // 02 is network, 0207 InfiniBand. Cards for both InfiniBand and Ethernet show as Ethernet.
            (0x02, 0x0207) => Self::Nic,
            (0x02, _) if vendor == MELLANOX || is_efa(vendor, device) => Self::Nic,
            // 0302 is a 3D controller. 0300 (VGA) can also be a server's console. AMD's accelerators have 0380 and 12.
            (0x03, 0x0302) => Self::Gpu,
            (0x03, _) if vendor == NVIDIA || vendor == AMD => Self::Gpu,
            (0x12, _) => Self::Gpu,
            (0x06, _) => Self::Bridge,
            (0x01, _) => Self::Storage,
            _ => Self::Other,
        }
    }
}

/// How far two PCI functions are apart. Smaller means nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// They are functions of one card.
    Card,
    /// They are behind one PCIe switch, with this number of bridges between them, up and down.
    Switch(u32),
    /// They are below one host bridge.
    Root,
    /// They are below different host bridges of one NUMA node.
    Node,
    /// They are on different NUMA nodes, or a node is unknown.
    Machine,
}

impl Distance {
    /// The distance between two functions on these NUMA nodes.
    pub(crate) fn between(a: &Function, b: &Function, node_a: Option<u32>, node_b: Option<u32>) -> Self {
        if a.address.shares_card(&b.address) && a.root == b.root {
            return Self::Card;
        }
        if a.root != b.root {
            return if node_a.is_some() && node_a == node_b { Self::Node } else { Self::Machine };
        }
        let shared = a.bridges.iter().zip(&b.bridges).take_while(|(a, b)| a == b).count();
        match shared {
            0 => Self::Root,
            _ => Self::Switch((a.bridges.len() + b.bridges.len() - 2 * shared) as u32),
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Card => write!(out, "the same card"),
            Self::Switch(_) => write!(out, "the same PCIe switch"),
            Self::Root => write!(out, "the same host bridge"),
            Self::Node => write!(out, "the same NUMA node"),
            Self::Machine => write!(out, "another NUMA node, or an unknown one"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_from_ids() {
        let kind = |class, vendor, device| Kind::of(class, vendor, device, false);
        assert_eq!(kind(0x0200, 0x1d0f, 0xefa1), Kind::Nic);
        assert_eq!(kind(0x0200, 0x1d0f, 0xec20), Kind::Other); // ENA
        assert_eq!(kind(0x0207, 0x15b3, 0x1021), Kind::Nic);
        assert_eq!(kind(0x0200, 0x15b3, 0x1021), Kind::Nic);
        assert_eq!(kind(0x0302, 0x10de, 0x2330), Kind::Gpu);
        assert_eq!(kind(0x0300, 0x1d0f, 0x1111), Kind::Other); // a console
        assert_eq!(kind(0x0680, 0x10de, 0x22a3), Kind::Bridge); // NVSwitch
        assert_eq!(kind(0x0108, 0x1d0f, 0xcd01), Kind::Storage);
        assert_eq!(Kind::of(0x0200, 0x14e4, 0x16d7, true), Kind::Nic);
    }
}
