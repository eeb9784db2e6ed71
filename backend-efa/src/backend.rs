//! The backend: a provider of libfabric, and its devices.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result, Unavailable};

use crate::domain::EfaDomain;
use crate::library::{Info, LIBRARY_VARIABLE, find_infos, is_efa_provider, library};

/// Which provider and which of its devices the backend uses.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EfaConfig {
    /// libfabric's name of the provider: `efa`, `efa-direct`, `tcp`, `tcp;ofi_rxm`, `shm`, ...
    pub provider: String,
    /// The local address or host name to use, for providers on sockets. Several, with commas between them, give rails on
    /// several interfaces: one address per interface.
    pub node: Option<String>,
    /// The number of domains of a provider without cards. Each domain is a rail. A card always has one domain.
    pub domains: u32,
}

impl Default for EfaConfig {
    fn default() -> Self {
        Self { provider: "efa".to_owned(), node: None, domains: 1 }
    }
}

impl EfaConfig {
    /// Uses another provider.
    pub fn provider(mut self, provider: impl Into<String>) -> Self {
        self.provider = provider.into();
        self
    }

    /// Uses this local address, or these, with commas between them.
    pub fn node(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// Opens this number of domains, at least one.
    pub fn domains(mut self, domains: u32) -> Self {
        self.domains = domains.max(1);
        self
    }
}

/// The devices of one provider of libfabric.
#[derive(Debug, Clone, Default)]
pub struct Efa {
    config: EfaConfig,
    /// The devices of the last search: a search for each of 32 cards would take seconds.
    found: Arc<Mutex<Vec<FoundDevice>>>,
}

/// A device, and the `fi_info` to open it with.
#[derive(Debug)]
struct FoundDevice {
    name: String,
    info: Info,
}

impl Efa {
    /// A backend for EFA cards.
    pub fn new() -> Self {
        Self::default()
    }

    /// A backend with these settings.
    pub fn with(config: EfaConfig) -> Self {
        Self { config, ..Self::default() }
    }

    fn lock_found(&self) -> MutexGuard<'_, Vec<FoundDevice>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The provider's devices: every card once, or the configured number of domains for each configured address.
    fn find(&self) -> Result<Vec<FoundDevice>> {
        let Some(nodes) = &self.config.node else { return self.find_at(None) };
        let mut found: Vec<FoundDevice> = Vec::new();
        for node in nodes.split(',').map(str::trim).filter(|node| !node.is_empty()) {
            for device in self.find_at(Some(node))? {
                let is_taken = found.iter().any(|known| known.name == device.name);
                let name = if is_taken { format!("{}@{node}", device.name) } else { device.name };
                found.push(FoundDevice { name, ..device });
            }
        }
        Ok(found)
    }

    /// The devices with a local address, or at any: every card once, or the configured number of domains of the first
    /// entry.
    fn find_at(&self, node: Option<&str>) -> Result<Vec<FoundDevice>> {
        let infos = find_infos(&self.config.provider, node)?;
        if infos.iter().any(|info| info.is_card()) {
            let mut cards: Vec<FoundDevice> = Vec::new();
            for info in infos {
                let name = card_name(&info);
                if cards.iter().all(|card| card.name != name) {
                    cards.push(FoundDevice { name, info });
                }
            }
            return Ok(cards);
        }
        let Some(first) = infos.first() else { return Ok(Vec::new()) };
        let name = |number| match number {
            0 => first.domain_name(),
            _ => format!("{}.{number}", first.domain_name()),
        };
        (0..self.config.domains)
            .map(|number| Ok(FoundDevice { name: name(number), info: first.copy()? }))
            .collect()
    }

    fn unavailable(&self) -> Unavailable {
        let provider = &self.config.provider;
        let reason = format!("libfabric's provider {provider} has no device here");
        let remedy = match is_efa_provider(provider) {
            true => {
                "run on an instance with EFA and its driver, give the container /dev/infiniband, or choose \
                 another provider, like tcp"
            }
            false => "choose a provider that `fi_info -l` lists",
        };
        Unavailable { reason, remedy: remedy.to_owned() }
    }
}

/// The name of a card: its domain's name without the suffix for the type of endpoint.
fn card_name(info: &Info) -> String {
    let name = info.domain_name();
    ["-rdm", "-dgrm"].iter().find_map(|suffix| name.strip_suffix(suffix)).map_or(name.clone(), str::to_owned)
}

fn describe(found: &FoundDevice) -> DeviceInfo {
    let version = library().map(|library| library.version()).unwrap_or_default();
    let (provider, fabric) = (found.info.provider(), found.info.fabric_name());
    DeviceInfo {
        name: found.name.clone(),
        about: format!("{provider} on {fabric}, libfabric {}.{}", version >> 16, version & 0xffff),
        link_bits_per_s: found.info.link_bits_per_s(),
        address: found.info.pci_address(),
        group: None,
    }
}

impl Backend for Efa {
    fn name(&self) -> &'static str {
        "efa"
    }

    fn probe(&self) -> Probe {
        if let Err(why) = library() {
            let remedy =
                format!("install libfabric (Debian: libfabric1), or give its path in {LIBRARY_VARIABLE}");
            return Err(Unavailable { reason: why.context().to_owned(), remedy });
        }
        match self.find() {
            Ok(found) if found.is_empty() => Err(self.unavailable()),
            Ok(found) => {
                let devices = found.iter().map(describe).collect();
                *self.lock_found() = found;
                Ok(devices)
            }
            Err(why) => Err(Unavailable { reason: why.to_string(), ..self.unavailable() }),
        }
    }

    fn drives(&self, card: &topology::Function) -> bool {
        is_efa_provider(&self.config.provider) && topology::is_efa(card.vendor, card.device)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let mut found = self.lock_found();
        if found.iter().all(|found| found.name != device.name) {
            *found = self.find()?;
        }
        let found = found.iter().find(|found| found.name == device.name).ok_or_else(|| {
            let provider = &self.config.provider;
            let context = format!("provider {provider} has no device {:?}", device.name);
            Error::new(ErrorKind::NotFound, "open", context)
        })?;
        Ok(Arc::new(EfaDomain::open(&found.info, setup)?))
    }
}
