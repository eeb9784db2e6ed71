//! Late writes: what a lost device or a broken path had carried, and what the network has not delivered yet.

use multirail_spi::{Time, WorkRequest};

use super::PostedWrite;

/// The late writes of a device, each with the number of times that its connection had been shut when it was sent.
#[derive(Default)]
pub(crate) struct LateWrites(Vec<(PostedWrite, u64)>);

impl LateWrites {
    /// Adds a write that arrives at a certain time, and copies its bytes.
    ///
    /// # Safety
    /// The request's local span is readable.
    pub(crate) unsafe fn push(&mut self, request: &WorkRequest, arrival: Time, times_shut: u64) {
        // SAFETY: by the caller.
        self.0.push((unsafe { PostedWrite::new(request, arrival) }, times_shut));
    }

    /// Takes the next write that arrives by `now`.
    pub(crate) fn next(&mut self, now: Time) -> Option<(PostedWrite, u64)> {
        let first = (0..self.0.len()).min_by_key(|at| self.0[*at].0.visible())?;
        (self.0[first].0.visible() <= now).then(|| self.0.swap_remove(first))
    }

    /// The time when the next write arrives.
    pub(crate) fn next_due(&self) -> Time {
        self.0.iter().map(|(write, _)| write.visible()).fold(Time::NEVER, Time::min)
    }
}
