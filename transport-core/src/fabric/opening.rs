//! Opens a fabric with the settings of a [`FabricBuilder`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::dump::report_stalls;
use super::tenant::Tenancy;
use super::transport::OpenSettings;
use super::{Fabric, FabricBuilder, FabricInner, Transport};
use crate::control::{HandshakeLimiter, Identity};
use crate::engine::trace::StallMonitor;
use crate::index::{GroupIndex, Number, TransportIndex};
use crate::op::MAX_OPERATIONS;
use crate::retained::RetainedMemory;
use crate::spi::DomainSetup;
use crate::{Error, ErrorKind, Result};

impl FabricBuilder {
    /// Opens every transport and starts its workers.
    pub fn open(self) -> Result<Fabric> {
        let tenancy = Tenancy::root(&self);
        self.open_as(tenancy)
    }

    pub(super) fn open_as(self, tenancy: Tenancy) -> Result<Fabric> {
        self.check()?;
        let seed = self.seed.map_or_else(|| random("open"), Ok)?;
        let incarnation = self.incarnation.map_or_else(|| random("open"), Ok)?;
        let retained = Arc::new(RetainedMemory::default());
        let stall_monitor = Arc::new(StallMonitor::new(self.stall_after));
        let (mut transports, mut first_group) = (Vec::new(), GroupIndex::FIRST);
        let devices = self.transports.iter().map(Transport::find_devices).collect::<Result<Vec<_>>>()?;
        let names: Vec<&str> = devices.iter().flatten().map(|device| device.name.as_str()).collect();
        self.placement.groups.check(&names)?;
        for (position, (config, devices)) in self.transports.iter().zip(devices).enumerate() {
            let setup = DomainSetup {
                clock: Arc::clone(&self.clock),
                seed: seed.wrapping_add(position as u64),
                incarnation,
                sleeps: !self.caller_driven,
            };
            let settings = OpenSettings {
                transport: TransportIndex::new(position),
                first_group,
                max_operations: self.max_operations,
                caller_driven: self.caller_driven,
                records: self.records,
                stall_monitor: Arc::clone(&stall_monitor),
                workers: &self.workers,
                placement: &self.placement,
                grant_policy: Arc::clone(&self.grant_policy),
                retained: &retained,
            };
            let transport = Transport::open(config, devices, &setup, settings)?;
            first_group = first_group.plus(transport.groups.len());
            transports.push(transport);
        }
        static FABRICS: AtomicU64 = AtomicU64::new(1);
        let fabric = Arc::new(FabricInner {
            id: FABRICS.fetch_add(1, Ordering::Relaxed),
            tenancy,
            identity: Identity { incarnation, host: host_name() },
            clock: self.clock,
            default_deadline: self.deadline,
            transports: transports.into(),
            placement: self.placement,
            settings: self.settings,
            bootstrap: self.bootstrap,
            control: Mutex::new(None),
            closing_tasks: OnceLock::new(),
            handshakes: HandshakeLimiter::default(),
            published: Mutex::new(HashMap::new()),
            peers: Mutex::new(HashMap::new()),
            next_region: AtomicU64::new(1),
            // Held by the rails that may touch the memory, if there are any.
            retained: Arc::downgrade(&retained),
            closed: AtomicBool::new(false),
        });
        let (weak, on_stall) = (Arc::downgrade(&fabric), self.on_stall);
        stall_monitor.set_reporter(Box::new(move |stalls| report_stalls(&weak, on_stall.as_ref(), stalls)));
        Ok(Fabric(fabric))
    }

    fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidRequest, "open", why));
        if self.transports.is_empty() {
            return refuse("no transport was given; add at least one".into());
        }
        let labels: Vec<_> = self.transports.iter().map(|transport| transport.label.as_str()).collect();
        if let Some(label) = labels.iter().find(|label| label.is_empty() || label.len() > 64) {
            return refuse(format!("transport label {label:?}; 1 to 64 bytes are allowed"));
        }
        if let Some(position) = (1..labels.len()).find(|at| labels[..*at].contains(&labels[*at])) {
            return refuse(format!(
                "two transports are labelled {:?}; give each its own label",
                labels[position]
            ));
        }
        if self.max_operations == 0 || self.max_operations > MAX_OPERATIONS {
            let asked = self.max_operations;
            return refuse(format!("max_operations {asked}; 1 to {MAX_OPERATIONS} are allowed"));
        }
        if self.stall_after.is_zero() {
            return refuse("stall_after is zero; take Duration::MAX to turn the stall monitor off".into());
        }
        if self.settings.handshake_limit.is_zero() {
            return refuse("handshake_limit is zero; no peer could connect in that time".into());
        }
        if self.settings.peer_timeout <= self.settings.heartbeat {
            let (timeout, beat) = (self.settings.peer_timeout, self.settings.heartbeat);
            return refuse(format!("peer_timeout {timeout:?} must be longer than heartbeat {beat:?}"));
        }
        Ok(())
    }
}

fn random(operation: &'static str) -> Result<u64> {
    getrandom::u64()
        .map_err(|e| Error::new(ErrorKind::Io, operation, format!("the system gave no random number: {e}")))
}

fn host_name() -> String {
    #[cfg(unix)]
    return rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    "localhost".to_owned()
}
