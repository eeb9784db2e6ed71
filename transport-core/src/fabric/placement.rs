//! Which devices make a rail group, which GPUs the group serves, and on which core its worker runs.

use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use topology::{Address, Cpus, Distance, Machine, RailGroup, rail_groups_for, rail_groups_of};

use super::group::grouped;
use crate::spi::DeviceInfo;
use crate::{Error, ErrorKind, Result};

/// How a fabric puts devices into rail groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RailGroups {
    /// By their distance to GPUs and NUMA nodes: [`topology::rail_groups_of`]. Devices that are no PCI function of the
    /// machine keep the groups that their backend gives them.
    #[default]
    Nearest,
    /// These groups, in this order. Each device that none of them names makes a group of its own.
    Listed(Vec<ListedGroup>),
}

/// A rail group that the user listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGroup {
    /// Names of devices of one transport.
    pub devices: Vec<String>,
    /// The CPU for the group's worker. `None` leaves the choice to the system.
    pub core: Option<u32>,
}

/// The GPUs, the NUMA node and the cores that a rail group is near to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupLocation {
    /// The GPUs whose memory the group moves.
    pub gpus: Vec<Address>,
    /// The group's NUMA node.
    pub node: Option<u32>,
    /// The largest distance between one of its GPUs and one of its devices.
    pub distance: Option<Distance>,
    /// The group's share of the cores near it, each by its first CPU. Empty if they are not known.
    pub cores: Vec<u32>,
    /// The CPU that the group's worker is bound to. `None` if the worker may run anywhere, or the caller drives the
    /// engine.
    pub core: Option<u32>,
}

impl From<&RailGroup> for GroupLocation {
    fn from(group: &RailGroup) -> Self {
        let RailGroup { gpus, node, distance, cores, .. } = group.clone();
        Self { gpus, node, distance, cores, core: None }
    }
}

/// How a fabric locates its devices in the machine, and groups them. Clones share the machine once it was read.
#[derive(Clone, Default)]
pub(super) struct PlacementPolicy {
    pub groups: RailGroups,
    /// The GPUs to serve. `None` stands for all.
    pub gpus: Option<Vec<Address>>,
    /// The machine. Unless it was given, it is this host, read when the first PCI device is to be located.
    pub machine: Arc<OnceLock<Arc<Machine>>>,
}

impl PlacementPolicy {
    /// Sorts `devices` by their groups. Returns each group's range of rails and its location.
    pub fn place(&self, devices: &mut [DeviceInfo]) -> Result<Vec<(Range<usize>, GroupLocation)>> {
        let machine = match devices.iter().any(|device| device.address.is_some()) {
            true => self.read()?,
            false => None,
        };
        Ok(self.groups.place(devices, machine, self.gpus.as_deref()))
    }

    fn read(&self) -> Result<Option<&Machine>> {
        if self.machine.get().is_none() {
            match topology::sysfs::this_host_without_acs() {
                Ok(machine) => {
                    let _ = self.machine.set(Arc::new(machine));
                }
                // Listed groups need no machine.
                Err(why) if matches!(self.groups, RailGroups::Listed(_)) => {
                    tracing::warn!(%why, "the fabric does not know which GPUs its rail groups are near to");
                }
                Err(why) => {
                    let remedy = "the fabric reads there where NICs and GPUs are: list the rail groups, or describe \
                                  the machine to the fabric";
                    return Err(Error::new(ErrorKind::Io, "open", format!("{why}; {remedy}")));
                }
            }
        }
        Ok(self.known())
    }

    /// The machine, if it was read or given.
    pub fn known(&self) -> Option<&Machine> {
        self.machine.get().map(|machine| &**machine)
    }
}

impl RailGroups {
    /// Sorts `devices` by their groups. Returns each group's range of rails and its location.
    pub(super) fn place(
        &self,
        devices: &mut [DeviceInfo],
        machine: Option<&Machine>,
        gpus: Option<&[Address]>,
    ) -> Vec<(Range<usize>, GroupLocation)> {
        let near = |machine: &Machine, cards: &[Address]| match gpus {
            Some(gpus) => rail_groups_for(machine, gpus, cards),
            None => rail_groups_of(machine, cards),
        };
        let cards: Vec<Address> = devices.iter().filter_map(|device| device.address).collect();
        let near = machine.map(|machine| near(machine, &cards)).unwrap_or_default();
        let locations = match self {
            Self::Listed(groups) => listed(groups, devices, machine, near),
            Self::Nearest => nearest(devices, machine, near),
        };
        // Groups of the backends have higher numbers than groups of the machine. The order within a group decides how
        // its rails pair with the peer's.
        devices.sort_by_key(|device| {
            (device.group.unwrap_or(u32::MAX), device.address.is_none(), device.address)
        });
        let rails = grouped(devices).into_iter();
        let location = |rails: Range<usize>| {
            let number = devices[rails.start].group.map(|number| number as usize);
            let location = number.and_then(|number| locations.get(number)).cloned();
            (rails, location.unwrap_or_default())
        };
        rails.map(location).collect()
    }

    /// The same groups without the devices that are not among `known`. Groups without any device left are removed.
    pub fn only(self, known: &[&str]) -> Self {
        let Self::Listed(mut groups) = self else { return self };
        groups.iter_mut().for_each(|group| group.devices.retain(|name| known.contains(&name.as_str())));
        groups.retain(|group| !group.devices.is_empty());
        Self::Listed(groups)
    }

    /// The names of the listed devices.
    pub fn listed(&self) -> impl Iterator<Item = &str> {
        let groups = match self {
            Self::Listed(groups) => groups.as_slice(),
            Self::Nearest => &[],
        };
        groups.iter().flat_map(|group| &group.devices).map(String::as_str)
    }

    /// Checks that each listed device is among `known` and listed once, and that this process may use each listed CPU,
    /// which is listed once too.
    pub(super) fn check(&self, known: &[&str]) -> Result<()> {
        let Self::Listed(groups) = self else { return Ok(()) };
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidRequest, "open", why));
        let allowed = Cpus::of_this_thread();
        let mut cores = Vec::new();
        for core in groups.iter().filter_map(|group| group.core) {
            if let Some(allowed) = &allowed
                && !allowed.has(core)
            {
                return refuse(format!("rail groups name the CPU {core}; this process may use {allowed}"));
            }
            if cores.contains(&core) {
                return refuse(format!("rail groups name the CPU {core} twice"));
            }
            cores.push(core);
        }
        let mut seen = Vec::new();
        for name in groups.iter().flat_map(|group| &group.devices) {
            if !known.contains(&name.as_str()) {
                return refuse(format!(
                    "rail groups name the device {name:?}, which is not among the devices to open: {}",
                    known.join(", ")
                ));
            }
            if seen.contains(&name) {
                return refuse(format!("rail groups name the device {name:?} twice"));
            }
            seen.push(name);
        }
        Ok(())
    }
}

/// Gives the devices that the machine has their group numbers, and the other devices higher ones. Returns the locations
/// of the machine's groups.
fn nearest(
    devices: &mut [DeviceInfo],
    machine: Option<&Machine>,
    near: Vec<RailGroup>,
) -> Vec<GroupLocation> {
    let group = |address| near.iter().position(|group| group.cards.contains(&address));
    for device in devices {
        match device.address.and_then(group) {
            Some(number) => device.group = Some(number as u32),
            None => {
                if let (Some(address), Some(_)) = (device.address, machine) {
                    let name = &device.name;
                    tracing::warn!(name, %address, "the machine has no such device: its location is not known");
                }
                device.group = device.group.map(|number| number.saturating_add(near.len() as u32));
            }
        }
    }
    near.iter().map(GroupLocation::from).collect()
}

/// Gives the listed devices the numbers of their groups, and each other device a higher number of its own. Returns the
/// locations of all these groups.
fn listed(
    groups: &[ListedGroup],
    devices: &mut [DeviceInfo],
    machine: Option<&Machine>,
    near: Vec<RailGroup>,
) -> Vec<GroupLocation> {
    let mut others = groups.len()..;
    for device in devices.iter_mut() {
        let number = groups.iter().position(|group| group.devices.contains(&device.name));
        device.group = number.or_else(|| others.next()).map(|number| number as u32);
    }
    let mut locations: Vec<GroupLocation> = vec![GroupLocation::default(); others.start];
    for (location, group) in locations.iter_mut().zip(groups) {
        location.core = group.core;
    }
    let Some(machine) = machine else { return locations };
    let cards = |number: usize| {
        let of_group = devices.iter().filter(move |device| device.group == Some(number as u32));
        of_group.filter_map(|device| machine.function(device.address?))
    };
    // Listed groups still serve the GPUs that are nearest. If several groups have devices near a GPU, the first
    // serves it.
    for near in near {
        let has_it = |number: &usize| cards(*number).any(|card| near.cards.contains(&card.address));
        if let Some(number) = (0..locations.len()).find(has_it) {
            locations[number].gpus.extend(near.gpus);
        }
    }
    for (number, location) in locations.iter_mut().enumerate() {
        location.node = cards(number).find_map(|card| machine.node_of(card));
        let gpus = location.gpus.iter().filter_map(|gpu| machine.function(*gpu));
        location.distance = gpus.flat_map(|gpu| cards(number).map(|card| machine.distance(gpu, card))).max();
    }
    locations
}

impl FromStr for RailGroups {
    type Err = Error;

    /// Parses `nearest`, or a list of groups that are separated by semicolons. A group is a list of devices that are
    /// separated by commas, and may end with `@` and a CPU: `rdmap79s0,rdmap80s0@5;rdmap96s0@17`.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: String| Error::new(ErrorKind::InvalidRequest, "read rail groups", why);
        if text.trim() == "nearest" {
            return Ok(Self::Nearest);
        }
        let group = |text: &str| {
            let (names, core) = match text.split_once('@') {
                None => (text, None),
                Some((names, cpu)) => {
                    let number = cpu.trim().parse();
                    let core = number.map_err(|_| refuse(format!("{cpu:?} is not the number of a CPU")))?;
                    (names, Some(core))
                }
            };
            let devices: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            if devices.iter().any(String::is_empty) {
                let why = "a name is missing; write groups as in rdmap79s0,rdmap80s0@5;rdmap96s0";
                return Err(refuse(format!("{text:?}: {why}")));
            }
            Ok(ListedGroup { devices, core })
        };
        text.split(';').map(group).collect::<Result<_>>().map(Self::Listed)
    }
}

#[cfg(test)]
mod tests;
