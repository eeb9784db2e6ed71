//! The connections of a domain. The connector (any thread) adds and closes them; the endpoint's thread uses and removes
//! them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use multirail_spi::{PeerSlot, RemoteMemory, WorkKind};

use crate::staging_buffer::{RemoteBuffer, StagingBuffer};
use crate::wire::WAKE_IMM;

/// A connection to one peer, and the staging buffers of both processes.
pub(crate) struct Connection {
    pub peer: PeerSlot,
    /// This process's staging buffer.
    pub buffer: StagingBuffer,
    /// The peer's staging buffer, and its import.
    remote: OnceLock<(RemoteBuffer, Arc<dyn RemoteMemory>)>,
    /// Whether this process offers to use [`WAKE_IMM`].
    pub offers_wake_imm: bool,
    is_closing: AtomicBool,
}

impl Connection {
    fn new(peer: PeerSlot, buffer: StagingBuffer, offers_wake_imm: bool) -> Self {
        let (remote, is_closing) = (OnceLock::new(), AtomicBool::new(false));
        Self { peer, buffer, remote, offers_wake_imm, is_closing }
    }

    /// The peer's staging buffer. `None` if the peer does not stage, or is not connected yet.
    pub(crate) fn remote_buffer(&self) -> Option<RemoteBuffer> {
        self.remote.get().map(|(buffer, _)| *buffer)
    }

    /// Stores the import of the peer's staging buffer. The connection uses [`WAKE_IMM`] if both processes offer it.
    pub(crate) fn connect(&self, import: Arc<dyn RemoteMemory>, peer_offers_wake_imm: bool) {
        let wake_imm = (peer_offers_wake_imm && self.offers_wake_imm).then_some(WAKE_IMM);
        let buffer = RemoteBuffer { base: import.base(), rkey: import.rkey(), wake_imm };
        let _ = self.remote.set((buffer, import));
    }

    /// Whether the receiver would mistake the imm of a work request for [`WAKE_IMM`].
    pub(crate) fn looks_like_wake_imm(&self, kind: WorkKind, imm: Option<u32>) -> bool {
        let wake_imm = || self.remote_buffer().and_then(|buffer| buffer.wake_imm);
        kind == WorkKind::Write && imm == Some(WAKE_IMM) && wake_imm().is_some()
    }

    /// Marks the connection as closing: the endpoint removes it once the inner endpoint reports the peer as gone.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }
}

/// All connections of a domain, by peer slot.
#[derive(Default)]
pub(crate) struct Connections {
    /// Counts the insertions.
    version: AtomicU64,
    all: Mutex<Vec<Option<Arc<Connection>>>>,
}

impl Connections {
    /// Adds a connection. It offers [`WAKE_IMM`] if there are fewer than `max_wake_connections` connections already.
    pub(crate) fn insert(
        &self,
        peer: PeerSlot,
        buffer: StagingBuffer,
        max_wake_connections: u64,
    ) -> Arc<Connection> {
        let index = peer.0 as usize;
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() <= index {
            all.resize(index + 1, None);
        }
        let offers_wake_imm = (all.iter().flatten().count() as u64) < max_wake_connections;
        let connection = Arc::new(Connection::new(peer, buffer, offers_wake_imm));
        all[index] = Some(Arc::clone(&connection));
        self.version.fetch_add(1, Ordering::Release);
        connection
    }

    pub(crate) fn of(&self, peer: PeerSlot) -> Option<Arc<Connection>> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(peer.0 as usize).cloned().flatten()
    }

    pub(crate) fn clear(&self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Removes a connection, unless its peer slot belongs to a newer connection already.
    pub(crate) fn remove(&self, connection: &Arc<Connection>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = all.get_mut(connection.peer.0 as usize)
            && entry.as_ref().is_some_and(|known| Arc::ptr_eq(known, connection))
        {
            *entry = None;
        }
    }

    /// Returns all connections if some were added since version `seen`, and updates `seen`.
    #[inline]
    pub(crate) fn if_newer(&self, seen: &mut u64) -> Option<Vec<Option<Arc<Connection>>>> {
        if self.version.load(Ordering::Acquire) == *seen {
            return None;
        }
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = self.version.load(Ordering::Acquire);
        Some(all.clone())
    }
}
