//! Every backend by name.

use std::sync::Arc;

use transport_core::spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe, Unavailable};
use transport_core::{Error, ErrorKind, FabricBuilder, Result, TransportConfig};

#[cfg(doc)]
use crate::MachineSource;
use crate::machine::{RAIL_GROUPS, Wishes};
use crate::{BackendChoice, RailGroups, libfabric, libibverbs, loopback, staged_if_asked};

/// The backends a program knows, in order of preference.
#[derive(Clone)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

/// What [`Registry::rows`] says about one backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendRow {
    /// The name users type.
    pub name: &'static str,
    /// The devices that can be opened now, or why there are none.
    pub probe: Probe,
}

impl Registry {
    /// No backends; add some with [`Registry::with`].
    pub fn empty() -> Self {
        Self { backends: Vec::new() }
    }

    /// All of multirail's backends: `loopback`, `efa`, `verbs`.
    ///
    /// `MULTIRAIL_LOOPBACK_STAGING` says when loopback may stage memory of other
    /// processes: `1` where the kernel refuses the way to it, `always`, or `0`, which is
    /// the default. `MULTIRAIL_LOOPBACK_THREADS` says how many threads copy what is large
    /// or many, 1 to 64: a device, a rail group and a worker each. Without it two, or one
    /// where this process has one core. `MULTIRAIL_GPU_BLOCKS` says how many processors of a GPU
    /// copy pages at once, 1 to 1024, else 32; `MULTIRAIL_GPU_SIDE` which GPU copies what goes from
    /// one to another, `receiver` or `sender`. With anything else in one of them loopback is
    /// unavailable, and says so. `efa` is as [`efa_config`](crate::efa_config) says, `verbs` as
    /// [`verbs_config`](crate::verbs_config); `MULTIRAIL_STAGING` says when these two stage memory that
    /// their cards refuse, as that of GPUs without a DMA-BUF: `1` then, `always`, or `0`, which is the default.
    pub fn standard() -> Self {
        Self::empty()
            .with(loopback::from_environment())
            .with(staged_if_asked(libfabric::from_environment()))
            .with(staged_if_asked(libibverbs::from_environment()))
    }

    /// Adds a backend behind those that are there. One of the same name is replaced.
    pub fn with(mut self, backend: Arc<dyn Backend>) -> Self {
        match self.backends.iter_mut().find(|known| known.name() == backend.name()) {
            Some(known) => *known = backend,
            None => self.backends.push(backend),
        }
        self
    }

    /// The names, in order of preference.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.backends.iter().map(|backend| backend.name())
    }

    /// The backends, in order of preference.
    pub(crate) fn backends(&self) -> impl Iterator<Item = &Arc<dyn Backend>> {
        self.backends.iter()
    }

    /// The backend of that name.
    ///
    /// # Errors
    /// `NotFound`, with the names there are.
    pub fn find(&self, name: &str) -> Result<&Arc<dyn Backend>> {
        self.backends.iter().find(|backend| backend.name() == name).ok_or_else(|| {
            let context = format!("no backend is called {name:?}; choose auto or one of: {}", self.list());
            Error::new(ErrorKind::NotFound, "choose backend", context)
        })
    }

    /// Probes every backend.
    pub fn rows(&self) -> Vec<BackendRow> {
        self.backends
            .iter()
            .map(|backend| BackendRow { name: backend.name(), probe: backend.probe() })
            .collect()
    }

    /// A builder with the transports of `choice`.
    ///
    /// `MULTIRAIL_RAIL_GROUPS` says which devices make a rail group, as [`RailGroups`] reads it;
    /// without it these follow from the machine. Devices of backends that are not chosen may be
    /// named too. `MULTIRAIL_GPUS` lists the GPUs to be served by their PCI addresses, with commas;
    /// `MULTIRAIL_TOPOLOGY` names another source of the machine than `/sys`, as [`MachineSource`]
    /// reads it.
    ///
    /// # Errors
    /// As [`Registry::transports`]; `InvalidRequest` and `Io` where these variables make no sense.
    pub fn builder(&self, choice: &BackendChoice) -> Result<FabricBuilder> {
        let transports = self.transports(choice)?;
        let Wishes { groups, gpus, machine } = Wishes::from_environment()?;
        let mut builder = FabricBuilder::new();
        if let Some(groups) = groups {
            builder = builder.rail_groups(self.of_devices(groups, &transports)?);
        }
        if let Some(gpus) = gpus {
            builder = builder.gpus(gpus);
        }
        if let Some(machine) = machine {
            builder = builder.topology(machine);
        }
        Ok(transports.into_iter().fold(builder, FabricBuilder::transport))
    }

    /// The groups without devices of other backends' than these transports'. Others are refused.
    fn of_devices(&self, groups: RailGroups, transports: &[TransportConfig]) -> Result<RailGroups> {
        let chosen: Vec<&str> = transports.iter().flat_map(TransportConfig::device_names).collect();
        if groups.listed().any(|name| !chosen.contains(&name)) {
            let found: Vec<_> =
                self.backends.iter().filter_map(|backend| backend.probe().ok()).flatten().collect();
            let is_there = |name: &&str| found.iter().any(|device| device.name == **name);
            if let Some(name) = groups.listed().find(|name| !is_there(name)) {
                let there: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
                let context = format!("{RAIL_GROUPS} names {name:?}; the devices are: {}", there.join(", "));
                return Err(Error::new(ErrorKind::InvalidRequest, "read the environment", context));
            }
        }
        Ok(groups.only(&chosen))
    }

    /// The transports that `choice` means, labelled with their backend's name.
    ///
    /// # Errors
    /// `NotFound` for an unknown name; `Unsupported` where the chosen backend, or
    /// with `Auto` every backend, is unavailable.
    pub fn transports(&self, choice: &BackendChoice) -> Result<Vec<TransportConfig>> {
        match choice {
            BackendChoice::Named(name) => Ok(vec![self.named(name)?]),
            BackendChoice::Auto => self.available(),
        }
    }

    fn named(&self, name: &str) -> Result<TransportConfig> {
        let backend = self.find(name)?;
        match backend.probe() {
            Ok(devices) => Ok(transport(backend, devices)),
            Err(why) => Err(Error::new(
                ErrorKind::Unsupported,
                "choose backend",
                format!(
                    "{name} is unavailable: {}; {}; the backends are: {}",
                    why.reason,
                    why.remedy,
                    self.list()
                ),
            )),
        }
    }

    fn available(&self) -> Result<Vec<TransportConfig>> {
        let mut chosen = Vec::new();
        let mut reasons = Vec::new();
        for backend in &self.backends {
            match backend.probe() {
                Ok(devices) => {
                    tracing::info!(backend = backend.name(), devices = devices.len(), "auto: taken");
                    chosen.push(transport(backend, devices));
                }
                Err(why) => {
                    tracing::info!(backend = backend.name(), reason = %why.reason, "auto: not available");
                    reasons.push(format!("{}: {}", backend.name(), why.reason));
                }
            }
        }
        if chosen.is_empty() {
            let context = format!(
                "no backend is available ({}); `multirail info` says what would mend it",
                reasons.join("; ")
            );
            return Err(Error::new(ErrorKind::Unsupported, "choose backend", context));
        }
        Ok(chosen)
    }

    fn list(&self) -> String {
        self.names().collect::<Vec<_>>().join(", ")
    }
}

fn transport(backend: &Arc<dyn Backend>, devices: Vec<DeviceInfo>) -> TransportConfig {
    TransportConfig::new(backend.name(), Arc::clone(backend)).devices(devices)
}

/// A backend whose name is taken but which cannot be had.
pub(crate) struct Absent {
    pub name: &'static str,
    pub reason: String,
    pub remedy: String,
}

impl Absent {
    /// One whose settings, `what`, say something else than they may.
    pub(crate) fn misunderstood(name: &'static str, what: &str, why: &Error) -> Arc<Self> {
        let reason = format!("{what} is not understood");
        Arc::new(Self { name, reason, remedy: why.context().to_owned() })
    }

    fn why(&self) -> Unavailable {
        Unavailable { reason: self.reason.clone(), remedy: self.remedy.clone() }
    }
}

impl Backend for Absent {
    fn name(&self) -> &'static str {
        self.name
    }

    fn probe(&self) -> Probe {
        Err(self.why())
    }

    fn open(&self, _device: &DeviceInfo, _setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let Unavailable { reason, remedy } = self.why();
        Err(Error::new(ErrorKind::Unsupported, "open device", format!("{reason}; {remedy}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_names_and_no_substitute() {
        let registry = Registry::standard();
        assert_eq!(registry.names().collect::<Vec<_>>(), ["loopback", "efa", "verbs"]);
        let refused =
            |name: &str| registry.transports(&BackendChoice::Named(name.into())).err().expect("refused");
        assert_eq!(refused("tcp").kind(), ErrorKind::NotFound);
        assert!(refused("tcp").context().contains("loopback, efa, verbs"));
    }

    fn absent(name: &'static str) -> Arc<Absent> {
        Arc::new(Absent { name, reason: "not here".into(), remedy: "none".into() })
    }

    #[test]
    fn auto_without_any_says_why() {
        let registry = Registry::empty().with(absent("verbs"));
        let refused = registry.transports(&BackendChoice::Auto).err().expect("refused");
        assert!(refused.context().contains("verbs: not here"));
        let named = BackendChoice::Named("verbs".into());
        assert_eq!(registry.transports(&named).err().expect("refused").kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn a_second_of_the_same_name_replaces() {
        let registry = Registry::standard().with(absent("loopback"));
        assert_eq!(registry.names().count(), 3);
        assert!(registry.find("loopback").unwrap().probe().is_err());
    }
}
