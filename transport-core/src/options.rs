//! The options of operations.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Work;
use crate::engine::plan::Shape;
use crate::spi::WorkKind;
use crate::{
    CoalescePolicy, ImmMode, Locality, PathPolicy, Region, RemoteRegion, Signal, TraceContext, Trigger,
};

/// The bytes per work request of a single write with [`ImmMode::PerWr`]. The number is fixed, so that the receiver can
/// compute the number of imms from the length alone.
pub(crate) const PER_WR_UNIT: u64 = 1 << 20;

/// The number of imms that a single write of `len` bytes delivers in [`ImmMode::PerWr`]: one per started MiB, at least
/// one.
pub fn imm_count(len: u64) -> u64 {
    len.div_ceil(PER_WR_UNIT).max(1)
}

/// What few operations have. Behind one thin pointer, because options are moved a lot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Extras {
    /// Bytes for the target, once the operation has succeeded.
    pub notification: Option<Vec<u8>>,
    /// The span that the operation is a child of.
    pub trace: Option<TraceContext>,
}

impl Extras {
    /// Those of options, to be changed.
    fn of(extras: &mut Option<Arc<Self>>) -> &mut Self {
        Arc::make_mut(extras.get_or_insert_default())
    }
}

/// Options of writes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Immediate data for the target.
    pub imm: Option<u32>,
    /// When the imm is delivered.
    pub imm_mode: ImmMode,
    /// Time until the operation fails; `None` takes the fabric's default.
    pub deadline: Option<Duration>,
    /// What the caller knows about the caches.
    pub locality: Locality,
    /// The trigger that the operation waits for before it begins: [`WriteOptions::when`].
    pub trigger: Option<Trigger>,
    /// The paths that the bytes may take, of those that the fabric and the peer allow.
    pub path_policy: PathPolicy,
    /// Whether requests are never posted a second time: [`WriteOptions::no_replay`].
    pub no_replay: bool,
    /// Whether small pages share work requests: [`WriteOptions::coalesce`].
    pub coalesce: Option<CoalescePolicy>,
    pub(crate) extras: Option<Arc<Extras>>,
}

impl WriteOptions {
    /// Whether the calling thread may carry out the operation at once, where the backend can: it has no trigger, and
    /// need not be coalesced.
    #[inline(always)]
    pub(crate) fn may_run_at_once(&self) -> bool {
        self.trigger.is_none() && self.coalesce != Some(CoalescePolicy::Always)
    }

    pub(crate) const DEFAULT: Self = Self {
        imm: None,
        imm_mode: ImmMode::Last,
        deadline: None,
        locality: Locality::Auto,
        trigger: None,
        path_policy: PathPolicy::ANY,
        no_replay: false,
        coalesce: None,
        extras: None,
    };

    /// No imm, the default deadline.
    pub fn new() -> Self {
        Self::DEFAULT
    }

    /// Delivers `imm` to the target.
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = Some(imm);
        self
    }

    /// Delivers the imm with every work request.
    pub fn per_wr(mut self) -> Self {
        self.imm_mode = ImmMode::PerWr;
        self
    }

    /// Fails the operation after `span`.
    pub fn deadline(mut self, span: Duration) -> Self {
        self.deadline = Some(span);
        self
    }

    /// Neither side is in a cache: copies stream past it.
    pub fn cold(mut self) -> Self {
        self.locality = Locality::Cold;
        self
    }

    /// Refuses the operation if its bytes would take a path that `policy` does not allow.
    pub fn path_policy(mut self, policy: PathPolicy) -> Self {
        self.path_policy = policy;
        self
    }

    /// Posts no request a second time. If a device is lost, or a path to the peer, other rails then carry only what was
    /// not posted, and the operation ends with `DeviceLost` or `Unreachable` if anything was: once nothing of it can
    /// arrive any more. By default other rails post such requests again.
    pub fn no_replay(mut self) -> Self {
        self.no_replay = true;
        self
    }

    /// Whether small pages share large work requests, through slots of both sides; by default, as the transport says
    /// (`MULTIRAIL_COALESCE`). With [`CoalescePolicy::Always`] the operation is refused with `Unsupported` if one of the
    /// two sides does not coalesce. Pages of more than 32 KiB have requests of their own in any case.
    pub fn coalesce(mut self, policy: CoalescePolicy) -> Self {
        self.coalesce = Some(policy);
        self
    }

    /// Begins the operation once `signal` has reached `value`: see [`Trigger`]. A CUDA stream or a kernel may write the
    /// signal.
    ///
    /// The operation is checked and planned at submission. Until the trigger is due no byte moves, a cancel ends the
    /// operation at once, and it delays no other operation. Its deadline counts from the submission, so include the
    /// time that the trigger may take. The operation ends if its peer dies or the fabric is closed. When it begins,
    /// the engine checks again that the region is not revoked.
    ///
    /// No wakeup tells the library that the signal has changed, so it has to poll the signal. That costs a part of a
    /// core while the operation waits. The worker polls in each step, and sleeps only briefly between steps:
    /// [`Workers::trigger_nap`](crate::Workers::trigger_nap). A caller-driven fabric polls in every `step`.
    pub fn when(mut self, signal: Arc<dyn Signal>, value: u32) -> Self {
        self.trigger = Some(Trigger::new(signal, value));
        self
    }

    /// Delivers `bytes` to the target after all bytes of the operation are visible there: see
    /// [`Peer::notify`](crate::Peer::notify), which also tells the errors. If the operation fails, nothing is delivered.
    ///
    /// The operation resolves once the notification is delivered too, and its outcome does not count it. Its deadline
    /// covers both.
    pub fn notify(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        Extras::of(&mut self.extras).notification = Some(bytes.into());
        self
    }

    /// Makes the operation a child of a span of a distributed trace: of the request that it is a part of. The operation's
    /// spans say so, and its notification takes the context along ([`Notification::trace`](crate::Notification::trace)).
    ///
    /// The span is named `transfer`, at level debug. It ends with the operation. Without a call of this function, the
    /// operation's span is a child of the current span of `tracing`.
    pub fn trace(mut self, parent: TraceContext) -> Self {
        Extras::of(&mut self.extras).trace = Some(parent);
        self
    }

    /// The span that the operation is a child of.
    pub(crate) fn parent_trace(&self) -> Option<TraceContext> {
        self.extras.as_deref()?.trace
    }

    /// The bytes for the target, if there are any.
    pub(crate) fn notification(&self) -> Option<&[u8]> {
        self.extras.as_deref()?.notification.as_deref()
    }

    pub(crate) fn work(&self, shape: Shape, local: &Region, remote: &RemoteRegion) -> Work {
        Work {
            local: Some(Arc::clone(&local.0)),
            remote: Some(Arc::clone(&remote.0)),
            imm: self.imm,
            imm_mode: self.imm_mode,
            locality: self.locality,
            no_replay: self.no_replay,
            device_memory: local.0.device_memory_mask != 0 || remote.0.device_memory,
            ..Work::of(WorkKind::Write, shape)
        }
    }
}

/// Options of reads.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Time until the operation fails; `None` takes the fabric's default.
    pub deadline: Option<Duration>,
    /// What the caller knows about the caches.
    pub locality: Locality,
    /// The trigger that the operation waits for before it begins: [`ReadOptions::when`].
    pub trigger: Option<Trigger>,
    /// The paths that the bytes may take, of those that the fabric and the peer allow.
    pub path_policy: PathPolicy,
    /// Whether requests are never posted a second time: [`WriteOptions::no_replay`].
    pub no_replay: bool,
    /// Whether small pages share work requests: [`WriteOptions::coalesce`].
    pub coalesce: Option<CoalescePolicy>,
    pub(crate) extras: Option<Arc<Extras>>,
}

impl ReadOptions {
    /// The default deadline.
    pub fn new() -> Self {
        Self::default()
    }

    /// Neither side is in a cache: copies stream past it.
    pub fn cold(mut self) -> Self {
        self.locality = Locality::Cold;
        self
    }

    /// Fails the operation after `span`.
    pub fn deadline(mut self, span: Duration) -> Self {
        self.deadline = Some(span);
        self
    }

    /// As [`WriteOptions::path_policy`].
    pub fn path_policy(mut self, policy: PathPolicy) -> Self {
        self.path_policy = policy;
        self
    }

    /// As [`WriteOptions::no_replay`].
    pub fn no_replay(mut self) -> Self {
        self.no_replay = true;
        self
    }

    /// As [`WriteOptions::coalesce`].
    pub fn coalesce(mut self, policy: CoalescePolicy) -> Self {
        self.coalesce = Some(policy);
        self
    }

    /// Begins the operation once `signal` has reached `value`: see [`WriteOptions::when`].
    pub fn when(mut self, signal: Arc<dyn Signal>, value: u32) -> Self {
        self.trigger = Some(Trigger::new(signal, value));
        self
    }

    /// Delivers `bytes` to the target after all bytes of the operation have been read, so that the target may use their
    /// memory for something else: see [`WriteOptions::notify`].
    pub fn notify(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        Extras::of(&mut self.extras).notification = Some(bytes.into());
        self
    }

    /// As [`WriteOptions::trace`].
    pub fn trace(mut self, parent: TraceContext) -> Self {
        Extras::of(&mut self.extras).trace = Some(parent);
        self
    }

    /// As [`WriteOptions::may_run_at_once`].
    #[inline(always)]
    pub(crate) fn may_run_at_once(&self) -> bool {
        self.trigger.is_none() && self.coalesce != Some(CoalescePolicy::Always)
    }

    /// The same options for the code that reads and writes share.
    pub(crate) fn as_write(&self) -> WriteOptions {
        WriteOptions {
            deadline: self.deadline,
            locality: self.locality,
            trigger: self.trigger.clone(),
            path_policy: self.path_policy,
            no_replay: self.no_replay,
            coalesce: self.coalesce,
            extras: self.extras.clone(),
            ..WriteOptions::DEFAULT
        }
    }
}

/// Options of sends.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// Immediate data that goes with the message.
    pub imm: Option<u32>,
    /// Time until the operation fails; `None` takes the fabric's default.
    pub deadline: Option<Duration>,
    /// The paths that the bytes may take, of those that the fabric and the peer allow.
    pub path_policy: PathPolicy,
    /// The span that the operation is a child of: [`SendOptions::trace`].
    pub trace: Option<TraceContext>,
}

impl SendOptions {
    /// No imm, the default deadline.
    pub fn new() -> Self {
        Self::default()
    }

    /// As [`WriteOptions::path_policy`].
    pub fn path_policy(mut self, policy: PathPolicy) -> Self {
        self.path_policy = policy;
        self
    }

    /// As [`WriteOptions::trace`]. A notification takes the context along, a message of [`Peer::send_with`](crate::Peer::send_with)
    /// does not.
    pub fn trace(mut self, parent: TraceContext) -> Self {
        self.trace = Some(parent);
        self
    }

    /// Sends `imm` with the message.
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = Some(imm);
        self
    }

    /// Fails the operation after `span`.
    pub fn deadline(mut self, span: Duration) -> Self {
        self.deadline = Some(span);
        self
    }
}
