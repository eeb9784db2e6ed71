//! Facts and limits of an opened domain.

use std::time::Duration;

bitflags::bitflags! {
    /// Operations a domain carries out itself.
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
    /// Orders that hold between two work requests of one queue pair.
    ///
    /// A striped operation crosses several queue pairs, so the engine relies on none.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Ordering: u32 {
        /// A later write's bytes are never visible before an earlier one's.
        const WRITE_AFTER_WRITE = 1;
        /// An imm is never reported before an earlier write's bytes are visible.
        const IMM_AFTER_WRITE = 2;
        /// Completions are reported in the order of posting.
        const COMPLETIONS = 4;
    }
}

/// Who moves the bytes once a request is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// The device, or another thread.
    Auto,
    /// The caller of `poll`.
    Manual,
}

/// The least that must be torn down to stop posted work for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AbortScope {
    /// One peer's queue pairs: other peers do not notice.
    Peer,
    /// The endpoint: other peers' work replays or fails.
    Endpoint,
}

/// How a target takes a key back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// Every access checks a generation; revoking needs no help of the peer.
    Checked,
    /// The device's key dies with the region and may be handed out again.
    DeviceKey,
    /// The key is refused from then on, but software at the target goes on with what it was receiving, and does not
    /// say until when: bytes may land late. `Region::revoke` ends with `Unsupported` where a
    /// connected peer could have sent some.
    Late,
}

/// What reaching `Delivered` costs beyond `Reusable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredCost {
    /// Nothing: every completion already means it.
    None,
    /// A flag on the request and one round trip.
    RoundTrip,
}

/// Which arrivals at the target come after the bytes of a write whose end was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveredScope {
    /// All: the bytes are visible.
    Target,
    /// Those over the same two devices. Arrivals over others may be seen before the bytes, until a read of no
    /// bytes over these has ended (see [`crate::WorkRequest::len`]).
    Device,
}

/// Facts and limits of a domain. The engine asks these, never a backend's name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// What it can do.
    pub operations: Operations,
    /// Those of them that the device cannot do and software does, also the peer's: they are slow,
    /// and may need the peer's processor.
    pub emulated: Operations,
    /// Bytes of immediate data, 0 or 4.
    pub imm_bytes: u8,
    /// Orders that hold within one queue pair.
    pub ordering: Ordering,
    /// Local segments per request.
    pub max_sge: u32,
    /// Bytes copied at posting, so that the source is free at once.
    pub max_inline: u32,
    /// Requests that may be outstanding per endpoint.
    pub send_depth: u32,
    /// Receives that may be posted per endpoint.
    pub recv_depth: u32,
    /// Bytes of one SEND.
    pub max_message: u64,
    /// Bytes of one WRITE or READ; larger ones are split by the planner.
    pub max_write: u64,
    /// Bytes per request at which fairness costs no bandwidth; the planner's chunk. With
    /// `Progress::Auto` a quarter of what the line carries in two round trips is about
    /// right: a small request waits for what is ahead of it on the line.
    pub chunk: u64,
    /// Bytes of a batch after which it is closed, so that posting returns soon where posting
    /// itself moves bytes: small requests stand behind. `u64::MAX` where it does not.
    pub batch_bytes: u64,
    /// Regions that may be registered at once; `u32::MAX` where nothing counts them.
    pub max_regions: u32,
    /// Line rate in bits per second, where there is one.
    pub link_bits_per_s: Option<u64>,
    /// Requests per second that the device takes, whatever their size, where that is known.
    pub requests_per_s: Option<u64>,
    /// From posting a small request on an idle line to its completion, rather too long than
    /// too short. With `Progress::Auto` the engine keeps two of them of line posted, and no more.
    pub round_trip: Duration,
    /// Arrivals (imms and messages) that the completion queue holds beside the completions
    /// of `send_depth` requests; more are lost. `u64::MAX` where a full queue holds the
    /// senders up instead.
    pub cq_depth: u64,
    /// Whether posting and moving are one.
    pub progress: Progress,
    /// What tearing down work takes with it.
    pub abort_scope: AbortScope,
    /// How keys are taken back.
    pub revocation: Revocation,
    /// The price of `Delivered`.
    pub delivered: DeliveredCost,
    /// How far `Delivered` reaches.
    pub delivered_scope: DeliveredScope,
    /// Largest operation worth running in the calling thread; 0 without [`crate::Direct`].
    pub max_direct: u64,
    /// Whether keys of staged memory ([`crate::KeyMaterial::STAGED`]) can be imported.
    pub supports_staging: bool,
    /// Whether `arm` can wake a sleeping worker.
    pub supports_wakeup: bool,
    /// How long a worker that has been idle for long naps where it cannot; a sixteenth longer for
    /// every device beyond the first that it looks at. Naps are an eighth of the idle time up to that.
    pub idle_backoff: Duration,
}

impl Capabilities {
    /// The least a domain can offer: WRITE, one segment, no imm, no inline data.
    ///
    /// Backends start from here and state what they add.
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
