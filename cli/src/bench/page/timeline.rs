//! The bytes of each rail over the time of a bench.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use multirail::{Fabric, WeakFabric};

use crate::failure::{CommandFailure, CommandResult};

/// The time between two samples of a short bench. A longer one has fewer samples per second.
const INTERVAL: Duration = Duration::from_millis(20);

/// The most samples. When there are as many, every second one is dropped, and the time between two doubles.
const MAX_SAMPLES: usize = 512;

/// A thread that reads the counters of a fabric.
pub struct TimelineRecorder {
    thread: JoinHandle<Timeline>,
    /// Dropping it ends the thread.
    running: Sender<()>,
}

/// What the rails had carried at some moments.
pub struct Timeline {
    /// The first sample's moment.
    pub began: Instant,
    /// The devices of the rails.
    pub devices: Vec<String>,
    /// The time since `began` in seconds, and the bytes of each rail.
    pub samples: Vec<(f64, Vec<u64>)>,
}

impl TimelineRecorder {
    /// Starts the thread. It does not keep the fabric open.
    pub fn start(fabric: &Fabric) -> CommandResult<Self> {
        let devices = fabric.counters().into_iter().map(|rail| rail.device).collect();
        let timeline = Timeline { began: Instant::now(), devices, samples: Vec::new() };
        let (running, stopped) = channel();
        let fabric = fabric.downgrade();
        let body = move || timeline.record(&fabric, &stopped);
        let thread = std::thread::Builder::new().name("mr-timeline".into()).spawn(body);
        let thread =
            thread.map_err(|error| CommandFailure::new(format!("cannot start a thread: {error}")))?;
        Ok(Self { thread, running })
    }

    /// Ends the thread. `None` if it panicked.
    pub fn finish(self) -> Option<Timeline> {
        drop(self.running);
        self.thread.join().ok()
    }
}

impl Timeline {
    fn record(mut self, fabric: &WeakFabric, stopped: &Receiver<()>) -> Self {
        let mut interval = INTERVAL;
        loop {
            let Some(fabric) = fabric.upgrade() else { return self };
            let bytes = fabric.counters().into_iter().map(|rail| rail.bytes + rail.direct_bytes);
            self.samples.push((self.began.elapsed().as_secs_f64(), bytes.collect()));
            drop(fabric);
            if self.samples.len() >= MAX_SAMPLES {
                let mut at = 0;
                self.samples.retain(|_| {
                    at += 1;
                    at % 2 == 1
                });
                interval *= 2;
            }
            if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                return self;
            }
        }
    }

    /// Decimal GB/s between each two samples, of all rails together or of one: the moment in the middle, and the rate.
    pub fn rates(&self, rail: Option<usize>) -> Vec<(f64, f64)> {
        let bytes = |bytes: &[u64]| match rail {
            Some(rail) => bytes.get(rail).copied().unwrap_or(0),
            None => bytes.iter().sum(),
        };
        let rate = |pair: &[(f64, Vec<u64>)]| {
            let (from, to) = (&pair[0], &pair[1]);
            let took = (to.0 - from.0).max(1e-9);
            ((from.0 + to.0) / 2.0, bytes(&to.1).saturating_sub(bytes(&from.1)) as f64 / took / 1e9)
        };
        self.samples.windows(2).map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences() {
        let samples =
            vec![(0.0, vec![0, 0]), (1.0, vec![2_000_000_000, 0]), (1.5, vec![2_000_000_000, 500_000_000])];
        let timeline = Timeline { began: Instant::now(), devices: vec!["a".into(), "b".into()], samples };
        assert_eq!(timeline.rates(None), [(0.5, 2.0), (1.25, 1.0)]);
        assert_eq!(timeline.rates(Some(1)), [(0.5, 0.0), (1.25, 1.0)]);
    }

    #[test]
    fn the_thread_ends_and_keeps_no_fabric_open() {
        let fabric = multirail::FabricBuilder::new()
            .transport(multirail::TransportConfig::new(
                "lo",
                std::sync::Arc::new(backend_loopback::Loopback::new()),
            ))
            .open()
            .expect("a fabric");
        let (recorder, weak) = (TimelineRecorder::start(&fabric).expect("a thread"), fabric.downgrade());
        drop(fabric);
        let timeline = recorder.finish().expect("a timeline");
        assert!(weak.upgrade().is_none() && !timeline.devices.is_empty());
    }
}
