//! Settings of a fabric.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use topology::{Address, Machine};

use super::placement::PlacementPolicy;
use super::{RailGroups, Workers};
use crate::control::{Bootstrap, ControlSettings, TcpBootstrap, Token};
use crate::observe::StallHook;
use crate::spi::{Backend, DeviceInfo};
use crate::{Clock, Dump, EvenShares, GrantPolicy, SystemClock};

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

    /// The names of the devices it was given; none where the backend is asked when it is opened.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().flatten().map(|device| device.name.as_str())
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
    pub(super) transports: Vec<TransportConfig>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) seed: Option<u64>,
    pub(super) incarnation: Option<u64>,
    pub(super) caller_driven: bool,
    pub(super) workers: Workers,
    pub(super) max_operations: usize,
    pub(super) deadline: Duration,
    pub(super) settings: ControlSettings,
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) control: Option<Handle>,
    pub(super) token: Option<Token>,
    pub(super) records: usize,
    pub(super) stall_after: Duration,
    pub(super) on_stall: Option<StallHook>,
    pub(super) grant_policy: Arc<dyn GrantPolicy>,
    pub(super) placement: PlacementPolicy,
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
            control: None,
            token: None,
            records: 4096,
            stall_after: Duration::from_secs(1),
            on_stall: None,
            grant_policy: Arc::new(EvenShares),
            placement: PlacementPolicy::default(),
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

    /// No worker threads: the caller drives the engines by [`Fabric::step`](crate::Fabric::step), or by waiting
    /// in [`wait`](crate::wait) or a `wait` method. Connections have their thread: [`control_on`](Self::control_on).
    pub fn caller_driven(mut self) -> Self {
        self.caller_driven = true;
        self
    }

    /// The threads that drive the engines, and how they post. Default: one per rail group.
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// Operations that may be under way at once, per rail group: 1 to 2^24, each of which takes about 500 bytes.
    /// Default 4096.
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

    /// Silence after which a peer counts as dead. Default 5 s: a network that is away for 2 s is a silence of up
    /// to 3.5 s, until TCP repeats what was lost. `Duration::MAX` never.
    pub fn peer_timeout(mut self, span: Duration) -> Self {
        self.settings.peer_timeout = span;
        self
    }

    /// Time that a new peer has to greet, to pair its rail if it has one, and to answer a lookup. Default 5 s.
    pub fn handshake_limit(mut self, span: Duration) -> Self {
        self.settings.handshake_limit = span;
        self
    }

    /// What each further rail, of the side that has more of them, adds to the time in which a new peer has to pair its
    /// rails: 32 cards make 32 connections, of several queue pairs each. Default 1 s.
    pub fn handshake_limit_per_rail(mut self, span: Duration) -> Self {
        self.settings.handshake_limit_per_rail = span;
        self
    }

    /// How peers find each other and exchange control frames. Default TCP.
    pub fn bootstrap(mut self, bootstrap: Arc<dyn Bootstrap>) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    /// Serves connections on this runtime, instead of by a thread of the fabric's own.
    ///
    /// The runtime needs its I/O and its timers (`enable_all`), and has to run: peers that hear nothing
    /// for their [`peer_timeout`](Self::peer_timeout) take us for dead. One of `new_current_thread` runs
    /// inside its `block_on` only. Await whatever takes the peer's answer there: connecting, lookups,
    /// barriers, and many writes with imms, for which the peer makes room again and again. No
    /// [`wait`](crate::wait) runs it.
    ///
    /// With [`caller_driven`](Self::caller_driven) as well a fabric has no thread of its own, as long as
    /// addresses are numbers (names are looked up by a helper); loopback keeps one per device. Who drives
    /// it serves it, too:
    ///
    /// ```
    /// # use multirail_core::FabricBuilder;
    /// let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// let builder = FabricBuilder::new().caller_driven().control_on(runtime.handle().clone());
    /// // ... and beside Fabric::step, every millisecond or so:
    /// runtime.block_on(tokio::task::yield_now());
    /// # let _ = builder;
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// End it by [`Fabric::close_and_wait`](crate::Fabric::close_and_wait), on the runtime.
    /// [`Fabric::close`](crate::Fabric::close) waits 600 ms at most for the farewells, in vain if nobody
    /// runs the runtime meanwhile, and not at all inside it. When the runtime is shut down first, our
    /// peers end, and whatever still connects fails, with `Closed`; the other side sees us die.
    pub fn control_on(mut self, runtime: Handle) -> Self {
        self.control = Some(runtime);
        self
    }

    /// Meets only peers that have the same token; both sides prove it.
    ///
    /// A stranger learns that somebody listens and asks for a token, nothing else. A
    /// peer with another token or none ends with `Permission`, on both sides, and so
    /// does a peer that asks for a token here. Fabrics that are connected by
    /// [`Fabric::connect_local`](crate::Fabric::connect_local) prove nothing: one caller holds both.
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
    pub fn grant_policy(mut self, policy: Arc<dyn GrantPolicy>) -> Self {
        self.grant_policy = policy;
        self
    }

    /// How devices are put into rail groups. Default [`RailGroups::Nearest`].
    pub fn rail_groups(mut self, groups: RailGroups) -> Self {
        self.placement.groups = groups;
        self
    }

    /// The GPUs whose memory is to be moved: cards are dealt out among them alone. Default: all that the
    /// machine shows, also those that this process may not use.
    pub fn gpus(mut self, gpus: Vec<Address>) -> Self {
        self.placement.gpus = Some(gpus);
        self
    }

    /// The machine in which devices are sought. Default: this host, as its `/sys` shows it, read
    /// when there is a device to be sought.
    pub fn topology(mut self, machine: Machine) -> Self {
        self.placement.machine = Arc::new(OnceLock::from(Arc::new(machine)));
        self
    }

    /// With seed and incarnation moved, where they are given.
    pub(super) fn offset_by(mut self, by: u64) -> Self {
        self.seed = self.seed.map(|seed| seed.wrapping_add(by));
        self.incarnation = self.incarnation.map(|incarnation| incarnation.wrapping_add(by));
        self
    }
}
