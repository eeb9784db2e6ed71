//! The two halves of a connection: what a peer may do here, and what we may do there.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use multirail_spi::{PeerSlot, Result};

use crate::board::Lease;
#[cfg(target_os = "linux")]
use crate::dial::Line;
use crate::domain::Core;
use crate::door::Door;
use crate::lane::Inlet;
use crate::offer::Token;
use crate::outlet::Cursor;
use crate::segment::{Layout, Segment};
use crate::stage::Stage;

/// Our side of a peer's way in: the segment it was given, and who it is.
pub(crate) struct Inbound {
    segment: Segment,
    door: Arc<Door>,
    pub(crate) token: Token,
    /// Leases of the board that were ever opened, from the first on.
    leases: AtomicUsize,
    claimed: AtomicBool,
    closed: AtomicBool,
    departed: AtomicBool,
    inlet: Mutex<Option<Inlet>>,
    /// For regions the peer cannot reach itself, once it asked for it.
    stage: OnceLock<Segment<Stage>>,
    /// Slots of the stage that were served.
    pub(crate) served: AtomicU64,
    /// The process on the other side, once another process has claimed it.
    #[cfg(target_os = "linux")]
    pub(crate) initiator: OnceLock<crate::process::Process>,
}

impl Inbound {
    /// A new one; who rings at `door` wakes the endpoint.
    pub(crate) fn new(segment: Segment, door: Arc<Door>, token: Token) -> Self {
        Self {
            segment,
            door,
            token,
            leases: AtomicUsize::new(0),
            claimed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            departed: AtomicBool::new(false),
            inlet: Mutex::new(Some(Inlet::default())),
            stage: OnceLock::new(),
            served: AtomicU64::new(0),
            #[cfg(target_os = "linux")]
            initiator: OnceLock::new(),
        }
    }

    /// Whether the caller is the first: it is the initiator, and nobody else ever is.
    pub(crate) fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    /// Puts memory under all of the segment.
    pub(crate) fn commit(&self) -> Result<()> {
        self.segment.commit()
    }

    /// The shared memory.
    #[inline]
    pub(crate) fn layout(&self) -> &Layout {
        self.segment.layout()
    }

    /// Lets the peer into a region; by the owner of the regions alone.
    pub(crate) fn open(&self, slot: usize, generation: u32) {
        self.leases.fetch_max(slot + 1, Ordering::Relaxed);
        self.layout().board[slot].open(generation);
    }

    /// The leases that the peer may ever have entered.
    pub(crate) fn leases(&self) -> &[Lease] {
        &self.layout().board[..self.leases.load(Ordering::Relaxed)]
    }

    /// Its file and the bell, for a peer process.
    #[cfg(target_os = "linux")]
    pub(crate) fn files(&self) -> Option<[std::os::fd::BorrowedFd<'_>; 2]> {
        use std::os::fd::AsFd;
        Some([self.segment.file()?, self.door.bell().ok()?.handle().as_fd()])
    }

    /// The bounce segment, if the peer has asked for it.
    #[inline]
    pub(crate) fn stage(&self) -> Option<&Stage> {
        self.stage.get().map(Segment::layout)
    }

    /// The bounce segment; made at first use.
    pub(crate) fn staged(&self) -> Result<&Segment<Stage>> {
        if let Some(stage) = self.stage.get() {
            return Ok(stage);
        }
        let stage = Segment::create()?;
        Ok(self.stage.get_or_init(|| stage))
    }

    /// Tells the initiator that nobody listens any more, and lets it into no region.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.layout().state.closed.store(1, Ordering::Release);
    }

    /// Whether it was closed here.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the initiator can no longer touch anything here: it let go, or died.
    pub(crate) fn has_departed(&self) -> bool {
        if self.departed.load(Ordering::Acquire) {
            return true;
        }
        #[cfg(target_os = "linux")]
        if self.initiator.get().is_some_and(|process| !process.is_alive()) {
            self.depart();
            return true;
        }
        false
    }

    /// The initiator let go, or its process ended.
    pub(crate) fn depart(&self) {
        self.departed.store(true, Ordering::Release);
    }

    /// Takes the receiving end; the endpoint returns it when it closes.
    pub(crate) fn take_inlet(&self) -> Option<Inlet> {
        self.inlet.lock().expect("inlet").take()
    }

    /// Puts it back.
    pub(crate) fn return_inlet(&self, inlet: Inlet) {
        *self.inlet.lock().expect("inlet") = Some(inlet);
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.segment.retire(*self.leases.get_mut());
    }
}

/// Our way to a peer: its segment for us, mapped here.
pub(crate) struct Outbound {
    /// Our number for the peer.
    pub(crate) peer: PeerSlot,
    alive: AtomicBool,
    /// Into `reach`'s segment: one step on the way of every request.
    layout: NonNull<Layout>,
    /// How far the peer's stage is used.
    pub(crate) staged: Mutex<Cursor>,
    pub(crate) reach: Reach,
}

// SAFETY: `layout` points into the segment that `reach` owns or shares; `Layout` is `Sync`.
unsafe impl Send for Outbound {}
// SAFETY: as above.
unsafe impl Sync for Outbound {}

/// Where the peer is.
pub(crate) enum Reach {
    /// In this process: its half is ours to hold.
    Local { inbound: Arc<Inbound>, domain: Weak<Core> },
    /// In another process of this host.
    #[cfg(target_os = "linux")]
    Process(Box<Line>),
}

impl Outbound {
    /// A live connection.
    pub(crate) fn new(peer: PeerSlot, reach: Reach) -> Self {
        let layout = NonNull::from(match &reach {
            Reach::Local { inbound, .. } => inbound.layout(),
            #[cfg(target_os = "linux")]
            Reach::Process(line) => line.segment.layout(),
        });
        Self { peer, alive: AtomicBool::new(true), layout, staged: Mutex::default(), reach }
    }

    /// The peer's segment.
    #[inline]
    pub(crate) fn layout(&self) -> &Layout {
        // SAFETY: a segment stays mapped, in its place, as long as `reach` holds it.
        unsafe { self.layout.as_ref() }
    }

    /// The peer's bounce segment, once an import needed it.
    #[inline]
    pub(crate) fn stage(&self) -> Option<&Stage> {
        match &self.reach {
            Reach::Local { inbound, .. } => inbound.stage(),
            #[cfg(target_os = "linux")]
            Reach::Process(line) => line.stage.get().map(Segment::layout),
        }
    }

    /// Whether neither side has hung up, as far as is known.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed) && self.layout().state.closed.load(Ordering::Relaxed) == 0
    }

    /// Nothing more goes to this peer.
    pub(crate) fn hang_up(&self) {
        self.alive.store(false, Ordering::Release);
    }

    /// Wakes the peer's endpoint.
    #[cold]
    pub(crate) fn ring(&self) {
        match &self.reach {
            Reach::Local { inbound, .. } => inbound.door.ring(),
            #[cfg(target_os = "linux")]
            Reach::Process(line) => line.bell.wake(),
        }
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        // Imports hold their `Outbound`, so nothing of ours is under way there now.
        #[allow(irrefutable_let_patterns, reason = "one of two where processes connect")]
        if let Reach::Local { inbound, .. } = &self.reach {
            inbound.depart();
        }
    }
}
