//! The facts and limits of an open domain.

use std::time::Duration;

bitflags::bitflags! {
    /// The operations that a domain offers.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Operations: u32 {
        /// RDMA WRITE.
        const WRITE = 1;
        /// RDMA WRITE with immediate data.
        const WRITE_IMM = 2;
        /// RDMA READ.
        const READ = 4;
        /// Two-sided SEND and pre-posted receives.
        const SEND = 8;
    }
}

bitflags::bitflags! {
    /// The orders that hold between two work requests of one queue pair.
    ///
    /// A striped operation uses several queue pairs, so that the engine relies on none of them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Ordering: u32 {
        /// The bytes of a later write are never visible before those of an earlier write.
        const WRITE_AFTER_WRITE = 1;
        /// The device reports an imm only once the bytes of all earlier writes are visible.
        const IMM_AFTER_WRITE = 2;
        /// The device reports completions in the order of posting.
        const COMPLETIONS = 4;
    }
}

/// Who moves the bytes after a request is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// The device, or another thread.
    Auto,
    /// The caller of `poll`.
    Manual,
}

/// What the backend has to tear down to stop posted requests for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AbortScope {
    /// The queue pairs of one peer. Other peers are not affected.
    Peer,
    /// The endpoint. The requests of other peers are posted again, or fail.
    Endpoint,
}

/// How a target revokes a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// Every access checks a generation. Revoking needs no help from peers.
    Checked,
    /// The device refuses the key once the region is deregistered, and may give the same key to a later region.
    DeviceKey,
    /// The target refuses the key from then on, but its software finishes what it was receiving, and does not say when:
    /// bytes may land late. `Region::revoke` fails with `Unsupported` if a connected peer could have sent some.
    Late,
}

/// What `Delivered` costs beyond `Reusable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredCost {
    /// Nothing: every completion means `Delivered`.
    None,
    /// A flag on the request and one round trip.
    RoundTrip,
}

/// Which arrivals at the target come after the bytes of a completed write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredScope {
    /// All arrivals: the bytes are visible.
    Target,
    /// Arrivals over the same two devices. An arrival over other devices may be seen before the bytes, until a flush
    /// over these two has completed (see [`WorkRequest::len`](crate::WorkRequest::len)).
    Device,
}

/// The facts and limits of a domain. The engine decides by these, and never by a backend's name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The operations that the domain offers.
    pub operations: Operations,
    /// The operations among them that software carries out, here or at the peer. They are slow, and may need the peer's
    /// processor.
    pub emulated: Operations,
    /// The bytes of immediate data: 0 or 4.
    pub imm_bytes: u8,
    /// The orders that hold within one queue pair.
    pub ordering: Ordering,
    /// The most local segments per request.
    pub max_sge: u32,
    /// The most bytes that posting copies, so that the source is free at once.
    pub max_inline: u32,
    /// The most outstanding requests per endpoint.
    pub send_depth: u32,
    /// The most posted receives per endpoint.
    pub recv_depth: u32,
    /// The most bytes of one SEND.
    pub max_message: u64,
    /// The most bytes of one WRITE or READ. The planner splits larger ones.
    pub max_write: u64,
    /// The planner's chunk: the bytes per request at which fairness costs no bandwidth. With `Progress::Auto`, a quarter
    /// of what the line carries in two round trips is about right, as a small request waits for the chunks ahead of it
    /// on the line.
    pub chunk: u64,
    /// The bytes after which the engine posts a batch, where posting itself moves the bytes: posting has to return soon,
    /// as small requests wait behind it. `u64::MAX` where posting moves none.
    pub batch_bytes: u64,
    /// The most registered regions; `u32::MAX` if there is no limit.
    pub max_regions: u32,
    /// The line rate in bits per second, where there is a line.
    pub link_bits_per_s: Option<u64>,
    /// The most requests per second, whatever their size, where that is known.
    pub requests_per_s: Option<u64>,
    /// The time from posting a small request on an idle line to its completion; rather too long than too short. With
    /// `Progress::Auto` the engine keeps at most as many bytes posted as the line carries in two of these.
    pub round_trip: Duration,
    /// The arrivals (imms and messages) that the completion queue holds beside the completions of `send_depth` requests.
    /// Further arrivals are lost. `u64::MAX` where a full queue makes the senders wait instead.
    pub cq_depth: u64,
    /// Who moves the bytes of posted requests.
    pub progress: Progress,
    /// What an abort tears down.
    pub abort_scope: AbortScope,
    /// How the domain revokes keys.
    pub revocation: Revocation,
    /// What `Delivered` costs.
    pub delivered: DeliveredCost,
    /// Which arrivals `Delivered` covers.
    pub delivered_scope: DeliveredScope,
    /// The most bytes of an operation that is worth running in the calling thread; 0 without [`Direct`](crate::Direct).
    pub max_direct: u64,
    /// Whether the domain imports keys of staged memory ([`KeyMaterial::STAGED`](crate::KeyMaterial::STAGED)).
    pub supports_staging: bool,
    /// Whether `arm` can wake a sleeping worker.
    pub supports_wakeup: bool,
    /// The longest sleep of an idle worker where `arm` cannot wake it, for one device; a sixteenth more for each further
    /// device of the worker. A sleep takes an eighth of the time that the worker has been idle, up to that.
    pub idle_backoff: Duration,
}

impl Capabilities {
    /// The least that a domain can offer: WRITE with one segment, no imm, no inline data. A backend starts from these
    /// values and changes what it does better.
    pub fn minimal() -> Self {
        Self {
            operations: Operations::WRITE,
            emulated: Operations::empty(),
            imm_bytes: 0,
            ordering: Ordering::empty(),
            max_sge: 1,
            max_inline: 0,
            send_depth: 1,
            recv_depth: 1,
            max_message: 0,
            max_write: 1 << 30,
            chunk: 1 << 20,
            batch_bytes: u64::MAX,
            max_regions: 1,
            link_bits_per_s: None,
            requests_per_s: None,
            round_trip: Duration::from_micros(20),
            cq_depth: 1024,
            progress: Progress::Manual,
            abort_scope: AbortScope::Endpoint,
            revocation: Revocation::DeviceKey,
            delivered: DeliveredCost::RoundTrip,
            delivered_scope: DeliveredScope::Target,
            max_direct: 0,
            supports_staging: false,
            supports_wakeup: false,
            idle_backoff: Duration::from_micros(500),
        }
    }
}
