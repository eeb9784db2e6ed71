//! The backends by name.

use std::sync::Arc;

use transport_core::spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe, Unavailable};
use transport_core::{Error, ErrorKind, FabricBuilder, Result, TransportConfig};

#[cfg(doc)]
use crate::MachineSource;
use crate::environment::{MachineSettings, RAIL_GROUPS, path_policy};
use crate::{BackendChoice, RailGroups, libfabric, libibverbs, loopback, staged_if_asked};

/// The backends of a program, in order of preference.
#[derive(Clone)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

/// One backend in [`Registry::rows`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendRow {
    /// The name users type.
    pub name: &'static str,
    /// The devices that can be opened now, or the reason why the backend is unavailable.
    pub probe: Probe,
}

impl Registry {
    /// A registry without backends. Add some with [`Registry::with`].
    pub fn empty() -> Self {
        Self { backends: Vec::new() }
    }

    /// All of multirail's backends: `loopback`, `efa`, `verbs`.
    ///
    /// These variables configure `loopback`:
    ///
    /// - `MULTIRAIL_LOOPBACK_STAGING`: whether it stages memory of other processes: `0` (never, the default), `1` (if
    ///   the kernel refuses direct access) or `always`
    /// - `MULTIRAIL_LOOPBACK_THREADS`: the number of threads that copy large or many buffers, 1 to 64. Each has a
    ///   device, a rail group and a worker. The default is two, or one if this process has one core
    /// - `MULTIRAIL_GPU_BLOCKS`: the number of GPU blocks that copy pages at once, 1 to 1024, 32 by default
    /// - `MULTIRAIL_GPU_SIDE`: which GPU copies between two GPUs, `receiver` or `sender`
    ///
    /// [`efa_config`](crate::efa_config) configures `efa`, and [`verbs_config`](crate::verbs_config) configures
    /// `verbs`. For both, `MULTIRAIL_STAGING` enables staging of memory that a card cannot register, such as GPU memory
    /// without a DMA-BUF: `0` (never, the default), `1` (if needed) or `always`.
    ///
    /// A backend with an invalid setting is unavailable, with this reason.
    pub fn standard() -> Self {
        Self::empty()
            .with(loopback::from_environment())
            .with(staged_if_asked(libfabric::from_environment()))
            .with(staged_if_asked(libibverbs::from_environment()))
    }

    /// Adds a backend after the others. A backend with the same name is replaced.
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

    /// The backend with this name.
    ///
    /// # Errors
    /// `NotFound`, with the known names.
    pub fn find(&self, name: &str) -> Result<&Arc<dyn Backend>> {
        self.backends.iter().find(|backend| backend.name() == name).ok_or_else(|| {
            let context = format!("unknown backend {name:?}; use auto or one of: {}", self.list());
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
    /// These variables configure rail groups:
    ///
    /// - `MULTIRAIL_RAIL_GROUPS`: the devices of each rail group, see [`RailGroups`]. By default they follow from the
    ///   machine. It may also list devices of backends that are not chosen
    /// - `MULTIRAIL_GPUS`: the PCI addresses of the GPUs to serve, separated by commas
    /// - `MULTIRAIL_TOPOLOGY`: a source of the machine other than `/sys`, see [`MachineSource`]
    ///
    /// `MULTIRAIL_PATHS` names the paths that bytes may take, separated by commas: see [`PathPolicy`](transport_core::PathPolicy).
    ///
    /// # Errors
    /// As [`Registry::transports`]. `InvalidRequest` or `Io` if one of these variables is invalid.
    pub fn builder(&self, choice: &BackendChoice) -> Result<FabricBuilder> {
        let transports = self.transports(choice)?;
        let MachineSettings { groups, gpus, machine } = MachineSettings::from_environment()?;
        let mut builder = FabricBuilder::new();
        if let Some(policy) = path_policy()? {
            builder = builder.path_policy(policy);
        }
        if let Some(groups) = groups {
            builder = builder.rail_groups(self.restrict_groups(groups, &transports)?);
        }
        if let Some(gpus) = gpus {
            builder = builder.gpus(gpus);
        }
        if let Some(machine) = machine {
            builder = builder.topology(machine);
        }
        Ok(transports.into_iter().fold(builder, FabricBuilder::transport))
    }

    /// Removes devices of other backends from the groups. Fails for a device that does not exist.
    fn restrict_groups(&self, groups: RailGroups, transports: &[TransportConfig]) -> Result<RailGroups> {
        let chosen: Vec<&str> = transports.iter().flat_map(TransportConfig::device_names).collect();
        if groups.listed().any(|name| !chosen.contains(&name)) {
            let found: Vec<_> =
                self.backends.iter().filter_map(|backend| backend.probe().ok()).flatten().collect();
            let exists = |name: &&str| found.iter().any(|device| device.name == **name);
            if let Some(name) = groups.listed().find(|name| !exists(name)) {
                let known: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
                let context = format!("{RAIL_GROUPS} names {name:?}; the devices are: {}", known.join(", "));
                return Err(Error::new(ErrorKind::InvalidRequest, "read the environment", context));
            }
        }
        Ok(groups.only(&chosen))
    }

    /// The transports of `choice`, labelled with their backend's name.
    ///
    /// # Errors
    /// `NotFound` for an unknown name. `Unsupported` if the chosen backend is unavailable, or with `Auto` if all are.
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
                    tracing::info!(backend = backend.name(), devices = devices.len(), "auto: used");
                    chosen.push(transport(backend, devices));
                }
                Err(why) => {
                    tracing::info!(backend = backend.name(), reason = %why.reason, "auto: unavailable");
                    reasons.push(format!("{}: {}", backend.name(), why.reason));
                }
            }
        }
        if chosen.is_empty() {
            let context =
                format!("no backend is available ({}); `multirail info` shows the fixes", reasons.join("; "));
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

/// A backend that is unavailable because of its settings.
pub(crate) struct UnavailableBackend {
    pub name: &'static str,
    pub reason: String,
    pub remedy: String,
}

impl UnavailableBackend {
    /// A backend whose setting `what` is invalid.
    pub(crate) fn invalid_setting(name: &'static str, what: &str, why: &Error) -> Arc<Self> {
        let reason = format!("{what} is invalid");
        Arc::new(Self { name, reason, remedy: why.context().to_owned() })
    }

    fn why(&self) -> Unavailable {
        Unavailable { reason: self.reason.clone(), remedy: self.remedy.clone() }
    }
}

impl Backend for UnavailableBackend {
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
    fn three_names_and_no_fallback() {
        let registry = Registry::standard();
        assert_eq!(registry.names().collect::<Vec<_>>(), ["loopback", "efa", "verbs"]);
        let refused =
            |name: &str| registry.transports(&BackendChoice::Named(name.into())).err().expect("refused");
        assert_eq!(refused("tcp").kind(), ErrorKind::NotFound);
        assert!(refused("tcp").context().contains("loopback, efa, verbs"));
    }

    fn absent(name: &'static str) -> Arc<UnavailableBackend> {
        Arc::new(UnavailableBackend { name, reason: "not here".into(), remedy: "none".into() })
    }

    #[test]
    fn auto_without_backends_lists_the_reasons() {
        let registry = Registry::empty().with(absent("verbs"));
        let refused = registry.transports(&BackendChoice::Auto).err().expect("refused");
        assert!(refused.context().contains("verbs: not here"));
        let named = BackendChoice::Named("verbs".into());
        assert_eq!(registry.transports(&named).err().expect("refused").kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn a_second_backend_with_the_same_name_replaces_the_first() {
        let registry = Registry::standard().with(absent("loopback"));
        assert_eq!(registry.names().count(), 3);
        assert!(registry.find("loopback").unwrap().probe().is_err());
    }
}
