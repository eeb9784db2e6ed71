//! What may be said about an operation beyond its bytes.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Work;
use crate::plan::Shape;
use crate::spi::WorkKind;
use crate::{Locality, Region, RemoteRegion, Signal, Trigger};

/// Bytes per work request of a single write with [`ImmMode::PerWr`]: fixed, so
/// that the receiver can compute the number of imms from the length alone.
pub(crate) const PER_WR_UNIT: u64 = 1 << 20;

/// When immediate data is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ImmMode {
    /// Once, after every byte of the operation is visible at the target.
    #[default]
    Last,
    /// With every work request: one per page of a paged write, and as many as
    /// [`imm_count`] says for a single write. No order among them.
    PerWr,
}

/// The number of imms a single write of `len` bytes delivers in [`ImmMode::PerWr`]:
/// one per started MiB, at least one.
pub fn imm_count(len: u64) -> u64 {
    len.div_ceil(PER_WR_UNIT).max(1)
}

/// Options of writes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Immediate data for the target.
    pub imm: Option<u32>,
    /// When it is delivered.
    pub imm_mode: ImmMode,
    /// Time until the operation fails; `None` takes the fabric's default.
    pub deadline: Option<Duration>,
    /// What the caller knows about the caches.
    pub locality: Locality,
    /// What it waits for before it begins; see [`WriteOptions::when`].
    pub trigger: Option<Trigger>,
}

impl WriteOptions {
    pub(crate) const DEFAULT: Self =
        Self { imm: None, imm_mode: ImmMode::Last, deadline: None, locality: Locality::Auto, trigger: None };

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

    /// Begins once `word` has reached `value`, which a stream or a kernel may write: [`Trigger`].
    ///
    /// Everything is checked and ready by then. Until then no byte moves, a cancel ends it at once, and
    /// it holds up no other operation; its deadline counts from the submission, so give it the time that
    /// the trigger may take. A peer that dies, and a fabric that is closed, end it. That the
    /// region was not revoked is looked at again when it begins.
    ///
    /// Nobody rings when the word changes: somebody has to look, which costs a part of a core for as long
    /// as an operation waits so. The worker looks in each of its turns, and its naps between them are
    /// short, as [`Workers::trigger_nap`](crate::Workers::trigger_nap) has it; a fabric that its caller
    /// drives looks in every `step`.
    pub fn when(mut self, word: Arc<dyn Signal>, value: u32) -> Self {
        self.trigger = Some(Trigger::new(word, value));
        self
    }

    pub(crate) fn work(&self, shape: Shape, local: &Region, remote: &RemoteRegion) -> Work {
        Work {
            local: Some(Arc::clone(&local.0)),
            remote: Some(Arc::clone(&remote.0)),
            imm: self.imm,
            imm_mode: self.imm_mode,
            locality: self.locality,
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
}

/// Options of sends.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// Immediate data that goes with the message.
    pub imm: Option<u32>,
    /// Time until the operation fails; `None` takes the fabric's default.
    pub deadline: Option<Duration>,
}

impl SendOptions {
    /// No imm, the default deadline.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends `imm` along.
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
