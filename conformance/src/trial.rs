//! A trial: a name, what it needs, and a function.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use transport_core::spi::Operations;

use crate::check::Failure;
use crate::subject::{Subject, Tag, Variant};

/// A behaviour that every backend must show.
#[derive(Clone, Copy)]
pub struct Trial {
    /// `noun::behaviour`.
    pub name: &'static str,
    /// What it runs in.
    pub tag: Tag,
    /// Operations it cannot do without.
    pub needs: Operations,
    /// Rails of a fabric that it opens beyond the subject's own, if any.
    pub rails: u32,
    /// Devices it runs on: once per variant.
    pub variants: &'static [Variant],
    pub(crate) run: fn(&Context) -> Result<(), Failure>,
}

/// What one run of a trial is given.
#[derive(Clone)]
pub struct Context {
    pub(crate) subject: Arc<dyn Subject>,
    pub(crate) variant: Variant,
    pub(crate) seed: u64,
    /// One of many seeds: what a trial would try by itself, the other seeds try.
    pub(crate) swept: bool,
    pub(crate) witness: Arc<Witness>,
}

/// What a trial's fabrics did, as one number: equal for two runs that did the same.
#[derive(Default)]
pub(crate) struct Witness(AtomicU64);

impl Witness {
    /// A fabric is done with, after these events.
    pub(crate) fn saw(&self, event_hash: u64) {
        let mix = |sum: u64| (sum.rotate_left(7) ^ event_hash).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0.update(Ordering::Relaxed, Ordering::Relaxed, mix);
    }

    /// All of it, for a new start.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

impl Context {
    /// For one run on that device.
    pub(crate) fn new(subject: Arc<dyn Subject>, variant: Variant, seed: u64) -> Self {
        Self { subject, variant, seed, swept: false, witness: Arc::default() }
    }

    /// How much a trial does: less in each run of many.
    pub(crate) fn amount<T>(&self, once: T, swept: T) -> T {
        if self.swept { swept } else { once }
    }

    /// Of a list that a trial goes through, what this run takes: one in four in each run of
    /// many, so that four seeds in a row take all.
    pub(crate) fn some<T>(&self, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        let step = self.amount(1, 4);
        all.into_iter().skip(self.seed as usize % step).step_by(step)
    }

    /// The seeds that a trial goes through by itself.
    pub(crate) fn seeds(&self, count: u64) -> Range<u64> {
        self.seed..self.seed + self.amount(count, 1)
    }

    /// The numbers below `count` that a trial goes through by itself: moments, mostly.
    pub(crate) fn tries(&self, count: u64) -> Range<u64> {
        let one = self.seed % count;
        if self.swept { one..one + 1 } else { 0..count }
    }

    /// The same with another seed.
    pub(crate) fn with_seed(&self, seed: u64) -> Self {
        Self { seed, ..self.clone() }
    }
}

/// The data path in all its shapes.
pub(crate) const ALL_PATHS: &[Variant] =
    &[Variant::Plain, Variant::Queued, Variant::SmallQueue, Variant::Partial, Variant::Reorder];

impl Trial {
    /// A virtual trial of writes on a plain device.
    pub(crate) const fn new(name: &'static str, run: fn(&Context) -> Result<(), Failure>) -> Self {
        Self { name, tag: Tag::Virtual, needs: Operations::WRITE, rails: 1, variants: &[Variant::Plain], run }
    }

    /// On these devices instead.
    pub(crate) const fn on(mut self, variants: &'static [Variant]) -> Self {
        self.variants = variants;
        self
    }

    /// Needs these operations too.
    pub(crate) const fn needs(mut self, operations: Operations) -> Self {
        self.needs = self.needs.union(operations);
        self
    }

    /// Opens fabrics of that many rails.
    pub(crate) const fn rails(mut self, rails: u32) -> Self {
        self.rails = rails;
        self
    }

    /// In real time, with workers and other processes.
    pub(crate) const fn process(mut self) -> Self {
        self.tag = Tag::Process;
        self
    }
}
