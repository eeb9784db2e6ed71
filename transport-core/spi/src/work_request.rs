//! The plain values of the hot path: requests in, events out.

use crate::ErrorKind;
use crate::copy::CopyStrategy;

/// The number of a connected peer in a domain. Numbers are small, as they index lists. A number is unique until the
/// engine has seen its `PeerGone`.
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
    /// The number that the completion names. It is unique among outstanding requests. Requests that stand together in a
    /// batch mostly have consecutive numbers.
    pub id: u64,
    /// The peer that it goes to.
    pub peer: PeerSlot,
    /// What it does.
    pub kind: WorkKind,
    /// First local byte.
    pub local: *mut u8,
    /// Key of the local registration.
    pub lkey: u64,
    /// The number of bytes.
    ///
    /// A write of no bytes without an imm is a *warm-up*: the backend does what the first request to the peer would have
    /// to do (touch a page, make a connection), delivers nothing, and completes it. A read of no bytes is a *flush*: it
    /// completes once the bytes of all completed writes to the peer are visible there; it needs no right to read. Both
    /// ignore `local`, `remote` and the keys.
    pub len: u64,
    /// The first remote byte: the import's base plus an offset.
    pub remote: u64,
    /// The key of the import; ignored for `Send`.
    pub rkey: u64,
    /// Immediate data, all 32 bits the user's.
    pub imm: Option<u32>,
    /// How a copy should move the bytes, chosen by the size of the whole operation.
    pub strategy: CopyStrategy,
}

// SAFETY: the pointer is a plain address here; who may dereference it, and when,
// is the contract of `Endpoint::post`.
unsafe impl Send for WorkRequest {}
// SAFETY: as above; a shared `WorkRequest` gives no access to the bytes.
unsafe impl Sync for WorkRequest {}

/// A buffer for one incoming message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The number that the completion names.
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
    /// Posted requests with consecutive ids are done. A backend joins neighbours where it can: the engine handles one
    /// event for many requests faster than one event for each.
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
    /// A posted request failed and moves no more bytes, and the device reports the same status if the peer has died. The
    /// engine asks the peer to find out which it is.
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
    /// A peer's immediate data arrived; the bytes it announces are visible.
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
    /// ([`Connector::offer_again`](crate::Connector::offer_again)).
    EndpointChanged,
    /// The device is lost: no request that was posted to this endpoint moves bytes any more.
    DeviceLost {
        /// Why.
        status: Status,
    },
}

impl Event {
    /// The peer that the event names, if it names one.
    pub fn peer(&self) -> Option<PeerSlot> {
        match self {
            Self::Received { peer, .. } | Self::Imm { peer, .. } | Self::PeerGone { peer } => Some(*peer),
            _ => None,
        }
    }
}

/// A bounded batch of events, reused from poll to poll.
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

    /// Replaces the event at `place`.
    pub fn replace(&mut self, place: usize, event: Event) {
        self.events[place] = event;
    }

    /// Notes progress that has no event here, so that the worker stays awake: for example, a peer's write that this
    /// side's poll carries out.
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
