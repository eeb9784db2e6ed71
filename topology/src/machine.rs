//! The model: what a host has, and where.

use serde::Serialize;

use crate::{Address, Cpus, Distance, Root};

/// A host: its PCI functions, NUMA nodes and cores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Machine {
    /// All of them, by address.
    pub functions: Vec<Function>,
    /// By number; none where the system knows no such thing.
    pub nodes: Vec<Node>,
    /// Physical cores, by their first CPU.
    pub cores: Vec<Core>,
    /// The CPUs that this process may use.
    pub allowed: Cpus,
}

/// A PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Its host bridge.
    pub root: Root,
    /// The bridges from the root to it, the nearest last.
    pub bridges: Vec<Address>,
    /// Class and subclass, `0x0302`: PCI Code and ID Assignment Specification, section 1.
    pub class: u16,
    /// The vendor's number, `0x10de`.
    pub vendor: u16,
    /// The vendor's number for it.
    pub device: u16,
    /// The NUMA node that the firmware says; many virtual machines' does not.
    pub node: Option<u32>,
    /// What it is to us.
    pub kind: Kind,
    /// Of a virtual function (SR-IOV), the physical one; sysfs alone tells.
    pub physical: Option<Address>,
    /// Its RDMA devices, `rdmap79s0`; one per port on some cards.
    pub rdma: Vec<String>,
    /// Its network interfaces.
    pub net: Vec<String>,
    /// Of a bridge: whether it sends what its devices say to each other up to the root complex
    /// ([`acs`](crate::acs)). `None` where that is not shown: to root alone, and not by hwloc.
    pub redirects: Option<bool>,
}

/// What a function is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A GPU or another accelerator.
    Gpu,
    /// A card that can do RDMA.
    Nic,
    /// A bridge, or a switch's port.
    Bridge,
    /// A disk.
    Storage,
    /// Anything else, network cards without RDMA among it.
    Other,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The system's number.
    pub number: u32,
    /// CPUs next to it; none where it is memory alone.
    pub cpus: Cpus,
}

/// A physical core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Core {
    /// Its hardware threads.
    pub cpus: Cpus,
    /// The NUMA node next to it.
    pub node: Option<u32>,
}

impl Machine {
    /// Puts the parts in order.
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

    /// The functions of one kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(move |function| function.kind == kind)
    }

    /// The card with the RDMA device `name`.
    pub fn card(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.rdma.iter().any(|known| known == name))
    }

    /// The NUMA node of a function: its own, else what others below its host bridge say; where there
    /// is one node alone, that.
    pub fn node_of(&self, function: &Function) -> Option<u32> {
        let siblings = || self.functions.iter().filter(|other| other.root == function.root);
        let only = || match self.nodes.as_slice() {
            [only] => Some(only.number),
            _ => None,
        };
        function.node.or_else(|| siblings().find_map(|other| other.node)).or_else(only)
    }

    /// How far two functions are apart.
    pub fn distance(&self, a: &Function, b: &Function) -> Distance {
        Distance::between(a, b, self.node_of(a), self.node_of(b))
    }
}

impl Function {
    /// The way to it below sysfs's `devices`: `pci0000:44/0000:44:00.0/0000:45:00.0`.
    pub fn sysfs_path(&self) -> String {
        let steps = self.bridges.iter().chain([&self.address]);
        steps.fold(format!("pci{}", self.root), |way, step| format!("{way}/{step}"))
    }
}

const AMAZON: u16 = 0x1d0f;
const MELLANOX: u16 = 0x15b3;
const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

/// Whether these are an EFA card's numbers (the kernel's `efa_main.c`).
pub fn is_efa(vendor: u16, device: u16) -> bool {
    vendor == AMAZON && (0xefa0..=0xefa3).contains(&device)
}

impl Kind {
    /// By class, vendor and device; `has_rdma` where the system knows an RDMA device there.
    pub fn of(class: u16, vendor: u16, device: u16, has_rdma: bool) -> Self {
        match (class >> 8, class) {
            _ if has_rdma => Self::Nic,
            // 02: network. InfiniBand is 0207; cards that do both show as Ethernet.
            (0x02, 0x0207) => Self::Nic,
            (0x02, _) if vendor == MELLANOX || is_efa(vendor, device) => Self::Nic,
            // 0302: 3D controller. As 0300, VGA, servers' own consoles show too. 0380 and 12: what
            // AMD's accelerators say.
            (0x03, 0x0302) => Self::Gpu,
            (0x03, _) if vendor == NVIDIA || vendor == AMD => Self::Gpu,
            (0x12, _) => Self::Gpu,
            (0x06, _) => Self::Bridge,
            (0x01, _) => Self::Storage,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_by_numbers() {
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
