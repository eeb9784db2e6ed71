//! Plain values that cross the hot path: requests in, events out.

use crate::ErrorKind;
use crate::copy::Way;

/// A connected peer's place in a domain, low, as lists are indexed by it; unique until its `PeerGone`
/// was heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PeerSlot(pub u32);

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkKind {
    /// Local bytes to the peer's region; zero bytes are allowed with an imm.
    Write,
    /// The peer's bytes into the local region.
    Read,
    /// Local bytes into a receive the peer posted.
    Send,
}

/// One request to a device. Plain, copied, never allocated.
#[derive(Debug, Clone, Copy)]
pub struct WorkRequest {
    /// Comes back in the completion; unique among outstanding requests, and
    /// consecutive where requests stand together in a batch, mostly.
    pub id: u64,
    /// Whom it goes to.
    pub peer: PeerSlot,
    /// What it does.
    pub kind: WorkKind,
    /// First local byte.
    pub local: *mut u8,
    /// Key of the local registration.
    pub lkey: u64,
    /// Bytes. A write of none without an imm warms up: the backend touches what the
    /// first request to the peer would have to, a page or a connection, and completes it; nothing
    /// is delivered, and `local`, `remote` and the keys mean nothing. A read of none flushes: it completes once
    /// the bytes of all writes to the peer whose end was told are visible there. It needs no right to
    /// read, and `local`, `remote` and the keys mean nothing.
    pub len: u64,
    /// First remote byte: the import's base plus an offset.
    pub remote: u64,
    /// Key of the import; ignored for `Send`.
    pub rkey: u64,
    /// Immediate data, all 32 bits the user's.
    pub imm: Option<u32>,
    /// How a copy should move the bytes; chosen by the whole operation's size.
    pub way: Way,
}

// SAFETY: the pointer is a plain address here; who may dereference it, and when,
// is the contract of `Endpoint::post`.
unsafe impl Send for WorkRequest {}
// SAFETY: as above; a shared `WorkRequest` gives no access to the bytes.
unsafe impl Sync for WorkRequest {}

/// A buffer for one incoming message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Comes back in the completion.
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

/// A failed completion: a kind and the provider's own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// What it means to the engine.
    pub kind: ErrorKind,
    /// The provider's code, for `Endpoint::describe`; 0 if it has none.
    pub code: i32,
}

/// Something that happened at an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Posted requests with consecutive ids are done. A backend joins neighbours
    /// where it can: one event for many costs the engine less than one for each.
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
    /// A posted request failed and moves no more bytes, and the peer's death looks the same as what
    /// `status` says: the engine finds out which it is.
    Doubted {
        /// The request's id.
        id: u64,
        /// Whom it was for.
        peer: PeerSlot,
        /// Why, if the peer lives.
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
    /// Peers reach the endpoint by another address now: they are to be told
    /// ([`crate::Connector::offer_again`]).
    Moved,
    /// The device is lost: nothing posted to this endpoint will move.
    DeviceLost {
        /// Why.
        status: Status,
    },
}

impl Event {
    /// The peer it is about, where it names one.
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
    stirred: bool,
}

impl Completions {
    /// Room for `room` events, at least one.
    pub fn with_room(room: usize) -> Self {
        let room = room.max(1);
        Self { events: Vec::with_capacity(room), room, stirred: false }
    }

    /// Events that can still be pushed.
    pub fn spare(&self) -> usize {
        self.room - self.events.len()
    }

    /// Appends an event. Without spare room it is refused and handed back.
    #[inline]
    pub fn push(&mut self, event: Event) -> Result<(), Event> {
        if self.events.len() == self.room {
            return Err(event);
        }
        self.events.push(event);
        Ok(())
    }

    /// What has been pushed, in order.
    pub fn as_slice(&self) -> &[Event] {
        &self.events
    }

    /// Puts another event in the place of one.
    pub fn replace(&mut self, place: usize, event: Event) {
        self.events[place] = event;
    }

    /// Says that something moved that has no event here, like a peer's write into our memory
    /// where polling carries it out: the worker stays awake.
    pub fn stir(&mut self) {
        self.stirred = true;
    }

    /// Whether something moved without an event.
    pub fn is_stirred(&self) -> bool {
        self.stirred
    }

    /// Whether a poll has left nothing to act on.
    #[inline]
    pub fn is_untouched(&self) -> bool {
        self.events.is_empty() && !self.stirred
    }

    /// Forgets all events and keeps the memory.
    pub fn clear(&mut self) {
        self.events.clear();
        self.stirred = false;
    }
}
