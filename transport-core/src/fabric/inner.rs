//! The state that the clones of a fabric share, and how a fabric closes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

#[cfg(unix)]
use super::admin_service::AdminService;
use super::group::Group;
use super::placement::PlacementPolicy;
use super::transport::Transport;
use super::{RegistrationCounts, lock, tenant};
#[cfg(unix)]
use crate::admin::SocketFile;
use crate::control::{Bootstrap, ControlSettings, ControlThread, HandshakeLimiter, Identity, TaskTracker};
use crate::engine::index::{IndexVec, TransportIndex};
use crate::engine::memory::RetainedMemory;
use crate::engine::memory::{RegionInner, RegionOwner};
use crate::engine::op::needs_steps;
use crate::engine::{Control, EngineHandle};
use crate::notifications::{InboxHost, Notifier};
use crate::spi::{HostArenas, Revocation};
use crate::{Access, Clock, Error, ErrorKind, Op, PathPolicy, Peer, PeerId, Region, Result, Time};

pub(crate) struct FabricInner {
    pub(super) id: u64,
    pub(super) tenancy: tenant::Tenancy,
    pub(super) identity: Identity,
    pub(super) clock: Arc<dyn Clock>,
    /// The seed that the fabric was opened with, and how many handles of peers have taken one from it.
    pub(super) seed: u64,
    pub(super) handle_seeds: AtomicU64,
    pub(super) default_deadline: Duration,
    pub(super) path_policy: PathPolicy,
    pub(super) transports: IndexVec<TransportIndex, Transport>,
    pub(super) placement: PlacementPolicy,
    pub(super) settings: ControlSettings,
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) control: Mutex<Option<Arc<ControlThread>>>,
    /// The tasks of `control` that run on a runtime of the caller, where the end of `control` does not await them. Set
    /// once, and kept after `control` was taken.
    pub(super) closing_tasks: OnceLock<Arc<TaskTracker>>,
    /// Limits the handshakes of peers that connect to a listener.
    pub(super) handshakes: HandshakeLimiter,
    pub(super) published: Mutex<HashMap<String, Region>>,
    pub(super) peers: Mutex<HashMap<PeerId, Peer>>,
    pub(super) next_region: AtomicU64,
    pub(super) registrations: RegistrationCounts,
    /// Set if the fabric was opened with notifications.
    pub(super) notifier: OnceLock<Notifier>,
    /// Allocates the host memory of regions.
    pub(super) host_memory: Arc<HostArenas>,
    /// The memory of dropped regions, as long as a rail may touch it.
    pub(super) retained: Weak<RetainedMemory>,
    /// The file of the admin socket, if there is one. Removed at the close.
    #[cfg(unix)]
    pub(super) admin_socket: Mutex<Option<SocketFile>>,
    pub(super) closed: AtomicBool,
}

impl FabricInner {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// A seed for the next handle of a peer.
    pub(crate) fn next_handle_seed(&self) -> u64 {
        // Far from each other, and from the seeds of the transports.
        const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;
        let number = self.handle_seeds.fetch_add(1, Ordering::Relaxed);
        self.seed.wrapping_add(STRIDE.wrapping_mul(number + 1))
    }

    pub(crate) fn default_deadline(&self) -> Duration {
        self.default_deadline
    }

    pub(crate) fn path_policy(&self) -> PathPolicy {
        self.path_policy
    }

    /// What notifications need, if the fabric was opened with them.
    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.notifier.get()
    }

    /// The transports that the user has asked for: all but the companions.
    pub(super) fn data_transports(&self) -> impl Iterator<Item = &Transport> {
        self.transports.iter().filter(|transport| !transport.is_companion)
    }

    /// The number of rails of all transports.
    pub(crate) fn rails(&self) -> usize {
        self.groups().map(|group| group.rails.len()).sum()
    }

    /// The deadline of an operation that is submitted `now`.
    pub(crate) fn deadline(&self, now: Time, span: Option<Duration>) -> Time {
        now.after(span.unwrap_or(self.default_deadline))
    }

    /// The engine that has the timers of waits that concern the whole fabric.
    pub(crate) fn first_engine(&self) -> &Arc<EngineHandle> {
        self.transports[TransportIndex::FIRST].first_engine()
    }

    /// The engine to post a single receive on: that of the first transport that reaches a connected peer, or of the
    /// first of all if no peer is connected.
    pub(super) fn receiving_engine(&self) -> &Arc<EngineHandle> {
        let reached =
            |peer: &Peer| peer.0.first_links().find(|link| link.is_up()).map(|link| link.engine.transport);
        let first = lock(&self.peers).values().filter_map(reached).min();
        self.transports[first.unwrap_or(TransportIndex::FIRST)].first_engine()
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// The error for a revocation if bytes of connected peers may still land after the keys are taken back.
    fn late_write_error(&self, region: &RegionInner) -> Option<Error> {
        if !region.access.contains(Access::REMOTE_WRITE) {
            return None;
        }
        let peers = lock(&self.peers);
        let is_connected = |transport: TransportIndex| {
            let mut links = peers.values().flat_map(|peer| &peer.0.links);
            links.any(|link| link.is_up() && link.engine.transport == transport)
        };
        let is_late = |transport: &&Transport| {
            let number = transport.first_engine().transport;
            transport.domains[0].capabilities().revocation == Revocation::Late
                && region.is_registered_on(number, 0..transport.domains.len())
                && is_connected(number)
        };
        let transport = self.transports.iter().find(is_late)?;
        let why = format!(
            "the peers' key is taken back, and transport {:?} refuses it from now on; but the transport does not say \
             when it has finished the writes that it was receiving, so bytes may land until the peers' writes or \
             their connections have ended",
            transport.label
        );
        Some(Error::new(ErrorKind::Unsupported, "revoke", why))
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: PeerId) {
        let peer = lock(&self.peers).remove(&peer);
        drop(peer);
        // The peer, which is disconnected, must not reach what is allocated from now on.
        self.host_memory.retire();
    }

    /// The rail groups of all transports.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.transports.iter().flat_map(|transport| &transport.groups)
    }

    /// Runs a step of every engine if this fabric is caller-driven. Returns whether it is.
    pub(crate) fn drive(&self) -> bool {
        self.groups().filter(|group| group.engine.drive()).count() > 0
    }

    /// The control thread. The first listen or connect starts it.
    pub(crate) fn control_thread(&self, operation: &'static str) -> Result<Arc<ControlThread>> {
        // Dropped after the lock: if this is the last handle of the parent, the drop closes the parent's tenants, and
        // so this fabric.
        let parent = self.parent();
        let mut control = lock(&self.control);
        // Checked under the lock, so that `close` finds the thread that is started here.
        self.check_open(operation)?;
        if let Some(thread) = &*control {
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(self.start_control_thread(parent.as_deref())?);
        *control = Some(Arc::clone(&thread));
        if let Some(tasks) = thread.tasks() {
            let _ = self.closing_tasks.set(tasks);
        }
        Ok(thread)
    }

    /// Listens at the admin socket.
    #[cfg(unix)]
    pub(super) fn open_admin_socket(self: &Arc<Self>, path: &Path) -> Result<()> {
        let spawner = self.control_thread("open")?.spawner();
        let (file, listener) = SocketFile::listen(path)?;
        *lock(&self.admin_socket) = Some(file);
        spawner.spawn(AdminService::new(Arc::downgrade(self), spawner.clone()).serve(listener));
        Ok(())
    }

    #[cfg(not(unix))]
    pub(super) fn open_admin_socket(self: &Arc<Self>, path: &Path) -> Result<()> {
        let why = format!("{}: this system has no Unix sockets", path.display());
        Err(Error::new(ErrorKind::Unsupported, "open the admin socket", why))
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, operation, "the fabric was closed"));
        }
        Ok(())
    }

    /// Begins to end the sessions of this fabric and of its tenants.
    pub(super) fn begin_shutdown(&self) {
        self.tenants().iter().for_each(|tenant| tenant.begin_shutdown());
        if let Some(control) = &*lock(&self.control) {
            control.begin_shutdown();
        }
    }

    pub(super) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        #[cfg(unix)]
        drop(lock(&self.admin_socket).take());
        self.close_tenants();
        let peers: Vec<_> = lock(&self.peers).drain().map(|(_, peer)| peer).collect();
        peers.iter().for_each(|peer| peer.0.context.session.goodbye());
        // Not under the lock: the tasks that `shutdown` awaits may ask for the thread.
        let thread = lock(&self.control).take();
        if let Some(thread) = thread {
            thread.shutdown();
        }
        for peer in peers {
            peer.close(Error::new(ErrorKind::Closed, "close", "this fabric was closed"));
        }
        self.transports.iter().for_each(Transport::close);
        lock(&self.published).clear();
    }
}

impl InboxHost for FabricInner {
    fn has_peer(&self, peer: PeerId) -> bool {
        lock(&self.peers).contains_key(&peer)
    }

    fn peer_count(&self) -> usize {
        lock(&self.peers).len()
    }

    fn needs_steps(&self) {
        self.groups().for_each(|group| needs_steps(&group.engine));
    }

    fn flush(&self) {
        if let Some(notifier) = self.notifier() {
            notifier.flushes.flush_if_needed();
        }
    }

    fn fail_peer(&self, peer: PeerId, error: Error) {
        let peer = lock(&self.peers).get(&peer).cloned();
        if let Some(peer) = peer {
            tracing::warn!(peer = peer.id().number(), %error, "the peer breaks the protocol");
            peer.fail(error);
        }
    }
}

impl RegionOwner for FabricInner {
    fn incarnation(&self) -> u64 {
        self.identity.incarnation
    }

    fn addresses(&self) -> Vec<(String, Vec<u64>)> {
        self.transports.iter().map(Transport::address).collect()
    }

    /// The fabric tells the peers. Each engine that may use the region ends its operations there, takes the keys of
    /// its rails back, and waits until those rails are quiet.
    fn revoke(&self, region: &Arc<RegionInner>) -> Result<Op> {
        region.revoke_at_once();
        for peer in lock(&self.peers).values() {
            peer.announce_revoked(region.id);
        }
        self.check_open("revoke")?;
        let deadline = self.deadline(self.now(), None);
        let (mut parts, mut busy) = (Vec::new(), None);
        for group in self.groups() {
            let engine = &group.engine;
            if !region.is_registered_on(engine.transport, group.rails.clone()) {
                continue;
            }
            // A full op table leaves no slot to wait with. The engine revokes all the same.
            let id = engine.insert("revoke").map_err(|error| busy = Some(error)).ok();
            engine.control(Control::Revoke { id, region: Arc::clone(region), deadline });
            parts.extend(id.map(|id| Op::pending(Arc::clone(engine), id)));
        }
        parts.extend(self.late_write_error(region).map(|error| Op::ready(Err(error))));
        match busy {
            Some(error) => Err(error),
            None => Ok(Op::all(parts)),
        }
    }
}

impl Drop for FabricInner {
    fn drop(&mut self) {
        self.close();
    }
}
