//! The plain values that cross between the engine, backends and the control plane: requests, events and grants.

use crate::ErrorKind;
use crate::copy::CopyStrategy;

/// The number of a connection to a domain of a peer, that is, of a rail pair. A peer with more rails than this side has
/// several slots in one domain. Numbers are small, because they index lists. A domain does not use a number again
/// before the engine has acted on its `PeerGone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PeerSlot(pub u32);

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkKind {
    /// Writes local bytes into the peer's region. With an imm, there may be no bytes.
    Write,
    /// Reads the peer's bytes into local memory.
    Read,
    /// Sends local bytes into a receive that the peer posted.
    Send,
}

/// One request to a device: a plain value that is copied and never allocated.
#[derive(Debug, Clone, Copy)]
pub struct WorkRequest {
    /// The number by which the completion names the request. It is unique among outstanding requests. Neighbours in a
    /// batch usually have consecutive numbers.
    pub id: u64,
    /// The peer that it goes to.
    pub peer: PeerSlot,
    /// What it does.
    pub kind: WorkKind,
    /// First local byte.
    pub local: *mut u8,
    /// Key of the local registration, perhaps with [`WorkRequest::COALESCE`].
    pub lkey: u64,
    /// The number of bytes.
    ///
    /// A write of no bytes without an imm is a *warm-up*: the backend does the work of the first request to the peer in
    /// advance (touches a page, makes a connection), and delivers nothing. A read of no bytes is a *flush*: it
    /// completes once the bytes of all completed writes to the peer are visible there. It does not need `REMOTE_READ`.
    /// Both ignore `local`, `remote` and the keys.
    pub len: u64,
    /// The first remote byte: the import's base plus an offset.
    pub remote: u64,
    /// The key of the import; ignored for `Send`.
    pub rkey: u64,
    /// Immediate data, all 32 bits the user's.
    pub imm: Option<u32>,
    /// How the CPU copies the bytes, if it does. Chosen by the size of the whole operation.
    pub strategy: CopyStrategy,
}

impl WorkRequest {
    /// The bit of `lkey` that says that the bytes may share a large work request with those of others, through slots of
    /// both sides ([`RemoteMemory::max_coalesced`](crate::RemoteMemory::max_coalesced)). Only for a region that allows
    /// it. No device's key has this bit: keys have 32 bits, or are addresses of less than 48. (A field of its own cost an
    /// instruction per request.)
    pub const COALESCE: u64 = 1 << 61;

    /// A write of no bytes without an imm: a warm-up, which delivers nothing.
    pub fn warm_up(id: u64, peer: PeerSlot) -> Self {
        Self {
            id,
            peer,
            kind: WorkKind::Write,
            local: std::ptr::null_mut(),
            lkey: 0,
            len: 0,
            remote: 0,
            rkey: 0,
            imm: None,
            strategy: CopyStrategy::Plain,
        }
    }

    /// Whether the bytes may share a large work request.
    #[inline]
    pub fn coalesces(&self) -> bool {
        self.lkey & Self::COALESCE != 0
    }
}

// SAFETY: the pointer is a plain address here; who may dereference it, and when,
// is the contract of `Endpoint::post`.
unsafe impl Send for WorkRequest {}
// SAFETY: as above; a shared `WorkRequest` gives no access to the bytes.
unsafe impl Sync for WorkRequest {}

/// A buffer for one incoming message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The number by which the completion names the receive.
    pub id: u64,
    /// First byte.
    pub local: *mut u8,
    /// Key of the local registration.
    pub lkey: u64,
    /// Room in bytes.
    pub len: u64,
}

// SAFETY: as for `WorkRequest`: an address, not an access.
unsafe impl Send for ReceiveRequest {}

/// Why a request failed: a kind, and the provider's own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// What the failure means to the engine.
    pub kind: ErrorKind,
    /// The provider's code, for `Endpoint::describe`; 0 if it has none.
    pub code: i32,
}

/// Something that happened at an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Posted requests with consecutive ids have succeeded. A backend reports many requests by one event where it can:
    /// the engine handles one event faster than many.
    Done {
        /// The first request's id.
        first: u64,
        /// How many.
        count: u32,
    },
    /// A posted request failed and moves no more bytes.
    Failed {
        /// The request's id.
        id: u64,
        /// Why.
        status: Status,
    },
    /// A posted request failed and moves no more bytes. Its status does not tell whether the peer has died: the device
    /// reports the same status in that case. The engine probes the peer to find out.
    FailedUnconfirmed {
        /// The request's id.
        id: u64,
        /// The peer that it was for.
        peer: PeerSlot,
        /// Why it failed, if the peer is alive.
        status: Status,
    },
    /// A posted receive holds a message.
    Received {
        /// The receive's id.
        id: u64,
        /// Who sent it.
        peer: PeerSlot,
        /// Bytes written to the front of the buffer.
        len: u64,
        /// Immediate data, if it carried any.
        imm: Option<u32>,
    },
    /// A posted receive ended without a message.
    ReceiveFailed {
        /// The receive's id.
        id: u64,
        /// Why.
        status: Status,
    },
    /// A peer's immediate data arrived. The bytes that it announces are visible.
    Imm {
        /// Who sent it.
        peer: PeerSlot,
        /// The 32 bits.
        imm: u32,
    },
    /// The last event of a disconnected peer.
    PeerGone {
        /// The slot, free for reuse from the next poll on.
        peer: PeerSlot,
    },
    /// Peers reach the endpoint by another address from now on. The engine sends them the next offer
    /// ([`Connector::next_offer`](crate::Connector::next_offer)).
    EndpointChanged,
    /// The device is lost: no request that was posted to this endpoint touches memory of this side any more. Bytes that
    /// are on their way to a peer may still land there.
    ///
    /// The engine considers a request lost if it was not reported at all, or was reported as failed with
    /// [`ErrorKind::DeviceLost`](crate::ErrorKind::DeviceLost). All others have ended. No event about requests follows.
    DeviceLost {
        /// Why.
        status: Status,
    },
}

impl Event {
    /// The peer of an arrival or of `PeerGone`; `None` for other events.
    pub fn peer(&self) -> Option<PeerSlot> {
        match self {
            Self::Received { peer, .. } | Self::Imm { peer, .. } | Self::PeerGone { peer } => Some(*peer),
            _ => None,
        }
    }
}

/// The events of a poll: completions, arrivals and others. It has room for a limited number, and is reused from poll to
/// poll.
#[derive(Debug)]
pub struct Completions {
    events: Vec<Event>,
    room: usize,
    has_progress: bool,
}

impl Completions {
    /// Room for `room` events, at least one.
    pub fn with_room(room: usize) -> Self {
        let room = room.max(1);
        Self { events: Vec::with_capacity(room), room, has_progress: false }
    }

    /// Events that can still be pushed.
    pub fn spare(&self) -> usize {
        self.room - self.events.len()
    }

    /// Appends an event. Hands it back if there is no spare room.
    #[inline]
    pub fn push(&mut self, event: Event) -> Result<(), Event> {
        if self.events.len() == self.room {
            return Err(event);
        }
        self.events.push(event);
        Ok(())
    }

    /// The events, in the order of their pushes.
    pub fn as_slice(&self) -> &[Event] {
        &self.events
    }

    /// Replaces the event at `index`.
    pub fn replace(&mut self, index: usize, event: Event) {
        self.events[index] = event;
    }

    /// Notes progress without an event, so that the worker stays awake: for example, this side's poll has carried out a
    /// peer's write.
    pub fn note_progress(&mut self) {
        self.has_progress = true;
    }

    /// Whether there was progress without an event.
    pub fn made_progress(&self) -> bool {
        self.has_progress
    }

    /// Whether the poll found neither an event nor progress.
    #[inline]
    pub fn is_untouched(&self) -> bool {
        self.events.is_empty() && !self.has_progress
    }

    /// Removes all events, and keeps the allocation.
    pub fn clear(&mut self) {
        self.events.clear();
        self.has_progress = false;
    }
}

/// What a side has received over a rail pair (connected rails of this side and of the peer), once nothing that its peer
/// has posted there can arrive any more ([`Connector::fence`](crate::Connector::fence)).
#[derive(serde::Serialize, serde::Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FenceReport {
    /// Imms, since the peer was connected.
    pub imms: u64,
    /// Messages, since the peer was connected.
    pub messages: u64,
}

/// What a side asks its peer for, about a rail pair.
#[derive(serde::Serialize, serde::Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceKind {
    /// A fence, because the device of the asking side is lost.
    DeviceLost,
    /// A fence, because the path between the two devices is broken. It may work again later.
    PathLost,
    /// The fence is to be lifted.
    Lift,
}

/// Takes the answer to a fence. If it is dropped without an answer, the side that has asked learns that there is none.
pub type FenceReply = Box<dyn FnOnce(crate::Result<FenceReport>) + Send>;

/// A grant as it goes over the control connection: the receiver of bytes says how much the peer may send to it. Imms
/// and messages are totals since the connection began. So a grant that arrives twice changes nothing.
#[derive(serde::Serialize, serde::Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WireGrant {
    /// Bytes that may be posted and not acknowledged.
    pub bytes: u64,
    /// Requests with an imm, since the peer was connected.
    pub imms: u64,
    /// Messages, since the peer was connected.
    pub messages: u64,
}
