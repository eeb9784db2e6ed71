//! The target's half of a connection: a peer's access to this domain.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use multirail_spi::{PeerSlot, Result, Time, WakeupHandle};

use crate::offer::OfferToken;
use crate::other_process::OfferedSocket;
use crate::segment::lease_table::{LEASES_PER_PAGE, Lease, REGION_SLOTS};
use crate::segment::message_ring::RingReceiver;
use crate::segment::staging_buffer::SharedStagingBuffer;
use crate::segment::{ConnectionLayout, Segment, commit_pages};
use crate::wakeup::Wakeup;

/// Pages of a lease table.
const LEASE_PAGES: usize = REGION_SLOTS / LEASES_PER_PAGE;

/// The segment that this domain made for a peer, and the state of the connection. The peer is the initiator of this
/// half.
pub(crate) struct Inbound {
    segment: Segment,
    wakeup: Arc<Wakeup>,
    pub(crate) token: OfferToken,
    /// The pages of the lease table that have memory, one bit each.
    lease_pages: [AtomicU64; LEASE_PAGES / 64],
    claimed: AtomicBool,
    /// Until the initiator has come.
    socket: Mutex<Option<OfferedSocket>>,
    closed: AtomicBool,
    initiator_gone: AtomicBool,
    receiver: Mutex<Option<RingReceiver>>,
    gate: Mutex<Gate>,
    /// For regions that the peer cannot reach itself. Made when the peer asks for it.
    staging_buffer: OnceLock<Segment<SharedStagingBuffer>>,
    /// Slots of the staging buffer that were served.
    pub(crate) served: AtomicU64,
    /// The initiator's process, once another process has claimed the connection.
    pub(crate) initiator: OnceLock<crate::other_process::PeerProcess>,
}

/// What a target hands to an initiator in another process.
pub(crate) struct InboundFiles<'a> {
    segment: Arc<OwnedFd>,
    wakeup: &'a WakeupHandle,
    ready: Arc<OwnedFd>,
}

impl InboundFiles<'_> {
    /// The files, in their order in the welcome.
    pub(crate) fn all(&self) -> [BorrowedFd<'_>; 3] {
        [self.segment.as_fd(), self.wakeup.as_fd(), self.ready.as_fd()]
    }
}

/// Whether what a lost device of the peer has sent still arrives.
#[derive(Default)]
struct Gate {
    /// When it will not, once the peer has asked for that.
    shut_at: Option<Time>,
    is_shut: bool,
    /// How often the connection was shut.
    times_shut: u64,
}

impl Inbound {
    /// A connection that no initiator has claimed. The initiator wakes the endpoint through `wakeup`.
    /// `socket` is that at which the initiator connects if it is in another process.
    pub(crate) fn new(
        segment: Segment,
        wakeup: Arc<Wakeup>,
        token: OfferToken,
        socket: Option<OfferedSocket>,
    ) -> Self {
        let receiver =
            if segment.is_private() { RingReceiver::of_committed() } else { RingReceiver::default() };
        Self {
            segment,
            wakeup,
            token,
            lease_pages: Default::default(),
            claimed: AtomicBool::new(false),
            socket: Mutex::new(socket),
            closed: AtomicBool::new(false),
            initiator_gone: AtomicBool::new(false),
            receiver: Mutex::new(Some(receiver)),
            gate: Mutex::default(),
            staging_buffer: OnceLock::new(),
            served: AtomicU64::new(0),
            initiator: OnceLock::new(),
        }
    }

    /// Returns true for the first caller, which acts for the initiator. A connection has one initiator.
    pub(crate) fn claim(&self) -> bool {
        let is_first = !self.claimed.swap(true, Ordering::AcqRel);
        self.withdraw_socket();
        is_first
    }

    /// Makes sure that the segment has the memory that the peer relies on.
    pub(crate) fn commit(&self) -> Result<()> {
        self.segment.commit()
    }

    /// The shared memory.
    #[inline]
    pub(crate) fn layout(&self) -> &ConnectionLayout {
        self.segment.content()
    }

    /// Lets the peer enter a region. Only the region table calls this, and holds its lock.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory for the lease.
    pub(crate) fn open(&self, slot: usize, generation: u32) -> Result<()> {
        let page = slot / LEASES_PER_PAGE;
        let (word, bit) = (&self.lease_pages[page / 64], 1 << (page % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            if !self.segment.is_private() {
                commit_pages(&self.layout().leases[page * LEASES_PER_PAGE..(page + 1) * LEASES_PER_PAGE])?;
            }
            word.fetch_or(bit, Ordering::Release);
        }
        self.layout().leases[slot].open(generation);
        Ok(())
    }

    /// The lease of a region, if it may ever have been opened.
    pub(crate) fn lease(&self, slot: usize) -> Option<&Lease> {
        let page = slot / LEASES_PER_PAGE;
        let has_memory = self.lease_pages[page / 64].load(Ordering::Acquire) & (1 << (page % 64)) != 0;
        has_memory.then(|| &self.layout().leases[slot])
    }

    /// The leases that the peer may ever have entered.
    pub(crate) fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.used_leases().flat_map(|range| &self.layout().leases[range])
    }

    /// The pages of the lease table that have memory.
    fn used_leases(&self) -> impl Iterator<Item = Range<usize>> {
        let words: [u64; LEASE_PAGES / 64] =
            std::array::from_fn(|word| self.lease_pages[word].load(Ordering::Acquire));
        let has_memory = move |page: &usize| words[page / 64] & (1 << (page % 64)) != 0;
        (0..LEASE_PAGES).filter(has_memory).map(|page| page * LEASES_PER_PAGE..(page + 1) * LEASES_PER_PAGE)
    }

    /// The files for a peer in another process: the segment, the handle that wakes this domain's endpoint, and the
    /// domain's ready set.
    pub(crate) fn files(&self) -> Option<InboundFiles<'_>> {
        Some(InboundFiles {
            segment: self.segment.file()?,
            wakeup: self.wakeup.pipe().ok()?.handle(),
            ready: self.wakeup.shared_ready().ok()?.file()?,
        })
    }

    /// Closes the file of the segment, which the peer has.
    pub(crate) fn close_file(&self) {
        self.segment.close_file();
    }

    /// The staging buffer, if the peer has asked for it.
    #[inline]
    pub(crate) fn staging_buffer(&self) -> Option<&SharedStagingBuffer> {
        self.staging_buffer.get().map(Segment::content)
    }

    /// The segment of the staging buffer. The first call makes it.
    pub(crate) fn open_staging_buffer(&self) -> Result<&Segment<SharedStagingBuffer>> {
        if let Some(buffer) = self.staging_buffer.get() {
            return Ok(buffer);
        }
        let buffer = Segment::create()?;
        Ok(self.staging_buffer.get_or_init(|| buffer))
    }

    /// Tells the peer its slot. Nobody has the offer yet.
    pub(crate) fn set_slot(&self, slot: PeerSlot) {
        self.layout().flags.slot.store(slot.0, Ordering::Release);
    }

    /// Tells this domain's endpoint that the peer has written into its armed ring.
    pub(crate) fn mark_ready(&self) {
        self.wakeup.mark_ready(self.layout().flags.slot.load(Ordering::Relaxed));
    }

    /// Wakes this domain's endpoint.
    pub(crate) fn wake(&self) {
        self.wakeup.wake();
    }

    /// Tells the initiator that the connection is closed. The region table then lets it enter no region.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.layout().flags.closed.store(1, Ordering::Release);
        self.withdraw_socket();
    }

    /// No initiator is expected at the socket any more.
    fn withdraw_socket(&self) {
        drop(self.socket.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Returns true if this side has closed the connection.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns true if the initiator can no longer access anything here: it has dropped its half, or it is dead.
    pub(crate) fn is_initiator_gone(&self) -> bool {
        if self.initiator_gone.load(Ordering::Acquire) {
            return true;
        }
        if self.initiator.get().is_some_and(|process| !process.is_alive()) {
            self.mark_initiator_gone();
            return true;
        }
        false
    }

    /// Records that the initiator has dropped its half, or that its process is dead.
    pub(crate) fn mark_initiator_gone(&self) {
        self.initiator_gone.store(true, Ordering::Release);
    }

    /// Shuts the connection against what the peer has posted, `takes` after the first call. Returns true once it is
    /// shut.
    pub(crate) fn fence(&self, now: Time, takes: Duration) -> bool {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let shut_at = *gate.shut_at.get_or_insert_with(|| now.after(takes));
        if shut_at <= now && !std::mem::replace(&mut gate.is_shut, true) {
            gate.times_shut += 1;
        }
        gate.is_shut
    }

    /// Opens the connection again. What the peer had sent before it was shut still does not arrive.
    pub(crate) fn lift_fence(&self) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        (gate.shut_at, gate.is_shut) = (None, false);
    }

    /// How often the connection was shut.
    pub(crate) fn times_shut(&self) -> u64 {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).times_shut
    }

    /// Runs `deliver`, which writes what a lost device of the peer has sent, or what went over a broken path. Does
    /// nothing if the connection was shut since then: it was shut `times_shut` times before.
    pub(crate) fn deliver_late(&self, times_shut: u64, deliver: impl FnOnce()) {
        // The lock is held meanwhile, so that nothing arrives any more once `fence` has returned true.
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if gate.times_shut == times_shut {
            deliver();
        }
    }

    /// Gives the endpoint the receiving end of the message ring. The endpoint returns it when it closes.
    pub(crate) fn take_receiver(&self) -> Option<RingReceiver> {
        self.receiver.lock().expect("receiver").take()
    }

    /// Takes the receiving end back from an endpoint.
    pub(crate) fn return_receiver(&self, receiver: RingReceiver) {
        *self.receiver.lock().expect("receiver") = Some(receiver);
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        let leases: Vec<_> = self.used_leases().collect();
        self.segment.recycle(&leases);
    }
}
