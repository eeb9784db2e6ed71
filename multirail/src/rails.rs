//! The rail groups of a machine, as fabrics make them, separately for each backend's cards.

use topology::{Address, Kind, Machine, RailGroup, rail_groups_for, rail_groups_of};
use transport_core::spi::{Backend, Unavailable};
use transport_core::{Error, ErrorKind, Result};

use crate::environment::MachineSettings;
use crate::{BackendChoice, Registry};

/// The rail groups of one backend's cards.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendGroups {
    /// The backend's name.
    pub backend: &'static str,
    /// The rail groups, at least one.
    pub groups: Vec<RailGroup>,
    /// The reason why the backend cannot be opened on this host, if it cannot. The groups are those that it would make.
    pub unavailable: Option<Unavailable>,
}

impl Registry {
    /// The rail groups on `machine` of each backend of `choice` with cards there, in order of preference. A card is in
    /// the groups of one backend only. A GPU is in one group of each backend.
    ///
    /// If `is_here` is true, `machine` is this host. Then a backend's cards are its probed devices, and
    /// `MULTIRAIL_GPUS` applies. The groups are those of [`FabricBuilder::open`](crate::FabricBuilder::open), unless
    /// `MULTIRAIL_RAIL_GROUPS` lists others. On other machines, and if the backend finds no device, its cards are those
    /// that it can drive ([`Backend::drives`]).
    ///
    /// # Errors
    /// `NotFound` for an unknown name. `Unsupported` if the named backend is unavailable on this host. `InvalidRequest`
    /// if `MULTIRAIL_GPUS` is invalid.
    pub fn rail_groups(
        &self,
        choice: &BackendChoice,
        machine: &Machine,
        is_here: bool,
    ) -> Result<Vec<BackendGroups>> {
        let gpus = if is_here { MachineSettings::gpus()? } else { None };
        let chosen: Vec<_> = match choice {
            BackendChoice::Named(name) => vec![self.find(name)?],
            BackendChoice::Auto => self.backends().collect(),
        };
        let mut found = Vec::new();
        for backend in chosen {
            let (cards, unavailable) = match is_here {
                true => cards_here(&**backend, choice, machine)?,
                false => (cards_of_kind(&**backend, machine), None),
            };
            let groups = match &gpus {
                Some(gpus) => rail_groups_for(machine, gpus, &cards),
                None => rail_groups_of(machine, &cards),
            };
            if !groups.is_empty() {
                found.push(BackendGroups { backend: backend.name(), groups, unavailable });
            }
        }
        Ok(found)
    }
}

/// The cards of `backend` on this host, and the reason if it cannot open them.
fn cards_here(
    backend: &dyn Backend,
    choice: &BackendChoice,
    machine: &Machine,
) -> Result<(Vec<Address>, Option<Unavailable>)> {
    // Probing loads libraries, so it is skipped if the machine has no card.
    if *choice == BackendChoice::Auto && machine.of_kind(Kind::Nic).next().is_none() {
        return Ok((Vec::new(), None));
    }
    match (backend.probe(), choice) {
        (Ok(devices), _) => Ok((devices.iter().filter_map(|device| device.address).collect(), None)),
        (Err(why), BackendChoice::Auto) => Ok((cards_of_kind(backend, machine), Some(why))),
        (Err(why), BackendChoice::Named(name)) => {
            let context = format!("{name} is unavailable: {}; {}", why.reason, why.remedy);
            Err(Error::new(ErrorKind::Unsupported, "choose backend", context))
        }
    }
}

fn cards_of_kind(backend: &dyn Backend, machine: &Machine) -> Vec<Address> {
    machine.functions.iter().filter(|card| backend.drives(card)).map(|card| card.address).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use backend_loopback::{Loopback, LoopbackConfig};
    use topology::{Description, Function};
    use transport_core::spi::{DeviceInfo, Domain, DomainSetup, Probe};
    use transport_core::{FabricBuilder, TransportConfig};

    use super::*;

    /// Loopback devices with the addresses of the machine's EFA cards.
    struct LoopbackCards(Machine);

    impl Backend for LoopbackCards {
        fn name(&self) -> &'static str {
            "cards"
        }

        fn probe(&self) -> Probe {
            let cards = cards_of_kind(self, &self.0);
            let mut devices = self.inner().probe()?;
            for (device, card) in devices.iter_mut().zip(cards) {
                (device.address, device.group) = (Some(card), None);
            }
            Ok(devices)
        }

        fn drives(&self, card: &Function) -> bool {
            topology::is_efa(card.vendor, card.device)
        }

        fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
            self.inner().open(device, setup)
        }
    }

    impl LoopbackCards {
        fn inner(&self) -> Loopback {
            Loopback::with(LoopbackConfig::default().devices(4))
        }
    }

    #[test]
    fn groups_are_those_that_a_fabric_opens() {
        let text = include_str!("../tests/machines/two-kinds-of-cards.toml");
        let machine = Description::parse(text, Path::new("two kinds")).unwrap().machine().unwrap();
        let backend = Arc::new(LoopbackCards(machine.clone()));
        let registry = Registry::empty().with(backend.clone());
        let fabric = FabricBuilder::new()
            .transport(TransportConfig::new("cards", backend))
            .topology(machine.clone())
            .caller_driven()
            .open()
            .unwrap();
        let opened = fabric.transports().remove(0);
        let rails = opened.groups.iter().zip(&opened.locations);
        let opened: Vec<(Vec<Address>, Vec<Address>, Vec<u32>)> = rails
            .map(|(rails, location)| {
                let cards = opened.devices[rails.clone()].iter().filter_map(|device| device.address);
                (location.gpus.clone(), cards.collect(), location.cores.clone())
            })
            .collect();
        assert_eq!(opened.len(), 4);
        for is_here in [false, true] {
            let found = registry.rail_groups(&BackendChoice::Auto, &machine, is_here).unwrap();
            let groups = found.iter().flat_map(|backend| backend.groups.clone());
            let groups: Vec<_> = groups.map(|group| (group.gpus, group.cards, group.cores)).collect();
            assert_eq!(groups, opened, "{is_here}");
        }
    }
}
