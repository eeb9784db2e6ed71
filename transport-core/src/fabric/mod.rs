//! A fabric: the transports opened together, their engines, peers and regions.

#[cfg(unix)]
mod admin_service;
mod admission;
mod builder;
mod core_reservation;
mod dump;
mod group;
mod host;
mod inner;
mod pairing;
mod peer_counters;
mod placement;
mod registration_counts;
mod reservation;
mod tenant;
mod transport;
mod workers;

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

pub use builder::{FabricBuilder, TransportConfig};
pub use dump::WeakFabric;
use group::Group;
pub(crate) use inner::FabricInner;
pub use peer_counters::PeerCounters;
pub use placement::{GroupLocation, ListedGroup, RailGroups};
pub use registration_counts::RegistrationCounters;
use registration_counts::RegistrationCounts;
pub(crate) use transport::Transport;
pub use transport::TransportInfo;
pub use workers::{Pinning, Workers};

use crate::admin::{RailState, RailStatus};
use crate::control;
use crate::engine::memory::{RegionInner, RegionSetup};
use crate::engine::{
    Control, EngineHandle, OperationCounters, RailCounters, RailCounts, StepReport, drain_answer,
};
use crate::notifications::{NotificationInbox, Notifier, Outbox};
use crate::pool::RecvPool;
use crate::spi::Flushes;
use crate::{
    Access, Drain, Error, ErrorKind, HostBuffer, Memory, Notifications, Op, Peer, PeerId, Region, Result,
    Time,
};

/// The rails to register memory on.
#[derive(Clone, Copy)]
enum RegisterOn {
    /// The rails of the GPU that the memory lies near; all rails if it names none.
    Nearest,
    /// All rails.
    Everywhere,
    /// The rails of one group.
    Group(usize),
    /// The companions' rails: for notifications.
    Companions,
}

/// Waits for peers: [`Fabric::listen`].
pub type Listener = control::Listener<Peer>;

/// Opened transports, ready to register memory and connect to peers. Clones share the fabric.
///
/// Dropping the last clone closes the fabric, as [`Fabric::close`] does: it tells the peers, and joins its threads.
#[derive(Clone)]
pub struct Fabric(pub(crate) Arc<FabricInner>);

impl Fabric {
    /// Allocates host memory that peers on this host can map, and registers it.
    pub fn alloc(&self, len: usize, access: Access) -> Result<Region> {
        let memory = self.0.host_memory.alloc(len, access != Access::LOCAL)?;
        // SAFETY: the buffer is new, and only the region will know it.
        unsafe { self.register(memory, access) }
    }

    /// As [`Fabric::alloc`]. Registers the memory near one rail group only: see [`Fabric::register_near`].
    pub fn alloc_near(&self, group: usize, len: usize, access: Access) -> Result<Region> {
        let memory = self.0.host_memory.alloc(len, access != Access::LOCAL)?;
        // SAFETY: the buffer is new, and only the region will know it.
        unsafe { self.register_near(group, memory, access) }
    }

    /// Registers memory on the rails that serve it: on all rails, or, if the memory lies [near](Memory::near) a GPU,
    /// on the rails of that GPU's rail group. A transport that has no group for the GPU registers on all its rails.
    ///
    /// A region near one group exchanges bytes with two kinds of remote regions: those near the group that its rails
    /// are paired with, and those on all rails ([`Fabric::register_everywhere`]).
    ///
    /// # Safety
    /// Until the region is dropped, or revoked and quiet, peers may change the bytes as `access` allows: nobody holds
    /// a Rust reference into them.
    pub unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Region> {
        // SAFETY: handed on to the caller.
        unsafe { self.register_on(RegisterOn::Nearest, memory, access) }
    }

    /// As [`Fabric::register`]. Registers the memory on every rail of every transport, however far away.
    ///
    /// # Safety
    /// As [`Fabric::register`].
    pub unsafe fn register_everywhere(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Region> {
        // SAFETY: handed on to the caller.
        unsafe { self.register_on(RegisterOn::Everywhere, memory, access) }
    }

    /// Registers memory on the rails of rail group `group` alone. `group` is its index in [`TransportInfo::groups`]. A
    /// transport that has no such group registers on all its rails.
    ///
    /// Register memory that lies next to one GPU or NUMA node near that GPU or node. Then the bytes go over its own
    /// devices, and registration costs less because it is for fewer devices. The peer's region must be near the group
    /// that this region's rails are paired with, or on all rails.
    ///
    /// # Errors
    /// `InvalidRequest` if no transport has such a group.
    ///
    /// # Safety
    /// As [`Fabric::register`].
    pub unsafe fn register_near(
        &self,
        group: usize,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Region> {
        let most = self.0.transports.iter().map(|transport| transport.groups.len()).max().unwrap_or(0);
        if group >= most {
            let why = format!("there is no rail group {group} of {most}; groups are counted from 0");
            return Err(Error::new(ErrorKind::InvalidRequest, "register", why));
        }
        // SAFETY: handed on to the caller.
        unsafe { self.register_on(RegisterOn::Group(group), memory, access) }
    }

    /// # Safety
    /// As [`Fabric::register`].
    unsafe fn register_on(
        &self,
        rails: RegisterOn,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Region> {
        self.0.check_open("register")?;
        let (begun, len) = (Instant::now(), memory.len());
        if memory.is_empty() {
            let why = "the memory has no bytes; register at least one";
            return Err(Error::new(ErrorKind::InvalidRequest, "register", why));
        }
        if let Some(notifier) = self.0.notifier() {
            notifier.flushes.add(&*memory)?;
        }
        let mut regions = Vec::new();
        let machine = self.0.placement.known();
        for transport in &self.0.transports {
            if transport.is_companion != matches!(rails, RegisterOn::Companions) {
                regions.push(vec![None; transport.domains.len()]);
                continue;
            }
            let group = match rails {
                RegisterOn::Everywhere | RegisterOn::Companions => None,
                RegisterOn::Group(group) => Some(group),
                RegisterOn::Nearest => memory.near().and_then(|gpu| transport.group_of(gpu, machine)),
            };
            // SAFETY: handed on to the caller.
            regions.push(unsafe { transport.register(&memory, access, group)? });
        }
        let setup = RegionSetup {
            regions: regions.into(),
            access,
            id: self.0.next_region.fetch_add(1, Ordering::Relaxed),
            fabric_id: self.0.id,
            owner: Arc::<FabricInner>::downgrade(&self.0),
            retained: Weak::clone(&self.0.retained),
        };
        let region = Region(Arc::new(RegionInner::new(memory, setup)));
        if !matches!(rails, RegisterOn::Companions) {
            self.0.registrations.add(len, begun.elapsed());
        }
        Ok(region)
    }

    /// Publishes a region: peers find it by `name` until [`Fabric::unpublish`].
    ///
    /// # Errors
    /// `InvalidRequest` for a name that is empty or longer than 255 bytes, and for a region of another fabric.
    pub fn publish(&self, name: &str, region: &Region) -> Result<()> {
        if name.is_empty() || name.len() > control::MAX_NAME {
            let why = format!("a name of {} bytes; 1 to {} are allowed", name.len(), control::MAX_NAME);
            return Err(Error::new(ErrorKind::InvalidRequest, "publish", why));
        }
        if region.0.fabric_id != self.0.id {
            let why = "the region belongs to another fabric; publish it there";
            return Err(Error::new(ErrorKind::InvalidRequest, "publish", why));
        }
        lock(&self.0.published).insert(name.into(), region.clone());
        Ok(())
    }

    /// Removes a published name. Peers that imported the region keep it.
    pub fn unpublish(&self, name: &str) {
        lock(&self.0.published).remove(name);
    }

    /// Listens for peers at `address`. The default host is 127.0.0.1. Port 0 stands for any free port.
    pub fn listen(&self, address: &str) -> impl Future<Output = Result<Listener>> + Send + 'static {
        let (fabric, address) = (Arc::clone(&self.0), address.to_owned());
        async move {
            fabric.check_may_listen()?;
            let thread = fabric.control_thread("listen")?;
            control::listen(fabric, &thread, address).await
        }
    }

    /// Connects to a listening fabric.
    pub fn connect(&self, address: &str) -> impl Future<Output = Result<Peer>> + Send + 'static {
        let (fabric, address) = (Arc::clone(&self.0), address.to_owned());
        async move {
            let thread = fabric.control_thread("connect")?;
            control::connect(fabric, &thread, address).await
        }
    }

    /// Connects two fabrics of this process, or a fabric with itself, without sockets or heartbeats. Returns this
    /// fabric's handle of the other, and the other fabric's handle of this one.
    pub fn connect_local(&self, other: &Self) -> Result<(Peer, Peer)> {
        admission::connect_local(&self.0, &other.0)
    }

    /// Posts one receive. The outcome names the sender, the number of bytes and the imm. A receive has no deadline:
    /// drop the operation to take the receive back.
    ///
    /// The receive is posted on one transport: the first that reaches a peer that is connected now, or the first of
    /// all if no peer is connected. If peers connect over several transports, use a [`recv_pool`](Self::recv_pool),
    /// which posts on all of them.
    pub fn recv(&self, region: &Region, range: std::ops::Range<usize>) -> Result<Op> {
        let (offset, len) = region.0.check(range, "recv")?;
        if len == 0 || region.0.fabric_id != self.0.id {
            let why = "receive into at least one byte of a region of this fabric";
            return Err(Error::new(ErrorKind::InvalidRequest, "recv", why));
        }
        self.0.check_open("recv")?;
        let engine = self.0.receiving_engine();
        if region.0.regions[engine.transport][engine.first_rail].is_none() {
            let why = "messages arrive at the first rail group: register the region near that group, or on all rails";
            return Err(Error::new(ErrorKind::InvalidRequest, "recv", why));
        }
        let id = engine.insert("recv")?;
        engine.control(Control::Receive { id, region: Arc::clone(&region.0), offset, len });
        Ok(Op::pending(Arc::clone(engine), id))
    }

    /// Posts `count` receives of `size` bytes on every transport. The pool posts a buffer again once its message is
    /// dropped.
    pub fn recv_pool(&self, count: usize, size: usize) -> Result<RecvPool> {
        self.0.check_open("recv_pool")?;
        let engines: Vec<_> =
            self.0.data_transports().map(|transport| Arc::clone(transport.first_engine())).collect();
        RecvPool::new(self, &engines, count, size)
    }

    /// The peer with this id, while it is connected: for the [`PeerId`] of a [`Notification`](crate::Notification), a
    /// message or an error. It does not matter which side connected, or whether a [`Listener`] has returned the peer.
    pub fn peer(&self, id: PeerId) -> Option<Peer> {
        lock(&self.0.peers).get(&id).filter(|peer| peer.is_alive()).cloned()
    }

    /// The notifications that peers deliver by [`Peer::notify`] and
    /// [`WriteOptions::notify`](crate::WriteOptions::notify).
    ///
    /// # Errors
    /// `Unsupported` if the fabric was opened without [`FabricBuilder::notifications`]; `Closed`.
    pub fn notifications(&self) -> Result<Notifications> {
        Notifications::new(self)
    }

    /// Opens what notifications need, with `memory` bytes for each direction: for all peers together, and for arrivals
    /// of each transport.
    fn open_notifier(&self, memory: usize) -> Result<()> {
        let region = || {
            let memory = Arc::new(HostBuffer::new(memory)?);
            // SAFETY: the buffer is new, and only the region will know it.
            unsafe { self.register_on(RegisterOn::Companions, memory, Access::LOCAL) }
        };
        let outbox = Arc::new(Outbox::new(region()?.0));
        let mut arrivals = Vec::new();
        for companion in self.0.transports.iter().filter(|transport| transport.is_companion) {
            arrivals.push((Arc::clone(companion.first_engine()), region()?.0));
        }
        let inbox = NotificationInbox::new(arrivals);
        let _ = self.0.notifier.set(Notifier { inbox, outbox, flushes: Flushes::default() });
        Ok(())
    }

    /// Runs one step of every engine of a caller-driven fabric. Does nothing on other fabrics.
    pub fn step(&self) -> StepReport {
        let mut sum = StepReport::default();
        for transport in &self.0.transports {
            for step in transport.groups.iter().filter_map(Group::step) {
                sum.events += step.events;
                sum.posted += step.posted;
                sum.outstanding += step.outstanding;
            }
        }
        sum
    }

    /// The next time at which a caller-driven fabric has work of its own, by the fabric's clock: a deadline, or an
    /// event of a modelled device. In virtual time, advance the clock to this time when a step did nothing. Returns
    /// `Time::NEVER` if the fabric has workers.
    pub fn due(&self) -> Time {
        self.0.groups().map(Group::due).fold(Time::NEVER, Time::min)
    }

    /// A hash over all events so far. Caller-driven runs with the same seed have the same hash.
    pub fn event_hash(&self) -> u64 {
        let hashes = self.0.groups().map(|group| group.engine.hash.load(Ordering::Relaxed));
        hashes.fold(0, |sum, hash| sum.rotate_left(1) ^ hash)
    }

    /// The opened transports, in order of preference.
    pub fn transports(&self) -> Vec<TransportInfo> {
        self.0.data_transports().map(Transport::info).collect()
    }

    /// The current counters of every rail.
    pub fn counters(&self) -> Vec<RailCounters> {
        self.0.data_transports().flat_map(Transport::counters).collect()
    }

    /// How long the operations of each transport took, and how they failed.
    pub fn operation_counters(&self) -> Vec<OperationCounters> {
        self.0.data_transports().map(Transport::operation_counters).collect()
    }

    /// What the workers have done with each connected peer, by its number.
    pub fn peer_counters(&self) -> Vec<PeerCounters> {
        // Read without the lock: there may be thousands.
        let peers: Vec<Peer> = lock(&self.0.peers).values().cloned().collect();
        let mut counters: Vec<_> = peers.iter().map(PeerCounters::of).collect();
        counters.sort_by_key(|counters| counters.peer);
        counters
    }

    /// The regions that were registered, and how long that took.
    pub fn registration_counters(&self) -> RegistrationCounters {
        self.0.registrations.read()
    }

    /// Takes a device out of service, for its maintenance: new operations use other devices, and what running
    /// operations have not posted on it goes over other devices of its rail group. [`Fabric::restore_device`] takes it
    /// back.
    ///
    /// The future resolves once the operations that use the device now have ended. It fails with `DeadlineExceeded`
    /// after the fabric's default deadline, and the device stays out of service. Then call this function again.
    ///
    /// - The device still carries what no other device can: operations on regions that are registered on no other
    ///   device of the pair, messages if it is the first device of its transport, and notifications. Small operations
    ///   that loopback copies in the calling thread count as its first device's.
    /// - It still carries what peers write to this side and read from it. To stop that, let each peer take the device
    ///   out of service that is paired with it.
    ///
    /// # Errors
    /// `InvalidRequest` if no transport has a device of this name; `Closed`.
    pub fn drain_device(&self, device: &str) -> Result<Drain> {
        let mut waits = Vec::new();
        for (engine, rail) in self.rails_of(device, "drain_device")? {
            let (done, answer) = drain_answer();
            let deadline = self.0.deadline(self.0.now(), None);
            // The engine does this, too, but operations that are submitted from now on must not come before it.
            engine.set_out_of_service(rail, true);
            engine.control(Control::RetireRail { rail, deadline, done });
            waits.push((Arc::clone(engine), answer));
        }
        Ok(Drain::of(waits))
    }

    /// Takes a device back into service. Does nothing if it is in service. A lost device stays lost.
    ///
    /// # Errors
    /// As [`Fabric::drain_device`].
    pub fn restore_device(&self, device: &str) -> Result<()> {
        let rails = self.rails_of(device, "restore_device")?;
        rails.into_iter().for_each(|(engine, rail)| engine.control(Control::RestoreRail { rail }));
        Ok(())
    }

    /// The names of the devices that are lost. They stay lost until the fabric is opened again.
    pub fn lost_devices(&self) -> Vec<String> {
        let is_lost = |rail: &RailStatus| rail.state == RailState::Lost;
        self.rail_status().into_iter().filter(is_lost).map(|rail| rail.counters.device).collect()
    }

    /// The state and the counters of every rail.
    pub(crate) fn rail_status(&self) -> Vec<RailStatus> {
        let groups = self.0.data_transports().flat_map(|transport| {
            transport
                .groups
                .iter()
                .flat_map(|group| group.engine.counts.iter().zip(transport.counters_of(group)))
        });
        let state = |counts: &RailCounts| match (counts.is_lost(), counts.is_retired()) {
            (true, _) => RailState::Lost,
            (false, true) => RailState::OutOfService,
            (false, false) => RailState::InService,
        };
        groups.map(|(counts, counters)| RailStatus { state: state(counts), counters }).collect()
    }

    /// The rails of a device: their engines, and their positions in these. A device may belong to several transports.
    fn rails_of(&self, device: &str, operation: &'static str) -> Result<Vec<(&Arc<EngineHandle>, usize)>> {
        self.0.check_open(operation)?;
        let engines =
            || self.0.data_transports().flat_map(|transport| &transport.groups).map(|group| &group.engine);
        let rails = engines()
            .flat_map(|engine| (0..).zip(&engine.devices).map(move |(rail, name)| (engine, rail, name)));
        let found: Vec<_> =
            rails.filter(|(.., name)| *name == device).map(|(engine, rail, _)| (engine, rail)).collect();
        if found.is_empty() {
            let names: Vec<_> = engines().flat_map(|engine| &engine.devices).map(String::as_str).collect();
            let why = format!("no transport has a device {device:?}; there are {}", names.join(", "));
            return Err(Error::new(ErrorKind::InvalidRequest, operation, why));
        }
        Ok(found)
    }

    /// Closes the fabric: peers see `Closed`, operations end, threads are joined. Every later call on this fabric
    /// fails with `Closed`.
    ///
    /// If [`FabricBuilder::control_on`] has set a runtime, use [`Fabric::close_and_wait`] instead.
    pub fn close(&self) {
        self.0.close();
    }

    /// The devices whose library has not closed their endpoints within the backend's limit. Usually there are none.
    ///
    /// [`Fabric::close`] leaves such endpoints behind and logs a warning. A thread of the backend goes on closing
    /// them. Until it is done, all memory that was registered there stays alive. The process may exit before.
    pub fn unclosed(&self) -> Vec<String> {
        let unclosed_of = |transport: &Transport| {
            let rails = transport.devices.iter().zip(&transport.domains);
            let unclosed = rails.filter(|(_, domain)| domain.unclosed_endpoints() > 0);
            unclosed.map(|(device, _)| device.name.clone()).collect::<Vec<_>>()
        };
        self.0.transports.iter().flat_map(unclosed_of).collect()
    }

    /// As [`Fabric::close`], without blocking while the sessions tell their peers.
    ///
    /// Await the future on the runtime of [`FabricBuilder::control_on`] before that runtime ends. Otherwise peers see
    /// this side die. If the future is dropped before it resolves, the fabric is not closed yet.
    pub fn close_and_wait(&self) -> impl Future<Output = ()> + Send + 'static {
        let fabric = Arc::clone(&self.0);
        async move {
            // Before the links go down: peers might take lost links for the death of this side.
            fabric.begin_shutdown();
            if let Some(tasks) = fabric.closing_tasks.get() {
                tasks.none().await;
            }
            fabric.close();
        }
    }

    /// Our incarnation: the number of this opening.
    pub fn incarnation(&self) -> u64 {
        self.0.identity.incarnation
    }

    pub(crate) fn drive(&self) -> bool {
        self.0.drive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder panics half way through a change, so a poisoned lock holds good data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
