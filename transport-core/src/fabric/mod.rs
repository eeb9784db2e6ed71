//! A fabric: the transports opened together, their engines, peers and regions.

mod admission;
mod builder;
mod close;
mod dump;
mod group;
mod host;
mod inner;
mod local;
mod opening;
mod pairing;
mod placement;
mod reservation;
mod tenant;
mod transport;
mod workers;

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use builder::{FabricBuilder, TransportConfig};
pub use dump::WeakFabric;
use group::Group;
pub(crate) use inner::FabricInner;
pub use placement::{GroupLocation, ListedGroup, RailGroups};
pub(crate) use transport::Transport;
pub use transport::TransportInfo;
pub(crate) use workers::Posting;
pub use workers::{Pinning, Workers};

use crate::control;
use crate::engine::{Control, RailCounters, StepReport};
use crate::pool::RecvPool;
use crate::region::RegionInner;
use crate::{Access, Error, ErrorKind, HostBuffer, Memory, MemoryKind, Op, Peer, Region, Result, Time};

/// The rails to register on.
#[derive(Clone, Copy)]
enum RegisterOn {
    /// Those that the memory says.
    Nearest,
    Everywhere,
    /// Of one group.
    Group(usize),
}

/// Waits for peers: [`Fabric::listen`].
pub type Listener = control::Listener<Peer>;

/// Opened transports, ready to register memory and meet peers. Clones share it.
///
/// The last clone closes it, as does [`Fabric::close`]: sessions say goodbye,
/// workers end, threads are joined.
#[derive(Clone)]
pub struct Fabric(pub(crate) Arc<FabricInner>);

impl Fabric {
    /// Allocates host memory that this host's peers can map, and registers it.
    pub fn alloc(&self, len: usize, access: Access) -> Result<Region> {
        let memory = Arc::new(HostBuffer::new(len)?);
        // SAFETY: the buffer is new, and only the region will know it.
        unsafe { self.register(memory, access) }
    }

    /// As [`Fabric::alloc`], registered near one rail group only: see
    /// [`Fabric::register_near`].
    pub fn alloc_near(&self, group: usize, len: usize, access: Access) -> Result<Region> {
        let memory = Arc::new(HostBuffer::new(len)?);
        // SAFETY: the buffer is new, and only the region will know it.
        unsafe { self.register_near(group, memory, access) }
    }

    /// Registers memory on the rails that serve it: on every one, or, where it says that it lies
    /// [near](Memory::near) a GPU, on those of the GPU's rail group. A transport without a group
    /// for that GPU takes all of its rails. Then the peer's region must be near the group that this
    /// one's rails are paired with, or on all rails: [`Fabric::register_everywhere`].
    ///
    /// # Safety
    /// Until the region is dropped, or revoked and quiet, peers may change the
    /// bytes as `access` allows: nobody holds a Rust reference into them.
    pub unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Region> {
        // SAFETY: handed on to the caller.
        unsafe { self.register_on(RegisterOn::Nearest, memory, access) }
    }

    /// As [`Fabric::register`], on every rail of every transport, however far.
    ///
    /// # Safety
    /// As [`Fabric::register`].
    pub unsafe fn register_everywhere(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Region> {
        // SAFETY: handed on to the caller.
        unsafe { self.register_on(RegisterOn::Everywhere, memory, access) }
    }

    /// Registers memory on the rails of rail group `group` alone, by its number in
    /// [`TransportInfo::groups`]; on all of a transport that has no such group.
    ///
    /// What lies next to one GPU or NUMA node is best registered near that: the bytes take
    /// its own cards, and registering costs the less the fewer cards it is for. The peer's
    /// region must be near the group that this one's rails are paired with, or on all rails.
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
            let why = format!("rail group {group} of {most}; groups are counted from 0");
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
        if memory.is_empty() {
            return Err(Error::new(ErrorKind::InvalidRequest, "register", "memory of zero bytes"));
        }
        let mut regions = Vec::new();
        let machine = self.0.placement.known();
        for transport in &self.0.transports {
            let group = match rails {
                RegisterOn::Everywhere => None,
                RegisterOn::Group(group) => Some(group),
                RegisterOn::Nearest => memory.near().and_then(|gpu| transport.group_of(gpu, machine)),
            };
            // SAFETY: handed on to the caller.
            regions.push(unsafe { transport.register(&memory, access, group)? });
        }
        let len = memory.len() as u64;
        Ok(Region(Arc::new(RegionInner {
            regions: regions.into(),
            start: memory.as_ptr(),
            len,
            device_memory_mask: if matches!(memory.kind(), MemoryKind::Cuda { .. }) { u64::MAX } else { 0 },
            memory,
            access,
            id: self.0.next_region.fetch_add(1, Ordering::Relaxed),
            fabric_id: self.0.id,
            fabric: Arc::downgrade(&self.0),
            retained: Weak::clone(&self.0.retained),
            limit: AtomicU64::new(len + 1),
        })))
    }

    /// Lets peers find a region by name, until [`Fabric::unpublish`].
    pub fn publish(&self, name: &str, region: &Region) -> Result<()> {
        if name.is_empty() || name.len() > control::MAX_NAME {
            let why = format!("a name of {} bytes; 1 to {} are allowed", name.len(), control::MAX_NAME);
            return Err(Error::new(ErrorKind::InvalidRequest, "publish", why));
        }
        lock(&self.0.published).insert(name.into(), region.clone());
        Ok(())
    }

    /// Takes a name back; peers that imported the region keep it.
    pub fn unpublish(&self, name: &str) {
        lock(&self.0.published).remove(name);
    }

    /// Waits for peers at `address`; without a host it is 127.0.0.1, port 0 takes a free one.
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

    /// Connects two fabrics of this process, or a fabric with itself, without
    /// sockets or heartbeats. Gives our view of the other, and the other's of us.
    pub fn connect_local(&self, other: &Self) -> Result<(Peer, Peer)> {
        local::connect_local(&self.0, &other.0)
    }

    /// Posts one receive. The outcome says who sent, how many bytes and which imm. It has no deadline; drop it
    /// to take it back.
    ///
    /// It is posted on one transport: the first that reaches a peer which is connected now, or the first of all
    /// while no peer is connected. A fabric whose peers come by several transports takes a
    /// [`recv_pool`](Self::recv_pool), which is posted on every one.
    pub fn recv(&self, region: &Region, range: std::ops::Range<usize>) -> Result<Op> {
        let (offset, len) = region.0.check(range, "recv")?;
        if len == 0 || region.0.fabric_id != self.0.id {
            let why = "receive into at least one byte of a region of this fabric";
            return Err(Error::new(ErrorKind::InvalidRequest, "recv", why));
        }
        self.0.check_open("recv")?;
        let engine = self.0.receiving_engine();
        if region.0.regions[engine.transport][engine.first_rail].is_none() {
            let why = "messages come to the first rail group: register the region near that, or on all rails";
            return Err(Error::new(ErrorKind::InvalidRequest, "recv", why));
        }
        let id = engine.insert("recv")?;
        engine.control(Control::Receive { id, region: Arc::clone(&region.0), offset, len });
        Ok(Op::pending(Arc::clone(engine), id))
    }

    /// `count` receives of `size` bytes on every transport, reposted by themselves.
    pub fn recv_pool(&self, count: usize, size: usize) -> Result<RecvPool> {
        self.0.check_open("recv_pool")?;
        let engines: Vec<_> =
            self.0.transports.iter().map(|transport| Arc::clone(transport.first_engine())).collect();
        RecvPool::new(self, &engines, count, size)
    }

    /// One turn of every engine of a caller-driven fabric; nothing otherwise.
    pub fn step(&self) -> StepReport {
        let mut sum = StepReport::default();
        for transport in &self.0.transports {
            for turn in transport.groups.iter().filter_map(Group::step) {
                sum.events += turn.events;
                sum.posted += turn.posted;
                sum.outstanding += turn.outstanding;
            }
        }
        sum
    }

    /// When a caller-driven fabric has something to do by itself, in its own clock: a
    /// deadline, or what a modelled device has under way. Who drives it in virtual time
    /// moves the clock there when a turn did nothing. `Time::NEVER` with workers.
    pub fn due(&self) -> Time {
        self.0.groups().map(Group::due).fold(Time::NEVER, Time::min)
    }

    /// A hash over all that happened: caller-driven runs of one seed agree on it.
    pub fn event_hash(&self) -> u64 {
        let hashes = self.0.groups().map(|group| group.engine.hash.load(Ordering::Relaxed));
        hashes.fold(0, |sum, hash| sum.rotate_left(1) ^ hash)
    }

    /// The opened transports, in order of preference.
    pub fn transports(&self) -> Vec<TransportInfo> {
        self.0.transports.iter().map(Transport::info).collect()
    }

    /// A reading of every rail's counters.
    pub fn counters(&self) -> Vec<RailCounters> {
        self.0.transports.iter().flat_map(Transport::counters).collect()
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
    // No holder panics half way through a change: poison carries no news.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
