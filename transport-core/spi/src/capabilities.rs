//! The facts and limits of an open domain.

use std::time::Duration;

use crate::{CoalescePolicy, Paths};

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
    /// A striped operation uses several queue pairs, so the engine relies on no order.
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
    /// The endpoint. The requests to other peers have some time to end; those that do not end fail.
    Endpoint,
}

/// How a target revokes a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// Each access checks the generation of the region. Revoking needs no help from peers.
    Checked,
    /// The device refuses the key once the region is deregistered, and may give the same key to a later region.
    DeviceKey,
    /// From the revocation on, the target refuses the key. But it finishes writes that it has begun to receive, and
    /// does not report when: bytes may land late. `Region::revoke` fails with `Unsupported` if a connected peer could
    /// have written to the region.
    Late,
}

/// The cost of waiting until a write is delivered.
///
/// A write is *reusable* once its source may be written again. It is *delivered* once its bytes are in the target's
/// memory. A completion of the engine means delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredCost {
    /// Nothing: the device completes a write once it is delivered.
    None,
    /// A flag on the request, and one round trip.
    RoundTrip,
}

/// A sender posts an imm or a message after a write has completed. This says which of these arrivals prove to the
/// target that the bytes of the write are visible there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredScope {
    /// All arrivals.
    Target,
    /// Only arrivals over the pair of devices (one of the sender, one of the target) that carried the bytes. The target
    /// may see an arrival over other devices before the bytes, until a flush over that pair has completed (see
    /// [`WorkRequest::len`](crate::WorkRequest::len)).
    Device,
}

/// The facts and limits of a domain. The engine decides by these, and never by a backend's name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The operations that the domain offers.
    pub operations: Operations,
    /// The path of requests that address no region: messages, and imms without bytes.
    pub path: Paths,
    /// Those of `operations` that the device cannot do itself, so that its library carries them out by messages. They
    /// are slow, and need the peer's processor.
    pub emulated: Operations,
    /// The bytes of immediate data: 0 or 4.
    pub imm_bytes: u8,
    /// The orders that hold within one queue pair.
    pub ordering: Ordering,
    /// The most local segments per request.
    pub max_sge: u32,
    /// The most bytes that posting copies, so that the source may be written again at once.
    pub max_inline: u32,
    /// The most outstanding requests per endpoint.
    pub send_depth: u32,
    /// The most posted receives per endpoint.
    pub recv_depth: u32,
    /// The most bytes of one SEND.
    pub max_message: u64,
    /// The most bytes of one WRITE or READ. The planner splits larger operations.
    pub max_write: u64,
    /// The planner splits a large operation into work requests of this many bytes (chunks). A smaller chunk is fairer,
    /// because a small request waits for the chunks ahead of it on the line; too small a chunk costs bandwidth. With
    /// `Progress::Auto`, a quarter of the bytes that the line carries in two round trips is about right.
    pub chunk: u64,
    /// The bytes per batch, if `post` itself copies the bytes. It has to return soon, because other requests wait until
    /// it does. `u64::MAX` if `post` copies nothing.
    pub batch_bytes: u64,
    /// The most registered regions; `u32::MAX` if there is no limit.
    pub max_regions: u32,
    /// The line rate in bits per second, where there is a line.
    pub link_bits_per_s: Option<u64>,
    /// The most requests per second, whatever their size, where that is known.
    pub requests_per_s: Option<u64>,
    /// The time from posting a small request on an idle line to its completion. An estimate that is too long does less
    /// harm than one that is too short. With `Progress::Auto` and a known line rate, the send window begins with what
    /// the line carries in two round trips.
    pub round_trip: Duration,
    /// The part of `round_trip` that staging adds, which requests that the device carries out directly do not take.
    pub staging_delay: Duration,
    /// The number of arrivals (imms and messages) for which the completion queue has room, beside the completions of
    /// `send_depth` requests. Further arrivals are lost. `u64::MAX` if a full queue makes the senders wait instead.
    pub arrival_depth: u64,
    /// Who moves the bytes of posted requests.
    pub progress: Progress,
    /// What an abort tears down.
    pub abort_scope: AbortScope,
    /// How the domain revokes keys.
    pub revocation: Revocation,
    /// Whether the domain fences slots and lifts fences ([`Connector::fence`](crate::Connector::fence)). If so, the
    /// engine stops using a path to a peer that fails, as long as another rail reaches the peer. If not, the requests
    /// on such a path fail, and the next ones try it again.
    pub fences: bool,
    /// The cost of waiting until a write is delivered.
    pub delivered: DeliveredCost,
    /// Which later arrivals prove that the bytes of a completed write are visible.
    pub delivered_scope: DeliveredScope,
    /// The size in bytes up to which the direct path is faster than posting; 0 without [`Direct`](crate::Direct).
    pub max_direct: u64,
    /// Whether the domain imports keys of staged memory ([`RemoteKey::STAGED`](crate::RemoteKey::STAGED)).
    pub supports_staging: bool,
    /// What operations that state no policy do with small pages. `None` if the domain does not coalesce.
    pub coalesce: Option<CoalescePolicy>,
    /// Whether `arm` can wake a sleeping worker.
    pub supports_wakeup: bool,
    /// The longest sleep of an idle worker with one device, if `arm` cannot wake the worker. With n devices, the
    /// longest sleep is (n + 15) / 16 times as long. A worker sleeps for an eighth of the time for which it has been
    /// idle, but never longer than this longest sleep.
    pub idle_backoff: Duration,
}

impl Capabilities {
    /// The least that a domain can offer: WRITE with one segment, no imm, no inline data. A backend starts from these
    /// values and changes what it does better.
    pub fn minimal() -> Self {
        Self {
            operations: Operations::WRITE,
            path: Paths::RDMA,
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
            staging_delay: Duration::ZERO,
            arrival_depth: 1024,
            progress: Progress::Manual,
            abort_scope: AbortScope::Endpoint,
            revocation: Revocation::DeviceKey,
            fences: false,
            delivered: DeliveredCost::RoundTrip,
            delivered_scope: DeliveredScope::Target,
            max_direct: 0,
            supports_staging: false,
            coalesce: None,
            supports_wakeup: false,
            idle_backoff: Duration::from_micros(500),
        }
    }
}
