//! What is under test: a backend, and what it can impersonate.

use std::sync::Arc;

use transport_core::{Memory, TransportConfig};

/// A backend under test. The suite opens all its fabrics through this.
pub trait Subject: Send + Sync {
    /// Its name; part of every trial's name.
    fn name(&self) -> &str;

    /// Rails of a fabric, where a trial does not ask for a number.
    fn rails(&self) -> u32 {
        1
    }

    /// Whether trials of that kind run against it; those that do not are not listed.
    fn takes(&self, tag: Tag) -> bool {
        let _ = tag;
        true
    }

    /// Seeds of each virtual trial, one run per seed, unless `MULTIRAIL_SEEDS` says otherwise.
    fn seeds(&self) -> u64 {
        1
    }

    /// The variants in which a trial runs that asks for those.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        asked.to_vec()
    }

    /// A transport for a fabric, or the reason why there is none of that shape.
    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String>;

    /// Transports that each fabric has before the one under test, as auto mode opens some that reach nobody:
    /// no other fabric has one of the same label.
    fn ahead(&self, label: &str) -> Vec<TransportConfig> {
        let _ = label;
        Vec::new()
    }

    /// Whether that trial runs against it; one that does not is not listed.
    fn wants(&self, trial: &str) -> bool {
        let _ = trial;
        true
    }

    /// Whether GPUs move bytes, which takes real time.
    fn has_gpus(&self) -> bool {
        false
    }

    /// New memory for a region at that end of a trial's transfers, of `len` bytes, that nobody else knows; `None`
    /// for the host's, as `Fabric::alloc` gives it.
    fn memory(&self, side: Side, len: usize) -> Result<Option<Arc<dyn Memory>>, String> {
        let _ = (side, len);
        Ok(None)
    }

    /// Trials that are known to fail against it. An unexpected pass fails the run.
    fn known_failures(&self) -> &[KnownFailure] {
        &[]
    }

    /// Why a trial makes no sense here, by its name without the subject's and the variant's;
    /// what is shown instead of running it.
    fn beside_the_point(&self, trial: &str) -> Option<&str> {
        let _ = trial;
        None
    }
}

/// What a trial runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// In this thread: caller-driven fabrics, a clock that only the trial moves.
    Virtual,
    /// Real time, worker threads and, mostly, more processes.
    Process,
}

/// An end of a trial's transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first fabric of a trial, which mostly begins.
    Source,
    /// The others, and those of helper processes.
    Target,
}

/// What a transport should look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Devices, each a rail.
    pub rails: u32,
    /// How they behave.
    pub variant: Variant,
    /// The run's seed, for subjects whose devices differ from seed to seed.
    pub seed: u64,
}

/// How a device behaves. A backend that cannot impersonate a variant says so, and
/// its trials are skipped with that reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// As it is.
    Plain,
    /// As it is, but nothing runs in the posting thread.
    Queued,
    /// At most [`Variant::SMALL_DEPTH`] requests outstanding per rail.
    SmallQueue,
    /// Every batch is accepted in part only.
    Partial,
    /// Completions come in any order, by the fabric's seed.
    Reorder,
    /// All of that at once: small queues, batches accepted in part, times when nothing is
    /// accepted, arrivals and completions in any order.
    Unruly,
    /// What is posted arrives [`Variant::SLOW`] later.
    Slow,
    /// The bytes of a write are visible [`Variant::LATE`] after its end was told, unless an arrival over the same
    /// device pushes them.
    Late,
    /// Each device is lost after [`Variant::LOST_AFTER`] requests.
    Doomed,
    /// Every [`Variant::FAULT_EVERY`]th request of a device fails.
    Faulty,
}

impl Variant {
    /// Queue depth of [`Variant::SmallQueue`].
    pub const SMALL_DEPTH: u32 = 4;
    /// Latency of [`Variant::Slow`]: long enough for a process trial to find work posted.
    pub const SLOW: std::time::Duration = std::time::Duration::from_secs(10);
    /// How late bytes are in [`Variant::Late`]: longer than an imm takes, over whichever device.
    pub const LATE: std::time::Duration = std::time::Duration::from_millis(1);
    /// Requests that a device of [`Variant::Doomed`] runs.
    pub const LOST_AFTER: u64 = 5;
    /// Requests per failure of [`Variant::Faulty`].
    pub const FAULT_EVERY: u64 = 7;

    /// As trial names show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Queued => "queued",
            Self::SmallQueue => "small-queue",
            Self::Partial => "partial",
            Self::Reorder => "reorder",
            Self::Unruly => "unruly",
            Self::Slow => "slow",
            Self::Late => "late",
            Self::Doomed => "doomed",
            Self::Faulty => "faulty",
        }
    }
}

/// A trial that fails, and why that is accepted for now.
#[derive(Debug, Clone, Copy)]
pub struct KnownFailure {
    /// The trial's name, without the subject's; with its variant if it has several.
    pub trial: &'static str,
    /// The reason, and what will mend it.
    pub why: &'static str,
}
