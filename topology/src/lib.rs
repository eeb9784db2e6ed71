//! Finds out which cards (NICs) are near which GPU: from the PCI functions, NUMA nodes and cores of a host it makes
//! rail groups.
//!
//! In reading order:
//!
//! - [`Machine`]: the model of a host. [`Address`], [`Root`] and [`Cpus`] name its parts, and [`Distance`] says how far
//!   two of its functions are apart.
//! - Three sources of a machine: [`sysfs`] reads `/sys` of this host, or a copy of another host's; `hwloc` (a feature
//!   of that name) asks libhwloc, or reads an XML file of `lstopo`; a [`Description`] is a TOML file.
//!   [`Description::p5`] is built in.
//! - [`RailGroup`]: [`rail_groups`] finds for each GPU its nearest cards and a core.
//! - [`p2p`]: whether a card can reach the memory of a GPU or of another function, as the kernel decides. [`acs`] reads
//!   what bridges do with such requests. [`p2pmem`] lists functions that lend memory to others.
//! - [`fixture`]: writes a machine as the files that the sources read, for tests on other hosts.
//!
//! ```
//! # fn main() -> Result<(), multirail_topology::Error> {
//! let p5 = multirail_topology::Description::p5().machine()?;
//! let groups = multirail_topology::rail_groups(&p5);
//! assert_eq!(groups.len(), 8);
//! assert_eq!(groups[0].cards.len(), 4);
//! assert_eq!(groups[3].core, Some(36));
//! # Ok(())
//! # }
//! ```
//!
//! All types are plain data that is read once. No file stays open.

pub mod acs;
mod address;
mod cpus;
mod description;
mod error;
pub mod fixture;
mod groups;
#[cfg(feature = "hwloc")]
pub mod hwloc;
mod machine;
pub mod p2p;
pub mod p2pmem;
pub mod sysfs;

pub use address::{Address, InvalidAddress, Root};
pub use cpus::Cpus;
pub use description::{DescribedFunction, DescribedNode, Description};
pub use error::Error;
pub use groups::{RailGroup, pick_core, rail_groups, rail_groups_for, rail_groups_of};
pub use machine::{Core, Distance, Function, Kind, Machine, Node, is_efa};
