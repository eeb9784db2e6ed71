//! The backend around a backend of which one device fails.

use std::sync::Arc;

use multirail::spi::{Backend, DeviceInfo, Domain, DomainSetup, Probe};
use multirail::{Result, topology};

use super::RailFailure;
use super::domain::FailingDomain;

/// A backend of which one device fails. All other devices are those of the inner backend.
pub struct FailingBackend {
    inner: Arc<dyn Backend>,
    failure: Arc<RailFailure>,
}

impl FailingBackend {
    /// `inner` with this failure.
    pub fn new(inner: Arc<dyn Backend>, failure: Arc<RailFailure>) -> Self {
        Self { inner, failure }
    }
}

impl Backend for FailingBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn probe(&self) -> Probe {
        self.inner.probe()
    }

    fn drives(&self, card: &topology::Function) -> bool {
        self.inner.drives(card)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let domain = self.inner.open(device, setup)?;
        if device.name != self.failure.rail().device {
            return Ok(domain);
        }
        self.failure.opened(&setup.clock);
        Ok(Arc::new(FailingDomain::new(domain, Arc::clone(&self.failure))))
    }
}
