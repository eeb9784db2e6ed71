//! A fabric: the transports opened together, their engines, peers and regions.

mod admission;
mod builder;
mod transport;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

pub(crate) use admission::Prepared;
pub use builder::{FabricBuilder, TransportConfig};
pub(crate) use transport::Transport;
pub use transport::TransportInfo;

use crate::control::{self, Bootstrap, ControlSettings, ControlThread, Identity, Listener};
use crate::engine::{Control, Progress, RailCounters};
use crate::pool::RecvPool;
use crate::region::RegionInner;
use crate::{
    Access, Clock, Error, ErrorKind, HostBuffer, Memory, Op, Outcome, Peer, PeerId, Region, Result, Time,
};

/// Opened transports, ready to register memory and meet peers. Clones share it.
///
/// The last clone closes it, as does [`Fabric::close`]: sessions say goodbye,
/// workers end, threads are joined.
#[derive(Clone)]
pub struct Fabric(Arc<FabricInner>);

pub(crate) struct FabricInner {
    id: u64,
    identity: Identity,
    clock: Arc<dyn Clock>,
    default_deadline: Duration,
    transports: Vec<Transport>,
    settings: ControlSettings,
    bootstrap: Arc<dyn Bootstrap>,
    control: Mutex<Option<Arc<ControlThread>>>,
    published: Mutex<HashMap<String, Region>>,
    peers: Mutex<HashMap<PeerId, Peer>>,
    next_region: AtomicU64,
    closed: AtomicBool,
}

impl Fabric {
    /// Allocates host memory that this host's peers can map, and registers it.
    pub fn alloc(&self, len: usize, access: Access) -> Result<Region> {
        let memory = Arc::new(HostBuffer::new(len)?);
        // SAFETY: the buffer is new, and only the region will know it.
        unsafe { self.register(memory, access) }
    }

    /// Registers memory on every rail of every transport.
    ///
    /// # Safety
    /// Until the region is dropped, or revoked and quiet, peers may change the
    /// bytes as `access` allows: nobody holds a Rust reference into them.
    pub unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Region> {
        self.0.check_open("register")?;
        if memory.is_empty() {
            return Err(Error::new(ErrorKind::InvalidRequest, "register", "memory of zero bytes"));
        }
        let mut regions = Vec::new();
        for transport in &self.0.transports {
            // SAFETY: handed on to the caller.
            regions.push(unsafe { transport.register(&memory, access)? });
        }
        Ok(Region(Arc::new(RegionInner {
            regions,
            start: memory.as_ptr(),
            len: memory.len() as u64,
            memory,
            access,
            id: self.0.next_region.fetch_add(1, Ordering::Relaxed),
            fabric_id: self.0.id,
            fabric: Arc::downgrade(&self.0),
            revoked: AtomicBool::new(false),
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
        admission::connect_local(&self.0, &other.0)
    }

    /// Posts one receive on the first transport. The outcome says who sent, how
    /// many bytes and which imm. It has no deadline; drop it to take it back.
    pub fn recv(&self, region: &Region, range: std::ops::Range<usize>) -> Result<Op> {
        let (offset, len) = region.0.check(range, "recv")?;
        if len == 0 || region.0.fabric_id != self.0.id {
            let why = "receive into at least one byte of a region of this fabric";
            return Err(Error::new(ErrorKind::InvalidRequest, "recv", why));
        }
        self.0.check_open("recv")?;
        let engine = &self.0.transports[0].engine;
        let id = engine.insert("recv")?;
        engine.control(Control::Receive { id, region: Arc::clone(&region.0), offset, len });
        Ok(Op::pending(Arc::clone(engine), id))
    }

    /// `count` receives of `size` bytes on every transport, reposted by themselves.
    pub fn recv_pool(&self, count: usize, size: usize) -> Result<RecvPool> {
        self.0.check_open("recv_pool")?;
        let engines: Vec<_> =
            self.0.transports.iter().map(|transport| Arc::clone(&transport.engine)).collect();
        RecvPool::new(self, &engines, count, size)
    }

    /// One turn of every engine of a caller-driven fabric; nothing otherwise.
    pub fn step(&self) -> Progress {
        self.0.transports.iter().filter_map(Transport::step).fold(Progress::default(), |mut sum, turn| {
            sum.events += turn.events;
            sum.posted += turn.posted;
            sum.outstanding += turn.outstanding;
            sum
        })
    }

    /// When a caller-driven fabric has something to do by itself, in its own clock: a
    /// deadline, or what a modelled device has under way. Who drives it in virtual time
    /// moves the clock there when a turn did nothing. `Time::NEVER` with workers.
    pub fn due(&self) -> Time {
        self.0.transports.iter().map(Transport::due).fold(Time::NEVER, Time::min)
    }

    /// A hash over all that happened: caller-driven runs of one seed agree on it.
    pub fn event_hash(&self) -> u64 {
        let hashes = self.0.transports.iter().map(|transport| transport.engine.hash.load(Ordering::Relaxed));
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

    /// Ends everything: peers see `Closed`, operations end, threads are joined.
    /// Every later call on this fabric fails with `Closed`.
    pub fn close(&self) {
        self.0.close();
    }

    pub(crate) fn drive(&self) -> bool {
        self.0.drive()
    }
}

impl FabricInner {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn control_settings(&self) -> ControlSettings {
        self.settings
    }

    pub(crate) fn bootstrap(&self) -> Arc<dyn Bootstrap> {
        Arc::clone(&self.bootstrap)
    }

    pub(crate) fn published(&self, name: &str) -> Option<Vec<u8>> {
        let region = lock(&self.published).get(name).cloned();
        region.filter(|region| !region.0.is_revoked()).map(|region| region.descriptor().to_bytes())
    }

    /// Label and domain ids of each transport, as descriptors name them.
    pub(crate) fn addresses(&self) -> Vec<(String, Vec<u64>)> {
        self.transports.iter().map(Transport::address).collect()
    }

    /// When an operation submitted now must have ended.
    pub(crate) fn deadline(&self, span: Option<Duration>) -> Time {
        self.clock.now().after(span.unwrap_or(self.default_deadline))
    }

    /// Starts a revocation: peers are told, the engine waits until it is quiet.
    pub(crate) fn revoke(&self, region: Arc<RegionInner>) -> Result<Op> {
        // Refused from this moment on; the engine only waits for who is inside.
        let quiet = region.poll_quiet();
        for peer in lock(&self.peers).values() {
            peer.tell_revoked(region.id);
        }
        if let Poll::Ready(result) = quiet {
            return Ok(Op::ready(result.map(|()| Outcome::default())));
        }
        self.check_open("revoke")?;
        let engine = &self.transports[0].engine;
        let id = engine.insert("revoke")?;
        engine.control(Control::Revoke { id, region, deadline: self.deadline(None) });
        Ok(Op::pending(Arc::clone(engine), id))
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: PeerId) {
        let peer = lock(&self.peers).remove(&peer);
        drop(peer);
    }

    /// Takes a turn of every engine if this fabric is caller-driven.
    pub(crate) fn drive(&self) -> bool {
        self.transports.iter().filter(|transport| transport.engine.drive()).count() > 0
    }

    /// The control thread, started with the first listen or connect.
    fn control_thread(&self, operation: &'static str) -> Result<Arc<ControlThread>> {
        self.check_open(operation)?;
        let mut control = lock(&self.control);
        if let Some(thread) = &*control {
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(ControlThread::start()?);
        *control = Some(Arc::clone(&thread));
        Ok(thread)
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, operation, "the fabric was closed"));
        }
        Ok(())
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let peers: Vec<_> = lock(&self.peers).drain().map(|(_, peer)| peer).collect();
        peers.iter().for_each(|peer| peer.0.session.goodbye());
        if let Some(thread) = lock(&self.control).take() {
            thread.shutdown();
        }
        for peer in peers {
            peer.part(Error::new(ErrorKind::Closed, "close", "this fabric was closed"));
        }
        self.transports.iter().for_each(Transport::close);
        lock(&self.published).clear();
    }
}

impl Drop for FabricInner {
    fn drop(&mut self) {
        self.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder panics half way through a change: poison carries no news.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
