//! The backend under test, and the device variants that it can simulate.

use std::sync::Arc;

use transport_core::spi::{Backend, DeviceInfo};
use transport_core::{Memory, TransportConfig};

/// A backend under test. The suite opens all its fabrics through this trait.
pub trait BackendUnderTest: Send + Sync {
    /// The backend's name, which begins the name of each trial.
    fn name(&self) -> &str;

    /// The number of rails of a fabric, unless a trial asks for a number.
    fn rails(&self) -> u32 {
        1
    }

    /// Returns true if trials with this tag run against the backend. Other trials are not listed.
    fn runs_tag(&self, tag: TrialTag) -> bool {
        let _ = tag;
        true
    }

    /// The number of seeds of each virtual trial, with one run per seed. `MULTIRAIL_SEEDS` overrides it.
    fn seeds(&self) -> u64 {
        1
    }

    /// The variants in which a trial runs, given the variants that the trial lists.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        asked.to_vec()
    }

    /// A transport of this shape for a fabric, or the reason why the backend has none.
    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String>;

    /// Transports that each fabric has before the one under test. These reach no peer, because no other
    /// fabric has a transport with the same label: auto mode opens such transports too.
    fn preceding_transports(&self, label: &str) -> Vec<TransportConfig> {
        let _ = label;
        Vec::new()
    }

    /// Returns true if the trial of this name runs against the backend. Other trials are not listed.
    fn runs_trial(&self, trial: &str) -> bool {
        let _ = trial;
        true
    }

    /// Returns true if GPUs move bytes, which takes real time.
    fn has_gpus(&self) -> bool {
        false
    }

    /// Allocates `len` bytes for a region on this side of a trial's transfers; no other code may know the
    /// memory. `None` stands for host memory from `Fabric::alloc`.
    fn memory(&self, side: TransferSide, len: usize) -> Result<Option<Arc<dyn Memory>>, String> {
        let _ = (side, len);
        Ok(None)
    }

    /// Trials that are known to fail against the backend. A listed trial that passes fails the run.
    fn known_failures(&self) -> &[KnownFailure] {
        &[]
    }

    /// The reason to skip a trial, if there is one. `trial` is the trial's name without the backend and the
    /// variant. The suite prints the reason and does not run the trial.
    fn skip_reason(&self, trial: &str) -> Option<&str> {
        let _ = trial;
        None
    }
}

/// The kind of time and processes that a trial runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrialTag {
    /// One thread, caller-driven fabrics, and a clock that only the trial moves.
    Virtual,
    /// Real time, worker threads and, in most trials, more processes.
    Process,
}

/// One side of a trial's transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferSide {
    /// The first fabric of a trial, usually the initiator.
    Source,
    /// The other fabrics, and the fabrics of helper processes.
    Target,
}

/// The number of devices of a transport, and how they behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportShape {
    /// The number of devices; each is a rail.
    pub rails: u32,
    /// How the devices behave.
    pub variant: Variant,
    /// The run's seed, for backends whose devices differ from seed to seed.
    pub seed: u64,
}

/// How a device behaves. A backend that cannot simulate a variant returns the reason, and the suite skips
/// the trials of that variant with this reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The device as it is.
    Plain,
    /// The device as it is, but no request runs in the posting thread.
    Queued,
    /// At most [`Variant::SMALL_DEPTH`] requests outstanding per rail.
    SmallQueue,
    /// The device accepts only a part of each batch.
    Partial,
    /// Completions come in any order, which the fabric's seed chooses.
    Reorder,
    /// Several of these at once: small queues, batches accepted in part, times when the device accepts
    /// nothing, and arrivals and completions in any order.
    Unruly,
    /// A posted request arrives [`Variant::SLOW`] later.
    Slow,
    /// The bytes of a write become visible [`Variant::LATE`] after its completion, or earlier if another
    /// arrival over the same device pushes them.
    Late,
    /// Each device is lost after [`Variant::LOST_AFTER`] requests.
    Doomed,
    /// Every [`Variant::FAULT_EVERY`]th request of a device fails.
    Faulty,
}

impl Variant {
    /// Queue depth of [`Variant::SmallQueue`].
    pub const SMALL_DEPTH: u32 = 4;
    /// Latency of [`Variant::Slow`]: long enough that a process trial finds its work still posted.
    pub const SLOW: std::time::Duration = std::time::Duration::from_secs(10);
    /// The delay of bytes in [`Variant::Late`]: longer than an imm takes over any device.
    pub const LATE: std::time::Duration = std::time::Duration::from_millis(1);
    /// The number of requests that a device of [`Variant::Doomed`] runs before it is lost.
    pub const LOST_AFTER: u64 = 5;
    /// The number of requests per failed request of [`Variant::Faulty`].
    pub const FAULT_EVERY: u64 = 7;

    /// The variant's name in trial names.
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

/// The devices of a backend, at least `rails` of them.
///
/// # Errors
/// The reason why the machine has fewer, and what to do about it.
pub fn devices(backend: &dyn Backend, rails: u32) -> Result<Vec<DeviceInfo>, String> {
    let devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
    if devices.len() < rails as usize {
        return Err(format!("the machine has {} devices, and the trial needs {rails}", devices.len()));
    }
    Ok(devices)
}

/// A trial that fails, and why that is accepted for now.
#[derive(Debug, Clone, Copy)]
pub struct KnownFailure {
    /// The trial's name without the backend, but with the variant if the trial has several.
    pub trial: &'static str,
    /// The reason, and what will fix it.
    pub why: &'static str,
}
