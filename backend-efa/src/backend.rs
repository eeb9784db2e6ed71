//! The backend: a provider and the devices it drives.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result, Unavailable};

use crate::domain::EfaDomain;
use crate::library::{Info, VARIABLE, is_of_cards, library, offers};

/// Which provider, and how much of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EfaConfig {
    /// libfabric's name: `efa`, `efa-direct`, `tcp`, `tcp;ofi_rxm`, `shm`, ...
    pub provider: String,
    /// The local address or host name to use, for providers on sockets.
    pub node: Option<String>,
    /// Domains of a provider without cards, each a rail. Cards are one domain each.
    pub domains: u32,
}

impl Default for EfaConfig {
    fn default() -> Self {
        Self { provider: "efa".to_owned(), node: None, domains: 1 }
    }
}

impl EfaConfig {
    /// Another provider.
    pub fn provider(mut self, provider: impl Into<String>) -> Self {
        self.provider = provider.into();
        self
    }

    /// The local address to use.
    pub fn node(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// So many domains, at least one.
    pub fn domains(mut self, domains: u32) -> Self {
        self.domains = domains.max(1);
        self
    }
}

/// libfabric's devices of one provider.
#[derive(Debug, Clone, Default)]
pub struct Efa {
    config: EfaConfig,
    /// What was found last: to ask libfabric anew for each of 32 cards takes seconds.
    found: Arc<Mutex<Vec<Found>>>,
}

/// A device and what opens it.
#[derive(Debug)]
struct Found {
    name: String,
    info: Info,
}

impl Efa {
    /// EFA cards.
    pub fn new() -> Self {
        Self::default()
    }

    /// As `config` says.
    pub fn with(config: EfaConfig) -> Self {
        Self { config, ..Self::default() }
    }

    fn found(&self) -> MutexGuard<'_, Vec<Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The provider's devices: every card once, or as many domains of the first entry as
    /// are asked for.
    fn find(&self) -> Result<Vec<Found>> {
        let infos = offers(&self.config.provider, self.config.node.as_deref())?;
        if infos.iter().any(|info| info.card().is_some()) {
            let mut cards: Vec<Found> = Vec::new();
            for info in infos {
                let name = card_name(&info);
                if cards.iter().all(|card| card.name != name) {
                    cards.push(Found { name, info });
                }
            }
            return Ok(cards);
        }
        let Some(first) = infos.first() else { return Ok(Vec::new()) };
        let name = |number| match number {
            0 => first.domain_name(),
            _ => format!("{}.{number}", first.domain_name()),
        };
        (0..self.config.domains).map(|number| Ok(Found { name: name(number), info: first.copy()? })).collect()
    }

    fn unavailable(&self) -> Unavailable {
        let provider = &self.config.provider;
        let reason = format!("libfabric's provider {provider} has no device here");
        let remedy = match is_of_cards(provider) {
            true => {
                "run on an instance with EFA and its driver, give the container /dev/infiniband, or choose \
                 another provider, like tcp"
            }
            false => "`fi_info -l` lists the providers there are",
        };
        Unavailable { reason, remedy: remedy.to_owned() }
    }
}

/// A card's name: the domain's, without the suffix of the kind of endpoint.
fn card_name(info: &Info) -> String {
    let name = info.domain_name();
    ["-rdm", "-dgrm"].iter().find_map(|suffix| name.strip_suffix(suffix)).map_or(name.clone(), str::to_owned)
}

fn describe(found: &Found) -> DeviceInfo {
    let version = library().map(|library| library.version()).unwrap_or_default();
    let (provider, fabric) = (found.info.provider(), found.info.fabric_name());
    DeviceInfo {
        name: found.name.clone(),
        about: format!("{provider} on {fabric}, libfabric {}.{}", version >> 16, version & 0xffff),
        link_bits_per_s: found.info.card().flatten(),
        address: found.info.address(),
        group: None,
    }
}

impl Backend for Efa {
    fn name(&self) -> &'static str {
        "efa"
    }

    fn probe(&self) -> Probe {
        if let Err(why) = library() {
            let remedy = format!("install libfabric (Debian: libfabric1), or name it by {VARIABLE}");
            return Err(Unavailable { reason: why.context().to_owned(), remedy });
        }
        match self.find() {
            Ok(found) if found.is_empty() => Err(self.unavailable()),
            Ok(found) => {
                let devices = found.iter().map(describe).collect();
                *self.found() = found;
                Ok(devices)
            }
            Err(why) => Err(Unavailable { reason: why.to_string(), ..self.unavailable() }),
        }
    }

    fn drives(&self, card: &topology::Function) -> bool {
        is_of_cards(&self.config.provider) && topology::is_efa(card.vendor, card.device)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let mut found = self.found();
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
