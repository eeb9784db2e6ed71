//! The settings of a fabric, and how a fabric opens with them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use topology::{Address, Machine};

use super::dump::{StallHook, report_stalls};
use super::placement::PlacementPolicy;
use super::tenant::Tenancy;
use super::transport::{COMPANION_SUFFIX, OpenSettings};
use super::{Fabric, FabricInner, RailGroups, Transport, Workers};
use crate::control::{Bootstrap, ControlSettings, HandshakeLimiter, Identity, TcpBootstrap, Token};
use crate::engine::index::{GroupIndex, Number, TransportIndex};
use crate::engine::memory::RetainedMemory;
use crate::engine::op::MAX_OPERATIONS;
use crate::engine::trace::StallMonitor;
use crate::notifications;
use crate::spi::{Backend, DeviceInfo, DomainSetup};
use crate::{Clock, Dump, Error, ErrorKind, EvenShares, GrantPolicy, PathPolicy, Result, SystemClock};

/// One transport to open: a backend, and which of its devices.
#[derive(Clone)]
pub struct TransportConfig {
    pub(super) label: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) devices: Option<Vec<DeviceInfo>>,
}

impl TransportConfig {
    /// A transport with all devices that the backend finds. Peers match transports by `label`.
    pub fn new(label: impl Into<String>, backend: Arc<dyn Backend>) -> Self {
        Self { label: label.into(), backend, devices: None }
    }

    /// The names of the devices that were given. Empty if the backend is to find the devices when the fabric opens.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().flatten().map(|device| device.name.as_str())
    }

    /// Uses these devices, each as a rail.
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
    pub(super) path_policy: PathPolicy,
    pub(super) notification_memory: Option<usize>,
    pub(super) admin_socket: Option<PathBuf>,
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
            path_policy: PathPolicy::ANY,
            notification_memory: None,
            admin_socket: None,
        }
    }
}

impl FabricBuilder {
    /// The default settings, and no transport yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a transport. Transports that are added first are preferred.
    pub fn transport(mut self, transport: TransportConfig) -> Self {
        self.transports.push(transport);
        self
    }

    /// The clock of the engines. Default: the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The seed of every random choice. Default: random.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The number of this opening of the fabric. Default: random.
    pub fn incarnation(mut self, incarnation: u64) -> Self {
        self.incarnation = Some(incarnation);
        self
    }

    /// Starts no worker threads: the caller drives the engines by [`Fabric::step`](crate::Fabric::step), or by waiting
    /// in [`wait`](crate::wait) or a `wait` method. Connections still have a thread of their own, unless
    /// [`control_on`](Self::control_on) gives them a runtime.
    pub fn caller_driven(mut self) -> Self {
        self.caller_driven = true;
        self
    }

    /// The threads that drive the engines, and how they post. Default: one per rail group.
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// The most operations that may be under way at once, per rail group: 1 to 2^24. Each takes about 500 bytes of
    /// memory. Default 4096.
    pub fn max_operations(mut self, operations: usize) -> Self {
        self.max_operations = operations;
        self
    }

    /// Which paths bytes may take. An operation that would take another is refused at submission. Default: any.
    pub fn path_policy(mut self, policy: PathPolicy) -> Self {
        self.path_policy = policy;
        self
    }

    /// Opens the fabric with notifications ([`Peer::notify`](crate::Peer::notify)), and with so many bytes of memory
    /// for them: for those that this side sends, and once more for each transport, for those that arrive. 4 MiB to 16
    /// GiB; a notification takes 4 KiB per 4,072 bytes, and one peer at most half of the memory. Default: no
    /// notifications.
    ///
    /// Each transport opens its first device once more, with an endpoint of its own, so that notifications take nothing
    /// from the user's imms and receives. The transport's first worker thread drives it too.
    pub fn notifications(mut self, memory: usize) -> Self {
        self.notification_memory = Some(memory);
        self
    }

    /// The deadline of operations that state none. Default 30 s.
    pub fn deadline(mut self, span: Duration) -> Self {
        self.deadline = span;
        self
    }

    /// The interval of the heartbeats that this side sends to its peers. Default 500 ms.
    pub fn heartbeat(mut self, span: Duration) -> Self {
        self.settings.heartbeat = span;
        self
    }

    /// The silence after which a peer counts as dead. `Duration::MAX` means never. Default 5 s: a network outage of
    /// 2 s causes a silence of up to 3.5 s, until TCP repeats what was lost.
    pub fn peer_timeout(mut self, span: Duration) -> Self {
        self.settings.peer_timeout = span;
        self
    }

    /// The time that a new peer has to send its first frame, to pair its first rail, and to answer a lookup.
    /// Default 5 s.
    pub fn handshake_limit(mut self, span: Duration) -> Self {
        self.settings.handshake_limit = span;
        self
    }

    /// The time that each further rail adds to the handshake limit; the side with more rails counts. 32 devices make
    /// 32 connections, of several queue pairs each. Default 1 s.
    pub fn handshake_limit_per_rail(mut self, span: Duration) -> Self {
        self.settings.handshake_limit_per_rail = span;
        self
    }

    /// How peers find each other and exchange control frames. Default TCP.
    pub fn bootstrap(mut self, bootstrap: Arc<dyn Bootstrap>) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    /// Serves connections on this runtime, instead of on a thread of the fabric's own.
    ///
    /// The runtime needs I/O and timers (`enable_all`), and it has to run: peers that hear nothing for their
    /// [`peer_timeout`](Self::peer_timeout) take this side for dead. A runtime of `new_current_thread` runs only
    /// inside its `block_on`. On such a runtime, await everything that needs the peer's answer: connecting, lookups,
    /// barriers, and long series of writes with imms, for which the peer renews its grant again and again.
    /// [`wait`](crate::wait) does not run the runtime.
    ///
    /// With [`caller_driven`](Self::caller_driven) as well, a fabric has no thread of its own, as long as addresses
    /// are numbers (a helper thread looks names up). Loopback keeps one thread per device. The caller that drives the
    /// fabric then serves its connections too:
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
    /// Close the fabric by [`Fabric::close_and_wait`](crate::Fabric::close_and_wait), on the runtime.
    /// [`Fabric::close`](crate::Fabric::close) waits 600 ms at most for the sessions to tell their peers. That wait is
    /// in vain if nobody runs the runtime, and `close` does not wait at all inside the runtime. If the runtime is shut
    /// down first, all peers and all connection attempts end with `Closed`, and the other sides see this side die.
    pub fn control_on(mut self, runtime: Handle) -> Self {
        self.control = Some(runtime);
        self
    }

    /// Connects only to peers that have the same token. Both sides prove that they have it.
    ///
    /// An unauthenticated peer learns that a listener asks for a token, and nothing else. If only one side has a token,
    /// or both have different ones, the connection ends with `Permission` on both sides. Fabrics that are connected by
    /// [`Fabric::connect_local`](crate::Fabric::connect_local) prove nothing, because one caller holds both.
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// The number of records that each transport's flight recorder keeps, rounded up to a power of two. A record has
    /// 40 bytes. 0 records nothing. Default 4096.
    pub fn flight_recorder(mut self, records: usize) -> Self {
        self.records = records;
        self
    }

    /// The time without progress after which an operation counts as stalled. For each stall, a `tracing` warning says
    /// what the operation waits for, and the function of [`FabricBuilder::on_stall`] is called once. `Duration::MAX`
    /// means never. Default 1 s.
    ///
    /// Receives may wait for any time, and never count as stalled.
    pub fn stall_after(mut self, span: Duration) -> Self {
        self.stall_after = span;
        self
    }

    /// Sets a function to call when operations stall, with a dump; [`Dump::stalled`] lists the operations. It runs on
    /// a thread of its own, or, on a caller-driven fabric, in the thread that drives it.
    pub fn on_stall(mut self, hook: Arc<dyn Fn(&Dump) + Send + Sync>) -> Self {
        self.on_stall = Some(hook);
        self
    }

    /// The policy that decides how much each peer may send to this side. Default [`EvenShares`].
    ///
    /// ```
    /// use std::sync::Arc;
    /// use multirail_core::{GrantPolicy, GrantRequest, EvenShares, FabricBuilder, Grant};
    ///
    /// /// Prefill hosts get even shares. All others get 8 MiB, 64 imms and one message at a time.
    /// struct PrefillFirst;
    ///
    /// impl GrantPolicy for PrefillFirst {
    ///     fn grant(&self, request: &GrantRequest<'_>) -> Grant {
    ///         match request.host.starts_with("prefill-") {
    ///             true => EvenShares.grant(request),
    ///             false => Grant { bytes: 8 << 20, imms: request.free.min(64), messages: 1 },
    ///         }
    ///     }
    /// }
    ///
    /// let builder = FabricBuilder::new().grant_policy(Arc::new(PrefillFirst));
    /// ```
    pub fn grant_policy(mut self, policy: Arc<dyn GrantPolicy>) -> Self {
        self.grant_policy = policy;
        self
    }

    /// How the fabric puts devices into rail groups. Default [`RailGroups::Nearest`].
    pub fn rail_groups(mut self, groups: RailGroups) -> Self {
        self.placement.groups = groups;
        self
    }

    /// The GPUs whose memory the fabric is to move: only these get a share of the devices. Default: all GPUs of the
    /// machine, also those that this process may not use.
    pub fn gpus(mut self, gpus: Vec<Address>) -> Self {
        self.placement.gpus = Some(gpus);
        self
    }

    /// The machine in which the fabric locates its devices. Default: this host. The fabric reads its `/sys` if there
    /// is a device to locate.
    pub fn topology(mut self, machine: Machine) -> Self {
        self.placement.machine = Arc::new(OnceLock::from(Arc::new(machine)));
        self
    }

    /// Listens at a Unix socket for programs that look at the rails, or take devices out of service and back: see
    /// [`admin`](crate::admin). The socket's file has the mode 0600: only this user, and root, may connect. Default:
    /// none.
    ///
    /// The file is removed when the fabric closes. If a process has left one behind, it is replaced. The devices are
    /// those of this fabric; tenants open theirs anew and have no admin socket.
    ///
    /// [`FabricBuilder::open`] fails with `Unsupported` if the fabric is [`caller_driven`](Self::caller_driven) and has
    /// no runtime ([`control_on`](Self::control_on)), or if the system has no Unix sockets; with `Busy` if another
    /// process listens there; with `InvalidRequest` if the path is another kind of file or too long (108 bytes with its
    /// end).
    pub fn admin_socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.admin_socket = Some(path.into());
        self
    }

    /// Opens every transport and starts its workers.
    pub fn open(self) -> Result<Fabric> {
        let (tenancy, admin_socket) = (Tenancy::root(&self), self.admin_socket.clone());
        let fabric = self.open_as(tenancy)?;
        if let Some(path) = admin_socket {
            fabric.0.open_admin_socket(&path)?;
        }
        Ok(fabric)
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
                worker_sleeps: !self.caller_driven,
            };
            let settings = OpenSettings {
                transport: TransportIndex::new(transports.len()),
                first_group,
                max_operations: self.max_operations,
                caller_driven: self.caller_driven,
                records: self.records,
                stall_monitor: Arc::clone(&stall_monitor),
                workers: &self.workers,
                placement: &self.placement,
                grant_policy: Arc::clone(&self.grant_policy),
                retained: &retained,
                notification_memory: self.notification_memory,
            };
            let (transport, companion) = Transport::open(config, devices, &setup, settings)?;
            for transport in std::iter::once(transport).chain(companion) {
                first_group = first_group.plus(transport.groups.len());
                transports.push(transport);
            }
        }
        static FABRICS: AtomicU64 = AtomicU64::new(1);
        let fabric = Arc::new(FabricInner {
            id: FABRICS.fetch_add(1, Ordering::Relaxed),
            tenancy,
            identity: Identity { incarnation, host: host_name() },
            clock: self.clock,
            seed,
            handle_seeds: AtomicU64::new(0),
            default_deadline: self.deadline,
            path_policy: self.path_policy,
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
            registrations: Default::default(),
            notifier: OnceLock::new(),
            host_memory: Arc::default(),
            // Held by the rails that may touch the memory, if there are any.
            retained: Arc::downgrade(&retained),
            #[cfg(unix)]
            admin_socket: Mutex::new(None),
            closed: AtomicBool::new(false),
        });
        let (weak, on_stall) = (Arc::downgrade(&fabric), self.on_stall);
        stall_monitor.set_reporter(Box::new(move |stalls| report_stalls(&weak, on_stall.as_ref(), stalls)));
        let fabric = Fabric(fabric);
        if let Some(memory) = self.notification_memory {
            fabric.open_notifier(memory)?;
        }
        Ok(fabric)
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
        if let Some(memory) = self.notification_memory {
            let (least, most) = (notifications::MIN_MEMORY, notifications::MAX_MEMORY);
            if !(least..=most).contains(&memory) {
                return refuse(format!("{memory} bytes for notifications; {least} to {most} are allowed"));
            }
            let most = 64 - COMPANION_SUFFIX.len();
            let is_refused = |label: &&&str| label.len() > most || label.ends_with(COMPANION_SUFFIX);
            if let Some(label) = labels.iter().find(is_refused) {
                return refuse(format!(
                    "transport label {label:?}; with notifications a label has at most {most} bytes, and does not end with \
                     {COMPANION_SUFFIX:?}"
                ));
            }
        }
        if self.max_operations == 0 || self.max_operations > MAX_OPERATIONS {
            let asked = self.max_operations;
            return refuse(format!("max_operations {asked}; 1 to {MAX_OPERATIONS} are allowed"));
        }
        if self.admin_socket.is_some() && self.caller_driven && self.control.is_none() {
            let why = "a caller-driven fabric serves no admin socket without a runtime; give it one by control_on, or let \
                       workers drive it";
            return Err(Error::new(ErrorKind::Unsupported, "open", why));
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

    /// The same settings for another fabric: adds `by` to the seed and to the incarnation, where they are given.
    pub(super) fn offset_by(mut self, by: u64) -> Self {
        self.seed = self.seed.map(|seed| seed.wrapping_add(by));
        self.incarnation = self.incarnation.map(|incarnation| incarnation.wrapping_add(by));
        self
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
