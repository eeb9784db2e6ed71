//! The link model: a device that is slow, reorders, has short queues, or fails, all from one seed.

mod device;
mod late_writes;
mod posted_writes;

use std::time::Duration;

use multirail_spi::{PeerSlot, Time};

pub(crate) use device::{DeviceModel, DueAction};
pub(crate) use late_writes::LateWrites;
pub(crate) use posted_writes::{PostedWrite, PostedWrites};

/// The behaviour of a modelled device. The default is a perfect device, which runs requests in `poll`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkModel {
    /// Requests that may be outstanding. `None` means loopback's own limit.
    pub send_depth: Option<u32>,
    /// Each post accepts a random number of requests up to this one, sometimes none.
    pub accept_at_most: Option<u32>,
    /// One post in this many, at random, accepts half of the requests that fit.
    pub half_one_in: Option<u32>,
    /// One post in this many, at random, accepts nothing. The device then accepts nothing for a random time, up to
    /// [`LinkModel::burst`]. The first post after that time is accepted.
    pub burst_one_in: Option<u32>,
    /// The longest time for which the device accepts nothing.
    pub burst: Duration,
    /// Requests that are due run in random order, and their completions are reported in another random order.
    pub reorder: bool,
    /// The least time from posting to arrival.
    pub latency: Duration,
    /// The longest random time that is added to the latency.
    pub jitter: Duration,
    /// Payload bits per second. Requests wait until the line is free.
    pub bits_per_s: Option<u64>,
    /// Requests per second, of any size. Requests wait until the device is free.
    pub ops_per_s: Option<u64>,
    /// Arrivals that the completion queue holds until they are polled. Loopback reports this number as a capability,
    /// and loses no arrival. Null devices behind a [`Switch`](crate::Switch) lose the arrivals for which there is no
    /// room.
    pub cq_depth: Option<u32>,
    /// The device is lost once this many requests have run.
    pub lose_device_after: Option<u64>,
    /// `lose_device_after` is about the device with this number alone.
    pub lose_device: Option<u32>,
    /// The devices with these numbers are lost at these times of the fabric's clock.
    pub lose_devices_at: Vec<(u32, Time)>,
    /// Paths that are broken for some time: requests over them do not arrive meanwhile.
    pub broken_paths: Vec<BrokenPath>,
    /// A device fails a request over a broken path so long after the request would have arrived. `None`: the device
    /// repeats the request until the path works again, and reports nothing before.
    pub path_errors_after: Option<Duration>,
    /// The writes that were posted to a lost device still arrive, each at a random time up to this long after the loss,
    /// as packets do that the network delays: until the target fences them. The same holds for writes over a broken
    /// path that have failed or were aborted; some of them arrive only after the path works again. Applies to peers
    /// within one process.
    pub late_after: Duration,
    /// How long a fence takes at this side, from the peer's request to the answer.
    pub fence_takes: Duration,
    /// This side says that it has fenced a peer's rail, and does nothing: with this fault, trials must fail.
    pub ignores_fences: bool,
    /// The bytes of a write become visible this long after its completion, as with posted writes of PCI Express. An
    /// imm, a message or a read to the same peer over the same device makes them visible before it. Applies to writes
    /// within one process. When a peer disconnects, completed writes that are not visible yet are lost.
    pub visible_after: Duration,
    /// One request in this many, by counting, fails and moves no byte.
    pub fail_every: Option<u64>,
    /// The device with this number is this many times slower than `bits_per_s` and `ops_per_s` say. It does not know
    /// of it: it reports the same rates as the others.
    pub slow: Option<(u32, u32)>,
}

/// A path that is broken for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BrokenPath {
    /// The number of the device.
    pub device: u32,
    /// The peer, by its number among those that this device was connected to, from 0. `None`: all peers, as with a
    /// port that is down.
    pub peer: Option<u32>,
    /// When the path breaks, by the fabric's clock.
    pub from: Time,
    /// When it works again.
    pub until: Time,
}

impl LinkModel {
    /// One EFA card of a p5.48xlarge: 97.433 Gbps of payload (Perplexity's published figure of one card), 0.81
    /// million requests per second (`fi_rma_bw` on a p5, 1.24 µs each), a send queue of 4096 and a receive queue of
    /// 8192 (`fi_info` there), delivery out of order (SRD). The latency of 15 µs one way is a round figure for EFA,
    /// which this project has not measured.
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

    /// The behaviour of device `number`.
    fn of_device(mut self, number: u32) -> Self {
        if self.lose_device.is_some_and(|lost| lost != number) {
            self.lose_device_after = None;
        }
        self.lose_devices_at.retain(|(lost, _)| *lost == number);
        self.broken_paths.retain(|path| path.device == number);
        match self.slow {
            Some((slow, times)) if slow == number => {
                let slower = |rate: u64| (rate / u64::from(times.max(1))).max(1);
                Self {
                    bits_per_s: self.bits_per_s.map(slower),
                    ops_per_s: self.ops_per_s.map(slower),
                    ..self
                }
            }
            _ => self,
        }
    }

    /// Until when the path to a peer is broken. `None` if it works.
    pub(crate) fn broken_until(&self, peer: PeerSlot, now: Time) -> Option<Time> {
        let is_broken = |path: &&BrokenPath| {
            path.peer.is_none_or(|of| of == peer.0) && (path.from..path.until).contains(&now)
        };
        self.broken_paths.iter().filter(is_broken).map(|path| path.until).max()
    }

    /// The time for which one request of `len` bytes keeps the device busy.
    pub(crate) fn occupancy(&self, len: u64) -> Duration {
        let device = self.ops_per_s.map_or(0, |rate| per_second(1, rate));
        self.line_time(len).max(Duration::from_nanos(device))
    }

    /// The time that `len` bytes take on the line.
    pub(crate) fn line_time(&self, len: u64) -> Duration {
        Duration::from_nanos(self.bits_per_s.map_or(0, |rate| per_second(u128::from(len) * 8, rate)))
    }

    /// The longest time from posting a small request on an idle line to its completion.
    pub(crate) fn round_trip(&self) -> Duration {
        self.latency + self.jitter
    }
}

/// The nanoseconds that `amount` takes at `rate` per second.
fn per_second(amount: u128, rate: u64) -> u64 {
    u64::try_from(amount * 1_000_000_000 / u128::from(rate.max(1))).unwrap_or(u64::MAX)
}
