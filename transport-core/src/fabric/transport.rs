//! One opened transport: its domains, its engine, and whoever drives that.

use std::sync::{Arc, Mutex};

use super::{TransportConfig, lock};
use crate::engine::{Engine, EngineHandle, HandleSetup, Progress, Rail, RailCounters, RailCounts};
use crate::observe::Watch;
use crate::spi::{Capabilities, DeviceInfo, Domain, DomainSetup, MemoryRegion};
use crate::worker::Worker;
use crate::{Access, Doorbell, Error, ErrorKind, Memory, Result, Time};

pub(crate) struct Transport {
    pub label: String,
    pub backend: &'static str,
    pub devices: Vec<DeviceInfo>,
    pub domains: Vec<Arc<dyn Domain>>,
    pub engine: Arc<EngineHandle>,
    pub(super) driver: Driver,
}

pub(super) enum Driver {
    /// A thread of its own, until closed.
    Worker(Mutex<Option<Worker>>),
    /// Whoever calls `step` or waits.
    Caller(Arc<Mutex<Engine>>),
}

pub(super) struct OpenSettings {
    pub position: usize,
    pub max_operations: usize,
    pub caller_driven: bool,
    pub records: usize,
    pub watch: Arc<Watch>,
}

/// What a fabric opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransportInfo {
    /// Its label; peers match transports by it.
    pub label: String,
    /// The backend's name.
    pub backend: &'static str,
    /// The devices, one rail each.
    pub devices: Vec<DeviceInfo>,
    /// Facts and limits of the first device.
    pub capabilities: Capabilities,
}

impl Transport {
    pub(super) fn open(
        config: &TransportConfig,
        setup: &DomainSetup,
        settings: OpenSettings,
    ) -> Result<Self> {
        let devices = match &config.devices {
            Some(devices) => devices.clone(),
            None => config.backend.probe().map_err(|why| {
                let context = format!("backend {}: {}; {}", config.backend.name(), why.reason, why.remedy);
                Error::new(ErrorKind::Unsupported, "open", context)
            })?,
        };
        if devices.is_empty() {
            return Err(Error::new(
                ErrorKind::NotFound,
                "open",
                format!("transport {}: no device was chosen", config.label),
            ));
        }
        let mut domains = Vec::new();
        let mut rails = Vec::new();
        for (position, device) in devices.iter().enumerate() {
            let setup = DomainSetup { seed: setup.seed ^ ((position as u64) << 32), ..setup.clone() };
            let domain = config.backend.open(device, &setup)?;
            rails.push(Rail::open(Arc::clone(&domain))?);
            domains.push(domain);
        }
        let door = Doorbell::new()?;
        let bell = door.bell().try_clone()?;
        let handle = HandleSetup {
            transport: settings.position,
            label: config.label.clone(),
            devices: devices.iter().map(|device| device.name.clone()).collect(),
            max_operations: settings.max_operations,
            records: settings.records,
            watch: settings.watch,
        };
        let engine = Arc::new(EngineHandle::new(handle, bell));
        let driven = Engine::new(Arc::clone(&engine), rails, Arc::clone(&setup.clock));
        let driver = if settings.caller_driven {
            let driven = Arc::new(Mutex::new(driven));
            engine.drive_by_caller(&driven);
            Driver::Caller(driven)
        } else {
            Driver::Worker(Mutex::new(Some(Worker::start(&format!("mr-{}", config.label), driven, door)?)))
        };
        Ok(Self {
            label: config.label.clone(),
            backend: config.backend.name(),
            devices,
            domains,
            engine,
            driver,
        })
    }

    /// Registers memory on every rail.
    ///
    /// # Safety
    /// As [`Domain::register`].
    pub(super) unsafe fn register(
        &self,
        memory: &Arc<dyn Memory>,
        access: Access,
    ) -> Result<Vec<Arc<dyn MemoryRegion>>> {
        // SAFETY: handed on to the caller.
        self.domains.iter().map(|domain| unsafe { domain.register(Arc::clone(memory), access) }).collect()
    }

    pub(super) fn step(&self) -> Option<Progress> {
        match &self.driver {
            Driver::Caller(engine) => {
                let turn = lock(engine).step();
                // Between two turns: the hook may look at the engine.
                self.engine.watch.report();
                Some(turn)
            }
            Driver::Worker(_) => None,
        }
    }

    /// When a caller-driven engine has something to do by itself.
    pub(super) fn due(&self) -> Time {
        match &self.driver {
            Driver::Caller(engine) => lock(engine).due(),
            Driver::Worker(_) => Time::NEVER,
        }
    }

    pub(super) fn address(&self) -> (String, Vec<u64>) {
        (self.label.clone(), self.domains.iter().map(|domain| domain.id()).collect())
    }

    pub(super) fn info(&self) -> TransportInfo {
        TransportInfo {
            label: self.label.clone(),
            backend: self.backend,
            devices: self.devices.clone(),
            capabilities: self.domains[0].capabilities().clone(),
        }
    }

    pub(super) fn counters(&self) -> Vec<RailCounters> {
        let counts = self.engine.counts.iter().zip(&self.devices).enumerate();
        let read = |(rail, (counts, device)): (_, (&RailCounts, &DeviceInfo))| {
            counts.read(&self.label, self.backend, rail as u32, &device.name)
        };
        counts.map(read).collect()
    }

    pub(super) fn close(&self) {
        match &self.driver {
            Driver::Worker(worker) => drop(lock(worker).take()),
            Driver::Caller(engine) => lock(engine).close(),
        }
    }
}
