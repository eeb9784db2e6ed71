//! The backend around a backend.

use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe, Result, Staging};

use crate::domain::StagedDomain;

/// A backend whose devices stage the memory that they refuse. It goes by the name of the one within.
pub struct Staged {
    inner: Arc<dyn Backend>,
    staging: Staging,
}

impl Staged {
    /// `inner`'s devices, which stage when `staging` says; with `Never` they are as they were.
    ///
    /// Peers whose devices do not stage are reached as ever, but for staged regions.
    pub fn new(inner: Arc<dyn Backend>, staging: Staging) -> Self {
        Self { inner, staging }
    }
}

impl Backend for Staged {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn probe(&self) -> Probe {
        let mut devices = self.inner.probe()?;
        let staging = match self.staging {
            Staging::Never => "",
            Staging::WhereRefused => ", staged where refused",
            Staging::Always => ", all staged",
        };
        devices.iter_mut().for_each(|device| device.about.push_str(staging));
        Ok(devices)
    }

    fn drives(&self, card: &topology::Function) -> bool {
        self.inner.drives(card)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let domain = self.inner.open(device, setup)?;
        if self.staging == Staging::Never {
            return Ok(domain);
        }
        Ok(Arc::new(StagedDomain::new(domain, self.staging)?))
    }
}
