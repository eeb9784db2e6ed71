//! The public backend.

use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe, Result, StagingPolicy};

use crate::domain::StagedDomain;

/// A backend that adds staging to the devices of another backend. It has the name of that inner backend.
pub struct Staged {
    inner: Arc<dyn Backend>,
    staging: StagingPolicy,
}

impl Staged {
    /// Wraps `inner`: `staging` says which memory its devices stage. With [`StagingPolicy::Never`] the devices are
    /// unchanged.
    ///
    /// A peer that does not stage can still be connected to. Only its access to staged regions is refused.
    pub fn new(inner: Arc<dyn Backend>, staging: StagingPolicy) -> Self {
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
            StagingPolicy::Never => "",
            StagingPolicy::WhereRefused => ", staged where refused",
            StagingPolicy::Always => ", all staged",
        };
        devices.iter_mut().for_each(|device| device.about.push_str(staging));
        Ok(devices)
    }

    fn drives(&self, card: &topology::Function) -> bool {
        self.inner.drives(card)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let domain = self.inner.open(device, setup)?;
        if self.staging == StagingPolicy::Never {
            return Ok(domain);
        }
        Ok(Arc::new(StagedDomain::new(domain, self.staging)?))
    }
}
