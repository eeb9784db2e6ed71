//! Which devices make a rail group, whom it serves, and on which core it is driven.

use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use topology::{Address, Distance, Machine, RailGroup, rail_groups_of};

use super::group::grouped;
use crate::spi::DeviceInfo;
use crate::{Error, ErrorKind, Result};

/// How devices are put into rail groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RailGroups {
    /// By nearness to GPUs and NUMA nodes: [`topology::rail_groups_of`]. Devices that are no PCI
    /// function of the machine keep to the groups that their backend gives them.
    #[default]
    Nearest,
    /// These, in this order; each device that none of them names makes one of its own.
    Listed(Vec<ListedGroup>),
}

/// A rail group that somebody asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGroup {
    /// Names of devices of one transport.
    pub devices: Vec<String>,
    /// The CPU for its worker; the system's choice without.
    pub core: Option<u32>,
}

/// What a rail group is near to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The GPUs whose memory goes over it.
    pub gpus: Vec<Address>,
    /// Its NUMA node.
    pub node: Option<u32>,
    /// From its GPUs to its devices, at the farthest.
    pub distance: Option<Distance>,
    /// The CPU that its worker is kept to; none where nobody knows or asked.
    pub core: Option<u32>,
}

impl From<&RailGroup> for Place {
    fn from(group: &RailGroup) -> Self {
        Self { gpus: group.gpus.clone(), node: group.node, distance: group.distance, core: group.core }
    }
}

/// Where a fabric's devices are sought.
#[derive(Clone, Default)]
pub(super) struct Placing {
    pub groups: RailGroups,
    /// This host, read when the first card is to be placed, unless it was given.
    pub machine: OnceLock<Arc<Machine>>,
}

impl Placing {
    /// Sorts `devices` by their groups; the rails of each, and where it is.
    pub fn place(&self, devices: &mut [DeviceInfo]) -> Result<Vec<(Range<usize>, Place)>> {
        if devices.iter().all(|device| device.address.is_none()) {
            return Ok(self.groups.place(devices, None));
        }
        if self.machine.get().is_none() {
            let read = topology::sysfs::this_host().map_err(|why| {
                let remedy =
                    "where cards and GPUs are is read there; describe the machine to the fabric instead";
                Error::new(ErrorKind::Io, "open", format!("{why}; {remedy}"))
            })?;
            let _ = self.machine.set(Arc::new(read));
        }
        Ok(self.groups.place(devices, self.machine.get().map(|machine| &**machine)))
    }
}

impl RailGroups {
    /// Sorts `devices` by their groups; the rails of each, and where it is.
    pub(super) fn place(
        &self,
        devices: &mut [DeviceInfo],
        machine: Option<&Machine>,
    ) -> Vec<(Range<usize>, Place)> {
        let places = match (self, machine) {
            (Self::Listed(groups), _) => listed(groups, devices, machine),
            (Self::Nearest, Some(machine)) => nearest(devices, machine),
            (Self::Nearest, None) => Vec::new(),
        };
        // The backends' own numbers come after ours.
        devices.sort_by_key(|device| device.group.unwrap_or(u32::MAX));
        let rails = grouped(devices).into_iter();
        let place = |rails: Range<usize>| {
            let number = devices[rails.start].group.map(|number| number as usize);
            let place = number.and_then(|number| places.get(number)).cloned();
            (rails, place.unwrap_or_default())
        };
        rails.map(place).collect()
    }

    /// That every listed device is one of `known`.
    pub(super) fn check(&self, known: &[&str]) -> Result<()> {
        let Self::Listed(groups) = self else { return Ok(()) };
        let mut seen = Vec::new();
        for name in groups.iter().flat_map(|group| &group.devices) {
            let refuse = |why: String| Err(Error::new(ErrorKind::InvalidRequest, "open", why));
            if !known.contains(&name.as_str()) {
                return refuse(format!(
                    "rail groups name the device {name:?}, which was not opened; there are: {}",
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

/// Numbers the devices that the machine knows by their groups, and the others behind them.
fn nearest(devices: &mut [DeviceInfo], machine: &Machine) -> Vec<Place> {
    let cards: Vec<Address> = devices.iter().filter_map(|device| device.address).collect();
    let groups = rail_groups_of(machine, &cards);
    let group = |address| groups.iter().position(|group| group.cards.contains(&address));
    for device in devices {
        match device.address.and_then(group) {
            Some(number) => device.group = Some(number as u32),
            None => {
                if let Some(address) = device.address {
                    let name = &device.name;
                    tracing::warn!(name, %address, "the machine's description lacks a device: nothing is known of its place");
                }
                device.group = device.group.map(|number| number.saturating_add(groups.len() as u32));
            }
        }
    }
    groups.iter().map(Place::from).collect()
}

fn listed(groups: &[ListedGroup], devices: &mut [DeviceInfo], machine: Option<&Machine>) -> Vec<Place> {
    let mut places = Vec::new();
    for device in devices.iter_mut() {
        let number = groups.iter().position(|group| group.devices.contains(&device.name));
        device.group = number.map(|number| number as u32);
    }
    // Whom they serve is still what is nearest: to cards that are all in one group, or in several.
    for (number, group) in (0_u32..).zip(groups) {
        let cards: Vec<Address> = devices
            .iter()
            .filter(|device| device.group == Some(number))
            .filter_map(|device| device.address)
            .collect();
        let near = machine.map(|machine| rail_groups_of(machine, &cards)).unwrap_or_default();
        let node = near.iter().find_map(|group| group.node);
        places.push(Place { node, core: group.core, ..Place::default() });
    }
    let Some(machine) = machine else { return places };
    let all: Vec<Address> = devices.iter().filter_map(|device| device.address).collect();
    for near in rail_groups_of(machine, &all) {
        let number = devices
            .iter()
            .find(|device| device.address.is_some_and(|address| near.cards.contains(&address)))
            .and_then(|device| device.group);
        if let Some(place) = number.and_then(|number| places.get_mut(number as usize)) {
            place.gpus.extend(near.gpus);
            place.distance = place.distance.max(near.distance);
        }
    }
    places
}

impl FromStr for RailGroups {
    type Err = Error;

    /// `nearest`, or groups between semicolons, each a list of devices with commas and perhaps a
    /// CPU: `rdmap79s0,rdmap80s0@5;rdmap96s0@17`.
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
                    let core = number.map_err(|_| refuse(format!("{cpu:?} is no number of a CPU")))?;
                    (names, Some(core))
                }
            };
            let devices: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            if devices.iter().any(String::is_empty) {
                let why = "a name is missing; groups look like rdmap79s0,rdmap80s0@5;rdmap96s0";
                return Err(refuse(format!("{text:?}: {why}")));
            }
            Ok(ListedGroup { devices, core })
        };
        text.split(';').map(group).collect::<Result<_>>().map(Self::Listed)
    }
}

#[cfg(test)]
mod tests;
