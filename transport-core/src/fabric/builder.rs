//! Opening a fabric.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::tenant::Lineage;
use super::transport::OpenSettings;
use super::{Fabric, FabricInner, Transport, Workers};
use crate::control::{Bootstrap, ControlSettings, Identity, Room, TcpBootstrap, Token};
use crate::observe::{StallHook, Watch};
use crate::spi::{Backend, DeviceInfo, DomainSetup};
use crate::{Admission, Clock, Dump, Error, ErrorKind, EvenShares, Result, SystemClock};

/// One transport to open: a backend, and which of its devices.
#[derive(Clone)]
pub struct TransportConfig {
    pub(super) label: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) devices: Option<Vec<DeviceInfo>>,
}

impl TransportConfig {
    /// All devices the backend finds. Peers match transports by `label`.
    pub fn new(label: impl Into<String>, backend: Arc<dyn Backend>) -> Self {
        Self { label: label.into(), backend, devices: None }
    }

    /// These devices, each a rail.
    pub fn devices(mut self, devices: Vec<DeviceInfo>) -> Self {
        self.devices = Some(devices);
        self
    }
}

/// Settings of a fabric; [`FabricBuilder::open`] opens it.
#[derive(Clone)]
pub struct FabricBuilder {
    transports: Vec<TransportConfig>,
    clock: Arc<dyn Clock>,
    seed: Option<u64>,
    incarnation: Option<u64>,
    caller_driven: bool,
    workers: Workers,
    max_operations: usize,
    deadline: Duration,
    settings: ControlSettings,
    bootstrap: Arc<dyn Bootstrap>,
    pub(super) token: Option<Token>,
    records: usize,
    stall_after: Duration,
    on_stall: Option<StallHook>,
    admission: Arc<dyn Admission>,
}

impl Default for FabricBuilder {
    fn default() -> Self {
        Self {
            transports: Vec::new(),
            clock: Arc::new(SystemClock::default()),
            seed: None,
            incarnation: None,
            caller_driven: false,
            workers: Workers::default(),
            max_operations: 4096,
            deadline: Duration::from_secs(30),
            settings: ControlSettings::default(),
            bootstrap: Arc::new(TcpBootstrap::default()),
            token: None,
            records: 4096,
            stall_after: Duration::from_secs(1),
            on_stall: None,
            admission: Arc::new(EvenShares),
        }
    }
}

impl FabricBuilder {
    /// The defaults, and no transport yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a transport; the first added is preferred.
    pub fn transport(mut self, transport: TransportConfig) -> Self {
        self.transports.push(transport);
        self
    }

    /// Where the engines take the time from.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Seed of every random choice; a random one by default.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The number of this opening; a random one by default.
    pub fn incarnation(mut self, incarnation: u64) -> Self {
        self.incarnation = Some(incarnation);
        self
    }

    /// No worker threads: the caller drives the engines by [`Fabric::step`], or by waiting
    /// in [`wait`](crate::wait) or a `wait` method.
    pub fn caller_driven(mut self) -> Self {
        self.caller_driven = true;
        self
    }

    /// The threads that drive the engines, and how they post. Default: one per rail group.
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// Operations that may be under way at once, per rail group. Default 4096.
    pub fn max_operations(mut self, operations: usize) -> Self {
        self.max_operations = operations;
        self
    }

    /// Deadline of operations that state none. Default 30 s.
    pub fn deadline(mut self, span: Duration) -> Self {
        self.deadline = span;
        self
    }

    /// How often we show peers that we live. Default 500 ms.
    pub fn heartbeat(mut self, span: Duration) -> Self {
        self.settings.heartbeat = span;
        self
    }

    /// Silence after which a peer counts as dead. Default 3 s; `Duration::MAX` never.
    pub fn peer_timeout(mut self, span: Duration) -> Self {
        self.settings.peer_timeout = span;
        self
    }

    /// Time that a new peer has to greet, to pair all its rails, and to answer a lookup. Default 5 s.
    pub fn handshake_limit(mut self, span: Duration) -> Self {
        self.settings.handshake_limit = span;
        self
    }

    /// How peers find each other and exchange control frames. Default TCP.
    pub fn bootstrap(mut self, bootstrap: Arc<dyn Bootstrap>) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    /// Meets only peers that have the same token; both sides prove it.
    ///
    /// A stranger learns that somebody listens and asks for a token, nothing else. A
    /// peer with another token or none ends with `Permission`, on both sides, and so
    /// does a peer that asks for a token here. Fabrics that are connected by
    /// [`Fabric::connect_local`] prove nothing: one caller holds both.
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Records that each transport's flight recorder keeps, rounded up to a power of
    /// two, of 40 bytes each. Default 4096; 0 records nothing.
    pub fn flight_recorder(mut self, records: usize) -> Self {
        self.records = records;
        self
    }

    /// How long an operation may make no progress until it counts as stalled: a
    /// warning of `tracing` then says what it waits for, and [`FabricBuilder::on_stall`]
    /// is called, once per stall. Default 1 s; `Duration::MAX` never.
    ///
    /// Receives wait for as long as it takes, and are no stalls.
    pub fn stall_after(mut self, span: Duration) -> Self {
        self.stall_after = span;
        self
    }

    /// Called with a dump when operations stall; [`Dump::stalled`] has them. On a
    /// thread of its own, or in the driving thread of a caller-driven fabric.
    pub fn on_stall(mut self, hook: Arc<dyn Fn(&Dump) + Send + Sync>) -> Self {
        self.on_stall = Some(hook);
        self
    }

    /// Decides how much each peer may send us. Default [`EvenShares`].
    pub fn admission(mut self, admission: Arc<dyn Admission>) -> Self {
        self.admission = admission;
        self
    }

    /// Opens every transport and starts its workers.
    pub fn open(self) -> Result<Fabric> {
        let lineage = Lineage::root(&self);
        self.open_as(lineage)
    }

    /// With seed and incarnation moved, where they are given.
    pub(super) fn apart(mut self, by: u64) -> Self {
        self.seed = self.seed.map(|seed| seed.wrapping_add(by));
        self.incarnation = self.incarnation.map(|incarnation| incarnation.wrapping_add(by));
        self
    }

    pub(super) fn open_as(self, lineage: Lineage) -> Result<Fabric> {
        self.check()?;
        let seed = self.seed.map_or_else(|| random("open"), Ok)?;
        let incarnation = self.incarnation.map_or_else(|| random("open"), Ok)?;
        let watch = Arc::new(Watch::new(self.stall_after, self.on_stall));
        let (mut transports, mut groups) = (Vec::new(), 0);
        for (position, config) in self.transports.iter().enumerate() {
            let setup = DomainSetup {
                clock: Arc::clone(&self.clock),
                seed: seed.wrapping_add(position as u64),
                incarnation,
            };
            let settings = OpenSettings {
                position,
                first_group: groups,
                max_operations: self.max_operations,
                caller_driven: self.caller_driven,
                records: self.records,
                watch: Arc::clone(&watch),
                workers: &self.workers,
                admission: Arc::clone(&self.admission),
            };
            let transport = Transport::open(config, &setup, settings)?;
            groups += transport.groups.len();
            transports.push(transport);
        }
        static FABRICS: AtomicU64 = AtomicU64::new(1);
        let fabric = Arc::new(FabricInner {
            id: FABRICS.fetch_add(1, Ordering::Relaxed),
            lineage,
            identity: Identity { incarnation, host: host_name() },
            clock: self.clock,
            default_deadline: self.deadline,
            transports,
            settings: self.settings,
            bootstrap: self.bootstrap,
            control: Mutex::new(None),
            room: Room::default(),
            published: Mutex::new(HashMap::new()),
            peers: Mutex::new(HashMap::new()),
            next_region: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        });
        watch.over(&fabric);
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
        if self.stall_after.is_zero() {
            return refuse("stall_after is zero; take Duration::MAX to turn the watch off".into());
        }
        if self.settings.handshake_limit.is_zero() {
            return refuse("handshake_limit is zero; nobody connects within that".into());
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
