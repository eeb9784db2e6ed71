//! What the clones of a fabric share, and how it ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Poll;
use std::time::Duration;

use super::group::Group;
use super::placement::Placing;
use super::transport::Transport;
use super::{lock, tenant};
use crate::control::{Bootstrap, ControlSettings, ControlThread, Identity, Room, Tasks};
use crate::engine::{Control, EngineHandle};
use crate::region::RegionInner;
use crate::{Clock, Error, ErrorKind, Op, Outcome, Peer, PeerId, Region, Result, Time};

pub(crate) struct FabricInner {
    pub(super) id: u64,
    pub(super) lineage: tenant::Lineage,
    pub(super) identity: Identity,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) default_deadline: Duration,
    pub(super) transports: Vec<Transport>,
    pub(super) placing: Placing,
    pub(super) settings: ControlSettings,
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) control: Mutex<Option<Arc<ControlThread>>>,
    /// What `control` has under way, where its end does not await it. Stays when that is taken.
    pub(super) farewells: OnceLock<Arc<Tasks>>,
    pub(super) room: Room,
    pub(super) published: Mutex<HashMap<String, Region>>,
    pub(super) peers: Mutex<HashMap<PeerId, Peer>>,
    pub(super) next_region: AtomicU64,
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

    pub(crate) fn default_deadline(&self) -> Duration {
        self.default_deadline
    }

    /// Rails of all transports.
    pub(crate) fn rails(&self) -> usize {
        self.groups().map(|group| group.rails.len()).sum()
    }

    pub(crate) fn control_settings(&self) -> ControlSettings {
        self.settings
    }

    pub(crate) fn bootstrap(&self) -> Arc<dyn Bootstrap> {
        Arc::clone(&self.bootstrap)
    }

    /// Where peers that come to a listener shake hands.
    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    pub(crate) fn published(&self, name: &str) -> Option<Vec<u8>> {
        let region = lock(&self.published).get(name).cloned();
        region.filter(|region| !region.0.is_revoked()).map(|region| region.descriptor().to_bytes())
    }

    /// Label and domain ids of each transport, as descriptors name them.
    pub(crate) fn addresses(&self) -> Vec<(String, Vec<u64>)> {
        self.transports.iter().map(Transport::address).collect()
    }

    /// When an operation submitted `now` must have ended.
    pub(crate) fn deadline(&self, now: Time, span: Option<Duration>) -> Time {
        now.after(span.unwrap_or(self.default_deadline))
    }

    /// The engine that waits of the whole fabric look to.
    pub(crate) fn first_engine(&self) -> Arc<EngineHandle> {
        Arc::clone(self.transports[0].first_engine())
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
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
        let engine = self.transports[0].first_engine();
        let id = engine.insert("revoke")?;
        engine.control(Control::Revoke { id, region, deadline: self.deadline(self.now(), None) });
        Ok(Op::pending(Arc::clone(engine), id))
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: PeerId) {
        let peer = lock(&self.peers).remove(&peer);
        drop(peer);
    }

    /// The rail groups of all transports.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.transports.iter().flat_map(|transport| &transport.groups)
    }

    /// Takes a turn of every engine if this fabric is caller-driven.
    pub(crate) fn drive(&self) -> bool {
        self.groups().filter(|group| group.engine.drive()).count() > 0
    }

    /// The control thread, started with the first listen or connect.
    pub(crate) fn control_thread(&self, operation: &'static str) -> Result<Arc<ControlThread>> {
        // Let go after the lock: if it is the last handle of the parent, that closes its
        // tenants, and so this one.
        let parent = self.parent();
        let mut control = lock(&self.control);
        // Under the lock, so that `close` finds whatever is started here.
        self.check_open(operation)?;
        if let Some(thread) = &*control {
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(self.own_thread(parent.as_deref())?);
        *control = Some(Arc::clone(&thread));
        if let Some(tasks) = thread.tasks() {
            let _ = self.farewells.set(tasks);
        }
        Ok(thread)
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, operation, "the fabric was closed"));
        }
        Ok(())
    }
}
