//! The backends that the options choose and configure.

use std::sync::Arc;

use multirail::spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe};
use multirail::{
    BackendChoice, Efa, FabricBuilder, Registry, Staged, StagingPolicy, Verbs, efa_config, staged_if_asked,
    verbs_config,
};

use crate::failure::Failure;
use crate::settings::{Settings, wrong};

/// The most rails of a transport.
const MAX_RAILS: u32 = 64;

/// A builder with the transports that the options choose.
pub fn builder(settings: &Settings<'_>) -> Result<FabricBuilder, Failure> {
    let mut registry = configured(settings)?;
    if let Some(names) = settings.list("devices")? {
        registry = restricted(&registry, &names)?;
    }
    let names = settings.list("transports")?;
    match names.as_deref() {
        None => Ok(registry.builder(&BackendChoice::from_env()?)?),
        Some(["auto"]) => Ok(registry.builder(&BackendChoice::Auto)?),
        Some([name]) => Ok(registry.builder(&BackendChoice::Named((*name).to_owned()))?),
        Some(names) => {
            let registry = ordered(&registry, names)?;
            Ok(registry.builder(&BackendChoice::Auto)?)
        }
    }
}

/// All backends, with the options instead of the environment where both say something.
fn configured(settings: &Settings<'_>) -> Result<Registry, Failure> {
    let staging = settings.parsed::<StagingPolicy>("staging")?;
    let staged = |backend: Arc<dyn Backend>| match staging {
        Some(StagingPolicy::Never) => backend,
        Some(policy) => Arc::new(Staged::new(backend, policy)),
        None => staged_if_asked(backend),
    };
    let mut registry = Registry::standard();
    if let Some(efa) = efa(settings, staging.is_some())? {
        registry = registry.with(staged(Arc::new(efa)));
    }
    if let Some(verbs) = verbs(settings, staging.is_some())? {
        registry = registry.with(staged(Arc::new(verbs)));
    }
    Ok(registry)
}

/// The backend `efa` with its options, if there are any or if it must be made anew.
fn efa(settings: &Settings<'_>, anew: bool) -> Result<Option<Efa>, Failure> {
    let (provider, node) = (settings.text("provider"), settings.text("node"));
    let domains = settings.number("domains", 1..=MAX_RAILS)?;
    if provider.is_none() && node.is_none() && domains.is_none() && !anew {
        return Ok(None);
    }
    let mut config = efa_config()?;
    if let Some(provider) = provider {
        config = config.provider(provider);
    }
    if let Some(node) = node {
        config = config.node(node);
    }
    if let Some(domains) = domains {
        config = config.domains(domains);
    }
    Ok(Some(Efa::with(config)))
}

/// The backend `verbs` with its options, if there are any or if it must be made anew.
fn verbs(settings: &Settings<'_>, anew: bool) -> Result<Option<Verbs>, Failure> {
    let queue_pairs = settings.number("queue_pairs", 1..=16)?;
    let gid_index = settings.number("gid_index", 0..=u8::MAX)?;
    let traffic_class = settings.number("traffic_class", 0..=u8::MAX)?;
    let service_level = settings.number("service_level", 0..=7)?;
    let given = [queue_pairs, gid_index, traffic_class, service_level];
    if given.iter().all(Option::is_none) && !anew {
        return Ok(None);
    }
    let mut config = verbs_config()?;
    if let Some(pairs) = queue_pairs {
        config = config.queue_pairs(pairs);
    }
    if let Some(index) = gid_index {
        config = config.gid_index(index);
    }
    if let Some(class) = traffic_class {
        config = config.traffic_class(class);
    }
    if let Some(level) = service_level {
        config = config.service_level(level);
    }
    Ok(Some(Verbs::with(config)))
}

/// These backends, in this order. All of them must be available.
fn ordered(registry: &Registry, names: &[&str]) -> Result<Registry, Failure> {
    let mut ordered = Registry::empty();
    for (at, name) in names.iter().enumerate() {
        if *name == "auto" || names[..at].contains(name) {
            let why = "give each backend once, or \"auto\" alone";
            return Err(wrong("transports", &names.join(","), why));
        }
        registry.transports(&BackendChoice::Named((*name).to_owned()))?;
        ordered = ordered.with(Arc::clone(registry.find(name)?));
    }
    Ok(ordered)
}

/// The same backends with these devices alone.
fn restricted(registry: &Registry, names: &[&str]) -> Result<Registry, Failure> {
    let (mut restricted, mut found) = (Registry::empty(), Vec::new());
    for row in registry.rows() {
        let devices = row.probe.unwrap_or_default();
        let chosen: Vec<String> = devices.iter().map(|device| device.name.clone()).collect();
        let only: Vec<String> =
            chosen.iter().filter(|name| names.contains(&name.as_str())).cloned().collect();
        found.extend(chosen);
        let backend = Arc::clone(registry.find(row.name)?);
        restricted = restricted.with(match only.is_empty() {
            true => backend,
            false => Arc::new(Restricted { backend, only }),
        });
    }
    match names.iter().find(|name| !found.iter().any(|known| known == *name)) {
        Some(name) => {
            let why = format!("there is no device {name:?}; the devices are {}", found.join(", "));
            Err(wrong("devices", &names.join(","), &why))
        }
        None => Ok(restricted),
    }
}

/// A backend with some of its devices.
struct Restricted {
    backend: Arc<dyn Backend>,
    only: Vec<String>,
}

impl Backend for Restricted {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn probe(&self) -> Probe {
        let mut devices = self.backend.probe()?;
        devices.retain(|device| self.only.contains(&device.name));
        Ok(devices)
    }

    fn drives(&self, card: &multirail::topology::Function) -> bool {
        self.backend.drives(card)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> multirail::Result<Arc<dyn Domain>> {
        self.backend.open(device, setup)
    }
}
