//! The link model: a device that is slow, unordered, small or doomed, from one seed.

use std::time::Duration;

/// How an impersonated device behaves. The default is a perfect one that works in `poll`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkModel {
    /// Requests that may be outstanding; `None` takes loopback's own limit.
    pub send_depth: Option<u32>,
    /// Each post takes a random number of requests up to this one, sometimes none.
    pub accept_at_most: Option<u32>,
    /// One post in so many, at random, takes half of what it could.
    pub half_one_in: Option<u32>,
    /// One post in so many, at random, takes nothing, and nothing is taken for a random
    /// time after it, up to [`LinkModel::burst`]; the first post after that is taken.
    pub burst_one_in: Option<u32>,
    /// The longest time for which the device takes nothing.
    pub burst: Duration,
    /// Requests that are due run in random order, and their ends are reported in another.
    pub reorder: bool,
    /// Time from posting to arrival, at least.
    pub latency: Duration,
    /// Random time on top, up to this.
    pub jitter: Duration,
    /// Payload bits per second; requests queue for the line.
    pub bits_per_s: Option<u64>,
    /// Requests per second, whatever their size; more queue for the device.
    pub ops_per_s: Option<u64>,
    /// Arrivals that the completion queue holds until they are polled. Loopback states it
    /// and loses none; null devices behind a [`Switch`](crate::Switch) lose what is too much.
    pub cq_depth: Option<u32>,
    /// The device is lost once so many requests have run.
    pub lose_device_after: Option<u64>,
    /// The bytes of a write are visible so much later than its end is told, as they are where PCI Express
    /// has posted writes: unless something else comes to the peer over the same device, an imm, a message or
    /// a read, which comes after them. Of writes within one process; what was told and is not
    /// visible when a peer parts is lost.
    pub visible_after: Duration,
    /// Every so many-th request fails and moves no byte.
    pub fail_every: Option<u64>,
}

impl LinkModel {
    /// One EFA card of a p5.48xlarge: 97.433 Gbps of payload (Perplexity's published
    /// figure of one card), 0.81 million requests a second (`fi_rma_bw` on a p5, 1.24 µs
    /// each), a send queue of 4096 and a receive queue of 8192 (`fi_info` there), delivery out of
    /// order (SRD). The
    /// latency of 15 µs one way is a round figure for EFA, not measured by this project.
    pub fn p5() -> Self {
        Self {
            send_depth: Some(4096),
            reorder: true,
            latency: Duration::from_micros(15),
            jitter: Duration::from_micros(2),
            bits_per_s: Some(97_433_000_000),
            ops_per_s: Some(810_000),
            cq_depth: Some(8192),
            ..Self::default()
        }
    }

    /// How long one request of `len` bytes keeps the device busy.
    pub(crate) fn occupancy(&self, len: u64) -> Duration {
        let device = self.ops_per_s.map_or(0, |rate| per_second(1, rate));
        self.line_time(len).max(Duration::from_nanos(device))
    }

    /// How long `len` bytes take on the line.
    pub(crate) fn line_time(&self, len: u64) -> Duration {
        Duration::from_nanos(self.bits_per_s.map_or(0, |rate| per_second(u128::from(len) * 8, rate)))
    }

    /// From posting a small request on an idle line to its completion, at most.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latency + self.jitter
    }
}

/// Nanoseconds that `amount` takes at `rate` a second.
fn per_second(amount: u128, rate: u64) -> u64 {
    u64::try_from(amount * 1_000_000_000 / u128::from(rate.max(1))).unwrap_or(u64::MAX)
}
