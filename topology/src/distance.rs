//! How far two functions are apart.

use std::fmt;

use serde::Serialize;

use crate::Function;

/// What lies between two PCI functions. Nearer ones are less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// Two functions of one card.
    Card,
    /// A switch, with so many bridges on the way up and down.
    Switch(u32),
    /// One host bridge.
    Root,
    /// The processor: another host bridge of the same NUMA node.
    Node,
    /// Another NUMA node; or the system does not tell.
    Machine,
}

impl Distance {
    /// Between two functions on those NUMA nodes.
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
