//! The initiator's half of a connection: this domain's access to a peer.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use multirail_spi::{ErrorKind, PeerSlot, StagingPolicy, WorkKind, WorkRequest};

use crate::inbound::Inbound;
use crate::other_process::TargetConnection;
use crate::regions::Regions;
use crate::segment::ConnectionLayout;
use crate::segment::message_ring::{self, MAX_MESSAGE};
use crate::segment::staging_buffer::SharedStagingBuffer;

/// A connection to a peer. The peer's segment is mapped here. The peer is the target of this half.
pub(crate) struct Outbound {
    /// This domain's slot for the peer.
    pub(crate) peer: PeerSlot,
    alive: AtomicBool,
    /// Points into the segment of `location`. Each request saves one indirection by it.
    layout: NonNull<ConnectionLayout>,
    /// The position in the peer's staging buffer.
    pub(crate) staging_cursor: Mutex<StagingCursor>,
    pub(crate) location: PeerLocation,
}

// SAFETY: `layout` points into the segment that `location` owns or shares; `ConnectionLayout` is `Sync`.
unsafe impl Send for Outbound {}
// SAFETY: as above.
unsafe impl Sync for Outbound {}

/// Where the peer is.
pub(crate) enum PeerLocation {
    /// In this process. This side holds the peer's half of the connection, and asks the peer's region table itself.
    ThisProcess { inbound: Arc<Inbound>, regions: Weak<Regions>, staging: StagingPolicy },
    /// In another process of this host.
    OtherProcess(Box<TargetConnection>),
}

/// The initiator's position in a staging buffer: the target has the slots `tail..head`. The connection keeps it,
/// since it outlives an endpoint.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StagingCursor {
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

impl Outbound {
    /// A live connection.
    pub(crate) fn new(peer: PeerSlot, location: PeerLocation) -> Self {
        let layout = NonNull::from(match &location {
            PeerLocation::ThisProcess { inbound, .. } => inbound.layout(),
            PeerLocation::OtherProcess(connection) => connection.segment.content(),
        });
        Self { peer, alive: AtomicBool::new(true), layout, staging_cursor: Mutex::default(), location }
    }

    /// The content of the peer's segment.
    #[inline]
    pub(crate) fn layout(&self) -> &ConnectionLayout {
        // SAFETY: a segment stays mapped, in its place, as long as `location` holds it.
        unsafe { self.layout.as_ref() }
    }

    /// The peer's staging buffer, once an import needed it.
    #[inline]
    pub(crate) fn staging_buffer(&self) -> Option<&SharedStagingBuffer> {
        match &self.location {
            PeerLocation::ThisProcess { inbound, .. } => inbound.staging_buffer(),
            PeerLocation::OtherProcess(connection) => {
                connection.staging_buffer.get().map(|segment| segment.content())
            }
        }
    }

    /// Returns true until either side closes the connection, or the peer's death is noticed.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed) && self.layout().flags.closed.load(Ordering::Relaxed) == 0
    }

    /// Returns true once this side has closed the connection.
    pub(crate) fn is_closed(&self) -> bool {
        !self.alive.load(Ordering::Acquire)
    }

    /// Closes the connection on this side: no request goes to the peer any more.
    pub(crate) fn close(&self) {
        self.alive.store(false, Ordering::Release);
    }

    /// Wakes the peer's endpoint.
    #[cold]
    pub(crate) fn wake(&self) {
        match &self.location {
            PeerLocation::ThisProcess { inbound, .. } => inbound.wake(),
            PeerLocation::OtherProcess(connection) => connection.wakeup.wake(),
        }
    }

    /// Tells the peer's endpoint that this side has written into its armed ring, or into its staging buffer.
    #[cold]
    pub(crate) fn mark_ready(&self) {
        match &self.location {
            PeerLocation::ThisProcess { inbound, .. } => inbound.mark_ready(),
            PeerLocation::OtherProcess(connection) => connection.mark_ready(),
        }
    }

    /// Sends an imm, and wakes the peer if it sleeps. Returns false if the peer's message ring is full.
    #[inline]
    pub(crate) fn send_imm(&self, imm: u32) -> bool {
        message_ring::send_imm(self.layout(), imm, || self.mark_ready())
    }

    /// Runs a request that moves no bytes between regions: a message or an empty write. Returns `None` if the peer's
    /// message ring is full.
    ///
    /// # Safety
    /// The local span of a message is readable.
    pub(crate) unsafe fn send(&self, request: &WorkRequest) -> Option<Result<(), ErrorKind>> {
        let sent = match (request.kind, request.imm) {
            (WorkKind::Send, _) if request.len > MAX_MESSAGE as u64 => return Some(Err(ErrorKind::TooLarge)),
            // SAFETY: the length was checked; the caller guarantees that the span is readable.
            (WorkKind::Send, imm) => unsafe {
                let wake = || self.mark_ready();
                message_ring::send_message(self.layout(), request.local, request.len as usize, imm, wake)
            },
            (WorkKind::Write, Some(imm)) => self.send_imm(imm),
            _ => true,
        };
        sent.then_some(Ok(()))
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        // Imports hold their `Outbound`, so no request of this side is under way there now.
        if let PeerLocation::ThisProcess { inbound, .. } = &self.location {
            inbound.mark_initiator_gone();
        }
    }
}
