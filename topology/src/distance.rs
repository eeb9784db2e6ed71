//! How far two functions are apart.

use std::fmt;

use serde::Serialize;

use crate::Function;

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
