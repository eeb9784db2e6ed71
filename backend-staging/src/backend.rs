//! The public backend.

use std::sync::Arc;

use multirail_spi::{Backend, CoalescePolicy, DeviceInfo, Domain, DomainSetup, Probe, Result, StagingPolicy};

use crate::domain::StagedDomain;

/// A backend that adds staging to the devices of another backend. It has the name of that inner backend.
pub struct Staged {
    inner: Arc<dyn Backend>,
    staging: StagingPolicy,
    coalesce: Option<CoalescePolicy>,
}

impl Staged {
    /// Wraps `inner`: `staging` says which memory its devices stage. With [`StagingPolicy::Never`], and without
    /// [`coalescing`](Self::coalescing), the devices are unchanged.
    ///
    /// A peer that does not stage can still be connected to. Only its access to staged regions is refused.
    pub fn new(inner: Arc<dyn Backend>, staging: StagingPolicy) -> Self {
        Self { inner, staging, coalesce: None }
    }

    /// Lets small pages share work requests, through slots of both sides. Both sides must allow it. `policy` is for
    /// operations that state none; with [`CoalescePolicy::Never`] only those operations coalesce that ask for it.
    ///
    /// It takes 8.3 MiB of registered memory in each process for each connection of a rail.
    pub fn coalescing(mut self, policy: CoalescePolicy) -> Self {
        self.coalesce = Some(policy);
        self
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
        let coalescing = if self.coalesce.is_some() { ", coalesces small pages" } else { "" };
        for device in &mut devices {
            device.about.push_str(staging);
            device.about.push_str(coalescing);
        }
        Ok(devices)
    }

    fn drives(&self, card: &topology::Function) -> bool {
        self.inner.drives(card)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let domain = self.inner.open(device, setup)?;
        if self.staging == StagingPolicy::Never && self.coalesce.is_none() {
            return Ok(domain);
        }
        Ok(Arc::new(StagedDomain::new(domain, self.staging, self.coalesce)?))
    }
}
