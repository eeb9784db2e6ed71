//! Which card is near which GPU: the PCI functions, NUMA nodes and cores of a host, and the rail
//! groups that follow.
//!
//! In reading order:
//!
//! - [`Machine`]: the model; [`Address`], [`Root`], [`Cpus`] name places in it, and [`Distance`] says
//!   what lies between two of its functions.
//! - Where a machine comes from: [`sysfs`] (this host's, or a copy of one), `hwloc` (feature of that
//!   name: this host's, or an XML file of `lstopo`'s), or a [`Description`], of which one is built in:
//!   [`Description::p5`].
//! - [`RailGroup`]: what [`rail_groups`] makes of it: for each GPU its nearest cards and a core.
//! - [`p2p`]: whether a card can reach a GPU's memory, or another function's, as the kernel decides;
//!   [`acs`] is what bridges have to say about it. [`p2pmem`]: functions that give memory out to others.
//! - [`fixture`]: a description as the files that the readers read, for tests without such a host.
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
//! Everything here is plain data, read once and never changed; nothing is held open.

pub mod acs;
mod address;
mod cores;
mod cpus;
mod description;
mod distance;
mod error;
pub mod fixture;
mod groups;
#[cfg(feature = "hwloc")]
pub mod hwloc;
mod machine;
pub mod p2p;
pub mod p2pmem;
pub mod sysfs;

pub use address::{Address, NoAddress, Root};
pub use cores::pick_core;
pub use cpus::Cpus;
pub use description::{Described, DescribedNode, Description};
pub use distance::Distance;
pub use error::Error;
pub use groups::{RailGroup, rail_groups, rail_groups_for, rail_groups_of};
pub use machine::{Core, Function, Kind, Machine, Node, is_efa};
