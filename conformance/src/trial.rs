//! A trial: a name, what it needs, and a function.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use transport_core::spi::Operations;
use transport_core::{Access, Fabric, Region};

use crate::backend_under_test::{BackendUnderTest, TransferSide, TrialTag, Variant};
use crate::check::{TestResult, TrialFailure};

/// A behaviour that every backend must show.
#[derive(Clone, Copy)]
pub struct Trial {
    /// `noun::behaviour`.
    pub name: &'static str,
    /// The kind of time and processes that the trial runs in.
    pub tag: TrialTag,
    /// The operations that the trial needs.
    pub needs: Operations,
    /// The largest number of rails that the trial asks for.
    pub rails: u32,
    /// The device variants: the trial runs once per variant.
    pub variants: &'static [Variant],
    pub(crate) run: fn(&TrialContext) -> Result<(), TrialFailure>,
}

/// The input of one run of a trial.
#[derive(Clone)]
pub struct TrialContext {
    pub(crate) backend: Arc<dyn BackendUnderTest>,
    pub(crate) variant: Variant,
    pub(crate) seed: u64,
    /// True if the suite runs the trial with many seeds. Each run then does a part of what a single run does.
    pub(crate) seed_sweep: bool,
    pub(crate) event_digest: Arc<EventDigest>,
}

/// A digest of all events of a trial's fabrics: equal for two runs with the same events in the same order.
#[derive(Default)]
pub(crate) struct EventDigest(AtomicU64);

impl EventDigest {
    /// Adds the event hash of a fabric that the trial is done with.
    pub(crate) fn add(&self, event_hash: u64) {
        let mix = |sum: u64| (sum.rotate_left(7) ^ event_hash).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0.update(Ordering::Relaxed, Ordering::Relaxed, mix);
    }

    /// Returns the digest and starts a new one.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

impl TrialContext {
    /// The context of one run on a device of this variant.
    pub(crate) fn new(backend: Arc<dyn BackendUnderTest>, variant: Variant, seed: u64) -> Self {
        Self { backend, variant, seed, seed_sweep: false, event_digest: Arc::default() }
    }

    /// Chooses how much a trial does: `once` in a single run, `seed_sweep` in each of many runs.
    pub(crate) fn amount<T>(&self, once: T, seed_sweep: T) -> T {
        if self.seed_sweep { seed_sweep } else { once }
    }

    /// Chooses the items of a list that this run tries: all in a single run, and one in four in each of many
    /// runs, so that four seeds in a row cover the list.
    pub(crate) fn sample<T>(&self, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        let step = self.amount(1, 4);
        all.into_iter().skip(self.seed as usize % step).step_by(step)
    }

    /// The seeds that a trial tries within one run.
    pub(crate) fn seeds(&self, count: u64) -> Range<u64> {
        self.seed..self.seed + self.amount(count, 1)
    }

    /// The numbers below `count` that a trial tries within one run, such as the turn at which something happens.
    pub(crate) fn attempts(&self, count: u64) -> Range<u64> {
        let one = self.seed % count;
        if self.seed_sweep { one..one + 1 } else { 0..count }
    }

    /// The same context with another seed.
    pub(crate) fn with_seed(&self, seed: u64) -> Self {
        Self { seed, ..self.clone() }
    }
}

/// The variants that take different data paths.
pub(crate) const ALL_PATHS: &[Variant] =
    &[Variant::Plain, Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder];

impl Trial {
    /// A virtual trial of writes on a plain device.
    pub(crate) const fn new(name: &'static str, run: fn(&TrialContext) -> Result<(), TrialFailure>) -> Self {
        Self {
            name,
            tag: TrialTag::Virtual,
            needs: Operations::WRITE,
            rails: 1,
            variants: &[Variant::Plain],
            run,
        }
    }

    /// Runs the trial on these variants instead of `Plain`.
    pub(crate) const fn on(mut self, variants: &'static [Variant]) -> Self {
        self.variants = variants;
        self
    }

    /// Adds operations that the trial needs.
    pub(crate) const fn needs(mut self, operations: Operations) -> Self {
        self.needs = self.needs.union(operations);
        self
    }

    /// Sets the number of rails that the trial asks for.
    pub(crate) const fn rails(mut self, rails: u32) -> Self {
        self.rails = rails;
        self
    }

    /// Runs the trial in real time, with workers and other processes.
    pub(crate) const fn process(mut self) -> Self {
        self.tag = TrialTag::Process;
        self
    }
}

/// A fabric, and the side of a transfer that it is on: the side decides the kind of its memory.
#[derive(Clone)]
pub(crate) struct TrialFabric {
    fabric: Fabric,
    backend: Arc<dyn BackendUnderTest>,
    side: TransferSide,
}

impl TrialFabric {
    pub(crate) fn new(fabric: Fabric, context: &TrialContext, side: TransferSide) -> Self {
        Self { fabric, backend: Arc::clone(&context.backend), side }
    }

    /// Wraps another fabric on the same side.
    pub(crate) fn same_side(&self, fabric: Fabric) -> Self {
        Self { fabric, ..self.clone() }
    }

    /// The same fabric on the given side.
    pub(crate) fn on_side(self, side: TransferSide) -> Self {
        Self { side, ..self }
    }

    /// A region in this side's kind of memory, registered near one rail group if `near` names one.
    #[track_caller]
    pub(crate) fn region(&self, near: Option<usize>, len: usize, access: Access) -> TestResult<Region> {
        let memory = self.backend.memory(self.side, len).map_err(TrialFailure::new)?;
        Ok(match (memory, near) {
            (None, None) => self.fabric.alloc(len, access)?,
            (None, Some(group)) => self.fabric.alloc_near(group, len, access)?,
            // SAFETY: the backend under test allocated the memory just now, and only the region knows it.
            (Some(memory), None) => unsafe { self.fabric.register(memory, access) }?,
            // SAFETY: as above.
            (Some(memory), Some(group)) => unsafe { self.fabric.register_near(group, memory, access) }?,
        })
    }
}

impl Deref for TrialFabric {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}
