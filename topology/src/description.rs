//! A machine described in a TOML file, in a format of this crate.

use std::path::Path;

use serde::Deserialize;

use crate::{Address, Core, Cpus, Error, Function, Kind, Machine, Node, Root};

/// A machine, as a TOML file describes it. `machines/p5.48xlarge.toml` is an example.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The machine's name.
    pub name: String,
    /// The NUMA nodes.
    #[serde(default, rename = "node")]
    pub nodes: Vec<DescribedNode>,
    /// The PCI functions, without bridges: those are found in the paths.
    #[serde(default, rename = "function")]
    pub functions: Vec<DescribedFunction>,
}

/// A NUMA node of a [`Description`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedNode {
    /// The system's number for the node.
    pub number: u32,
    /// The first hardware thread of each core, `0-47`.
    pub cores: String,
    /// The difference between the numbers of a core's second and first hardware thread, if cores have two.
    #[serde(default)]
    pub sibling: Option<u32>,
}

/// A PCI function of a [`Description`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedFunction {
    /// The host bridge, the bridges and the function, for example `0000:44/44:00.0/45:00.0/46:01.0/4f:00.0`.
    pub path: String,
    /// Class and subclass in hexadecimal, for example `0302`.
    pub class: String,
    /// Vendor and device in hexadecimal, for example `10de:2330`.
    pub id: String,
    /// The NUMA node, if the firmware tells it.
    #[serde(default)]
    pub node: Option<u32>,
    /// The name of the RDMA device, if there is one.
    #[serde(default)]
    pub rdma: Option<String>,
}

/// The most bridges of a path: as many as a domain has buses.
const MAX_BRIDGES: usize = 256;

impl Description {
    /// AWS's p5.48xlarge: 8 H100 GPUs and 32 EFA cards. Written from listings of a real one: `lspci -t`,
    /// `/sys/bus/pci/devices` and lstopo.
    pub fn p5() -> Self {
        let text = include_str!("../machines/p5.48xlarge.toml");
        Self::parse(text, Path::new("p5.48xlarge.toml")).unwrap_or_else(|wrong| unreachable!("{wrong}"))
    }

    /// Parses a description. Errors name `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Error> {
        toml::from_str(text).map_err(|why| Error::malformed(path, why.to_string()))
    }

    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|why| Error::unreadable(path, why))?;
        Self::parse(&text, path)
    }

    /// The machine that is described. All of its CPUs are allowed.
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
                return Err(malformed(format!("{} is described twice", function.address)));
            }
            functions.push(function);
        }
        let (mut nodes, mut cores) = (Vec::new(), Vec::new());
        for described in &self.nodes {
            let firsts: Cpus = described.cores.parse().map_err(malformed)?;
            let sibling = described.sibling;
            if sibling.is_some_and(|by| by >= crate::cpus::MAX_CPUS) {
                return Err(malformed(format!(
                    "the sibling of node {} is too large for a CPU number",
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

/// The bridge at `depth` above `below`. It gets the IDs of a p5's bridges, by Amazon: no decision depends on them.
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

impl DescribedFunction {
    fn function(&self) -> Result<Function, String> {
        let (root, rest) = self
            .path
            .split_once('/')
            .ok_or_else(|| format!("{:?} is not a path; an example is 0000:44/44:00.0/4f:00.0", self.path))?;
        let root: Root =
            root.parse().map_err(|_| format!("{root:?} is not a host bridge; an example is 0000:44"))?;
        let address = |name: &str| {
            format!("{:04x}:{name}", root.domain).parse::<Address>().map_err(|why| why.to_string())
        };
        let mut bridges = rest.split('/').map(address).collect::<Result<Vec<_>, _>>()?;
        if bridges.len() > MAX_BRIDGES {
            return Err(format!(
                "the path has {} bridges; at most {MAX_BRIDGES} are possible",
                bridges.len()
            ));
        }
        let Some(address) = bridges.pop() else {
            return Err(format!("{:?} is not a path; an example is 0000:44/44:00.0/4f:00.0", self.path));
        };
        let number = |digits: &str| {
            u16::from_str_radix(digits, 16)
                .map_err(|_| format!("{digits:?} is not a hexadecimal number of 16 bits"))
        };
        let (vendor, device) = self
            .id
            .split_once(':')
            .ok_or_else(|| format!("{:?} is not an ID; an example is 10de:2330", self.id))?;
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
