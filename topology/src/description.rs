//! A machine written down by a person: the project's own format.

use std::path::Path;

use serde::Deserialize;

use crate::{Address, Core, Cpus, Error, Function, Kind, Machine, Node, Root};

/// A machine as a TOML file has it; `machines/p5.48xlarge.toml` is one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// What it is called.
    pub name: String,
    /// Its NUMA nodes.
    #[serde(default, rename = "node")]
    pub nodes: Vec<DescribedNode>,
    /// Its PCI functions; those of bridges follow from the paths.
    #[serde(default, rename = "function")]
    pub functions: Vec<Described>,
}

/// A NUMA node of a [`Description`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedNode {
    /// The system's number.
    pub number: u32,
    /// The first hardware thread of each core, `0-47`.
    pub cores: String,
    /// From a core's first hardware thread to its second, if it has two.
    #[serde(default)]
    pub sibling: Option<u32>,
}

/// A PCI function of a [`Description`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    /// The host bridge, the bridges, and the function: `0000:44/44:00.0/45:00.0/46:01.0/4f:00.0`.
    pub path: String,
    /// Class and subclass in hexadecimal, `0302`.
    pub class: String,
    /// Vendor and device in hexadecimal, `10de:2330`.
    pub id: String,
    /// Its NUMA node, if the firmware says.
    #[serde(default)]
    pub node: Option<u32>,
    /// Its RDMA device.
    #[serde(default)]
    pub rdma: Option<String>,
}

/// Buses of a domain, and so the bridges on the way to one.
const MOST_BRIDGES: usize = 256;

impl Description {
    /// AWS's p5.48xlarge: 8 H100 and 32 EFA cards.
    ///
    /// From the listings of a real one: `lspci -t`, `/sys/bus/pci/devices`, lstopo.
    pub fn p5() -> Self {
        let text = include_str!("../machines/p5.48xlarge.toml");
        Self::parse(text, Path::new("p5.48xlarge.toml")).unwrap_or_else(|wrong| unreachable!("{wrong}"))
    }

    /// Reads a description; `path` is for errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Error> {
        toml::from_str(text).map_err(|why| Error::malformed(path, why.to_string()))
    }

    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|why| Error::unreadable(path, why))?;
        Self::parse(&text, path)
    }

    /// The machine, with all of its CPUs allowed.
    pub fn machine(&self) -> Result<Machine, Error> {
        let malformed = |what: String| Error::malformed(Path::new(&self.name), what);
        let mut functions: Vec<Function> = Vec::new();
        for described in &self.functions {
            let function = described.function().map_err(malformed)?;
            for (depth, address) in function.bridges.iter().enumerate() {
                if functions.iter().all(|known| known.address != *address) {
                    functions.push(bridge(&function, depth, *address));
                }
            }
            if functions.iter().any(|known| known.address == function.address) {
                return Err(malformed(format!("{} is there twice", function.address)));
            }
            functions.push(function);
        }
        let (mut nodes, mut cores) = (Vec::new(), Vec::new());
        for described in &self.nodes {
            let firsts: Cpus = described.cores.parse().map_err(malformed)?;
            let sibling = described.sibling;
            if sibling.is_some_and(|by| by >= crate::cpus::MOST) {
                return Err(malformed(format!(
                    "the sibling of node {} is beyond all CPUs",
                    described.number
                )));
            }
            let threads = |first: &u32| {
                Cpus::from_iter([Some(*first), sibling.map(|by| first + by)].into_iter().flatten())
            };
            let here: Vec<Core> = firsts
                .0
                .iter()
                .map(|first| Core { cpus: threads(first), node: Some(described.number) })
                .collect();
            let cpus = here.iter().flat_map(|core| core.cpus.0.iter().copied()).collect();
            nodes.push(Node { number: described.number, cpus });
            cores.extend(here);
        }
        let allowed = cores.iter().flat_map(|core| core.cpus.0.iter().copied()).collect();
        Ok(Machine::new(functions, nodes, cores, allowed))
    }
}

/// A bridge on the way to `below`: an Amazon one, as those of a p5 are, which nobody asks.
fn bridge(below: &Function, depth: usize, address: Address) -> Function {
    Function {
        address,
        bridges: below.bridges[..depth].to_vec(),
        class: 0x0604,
        vendor: 0x1d0f,
        device: 0x0200,
        kind: Kind::Bridge,
        rdma: Vec::new(),
        ..below.clone()
    }
}

impl Described {
    fn function(&self) -> Result<Function, String> {
        let (root, rest) = self.path.split_once('/').ok_or_else(|| format!("{:?} is no path", self.path))?;
        let root: Root =
            root.parse().map_err(|_| format!("{root:?} is no host bridge; one looks like 0000:44"))?;
        let address = |name: &str| {
            format!("{:04x}:{name}", root.domain).parse::<Address>().map_err(|why| why.to_string())
        };
        let mut bridges = rest.split('/').map(address).collect::<Result<Vec<_>, _>>()?;
        if bridges.len() > MOST_BRIDGES {
            return Err(format!("a path of {} bridges; there are {MOST_BRIDGES} at most", bridges.len()));
        }
        let Some(address) = bridges.pop() else { return Err(format!("{:?} is no path", self.path)) };
        let number = |digits: &str| {
            u16::from_str_radix(digits, 16).map_err(|_| format!("{digits:?} is no hexadecimal number"))
        };
        let (vendor, device) = self
            .id
            .split_once(':')
            .ok_or_else(|| format!("{:?} is no id; one looks like 10de:2330", self.id))?;
        let (class, vendor, device) = (number(&self.class)?, number(vendor)?, number(device)?);
        Ok(Function {
            address,
            root,
            bridges,
            class,
            vendor,
            device,
            node: self.node,
            kind: Kind::of(class, vendor, device, self.rdma.is_some()),
            rdma: self.rdma.clone().into_iter().collect(),
            net: Vec::new(),
            redirects: None,
            physical: None,
        })
    }
}
