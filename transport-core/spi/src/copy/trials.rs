//! The choice of a [`StreamLoop`] on x86_64: by the processor's kind, and by trials on a process's first copies.

use std::arch::x86_64::__cpuid;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::stream_loop::{LoopOrigin, Setting, StreamChoice, StreamLoop};

/// The bytes that a loop copies before its rate counts: a cut of a larger copy, or several smaller copies.
pub(super) const SAMPLE: usize = 1 << 20;

/// The samples of each loop.
const ROUNDS: usize = 7;

/// The rate of a loop is that of its third fastest sample. Two samples may find their bytes in a cache, and four may be
/// interrupted or share the memory with other programs. On a busy machine, the median of five samples chose a slower
/// loop in three of four processes.
const COUNTED: usize = 2;

/// A loop replaces the known one if it is more than this many times as fast.
const GAIN: f64 = 1.05;

/// The loops for ranges.
pub(super) static RANGES: Trials = Trials::new(&[
    StreamLoop::new(4, 128),
    StreamLoop::new(4, 256),
    StreamLoop::new(4, 512),
    StreamLoop::new(4, 1024),
    StreamLoop::new(2, 128),
    StreamLoop::new(2, 256),
    StreamLoop::new(2, 512),
    StreamLoop::new(2, 1024),
    StreamLoop::new(1, 512),
]);

/// The loops for four pages at once.
pub(super) static PAGES: Trials = Trials::new(&[
    StreamLoop::new(4, 128),
    StreamLoop::new(4, 256),
    StreamLoop::new(4, 512),
    StreamLoop::new(4, 1024),
]);

/// The trials of some loops, and the one that was chosen.
pub(super) struct Trials {
    candidates: &'static [StreamLoop],
    chosen: OnceLock<(StreamLoop, LoopOrigin)>,
    samples: Mutex<Samples>,
}

/// The samples up to now. Each round has one sample of every candidate, so that all of them see the same machine.
struct Samples {
    /// GB/s of each finished sample.
    rates: Vec<f64>,
    bytes: usize,
    time: Duration,
}

impl Trials {
    const fn new(candidates: &'static [StreamLoop]) -> Self {
        let samples = Samples { rates: Vec::new(), bytes: 0, time: Duration::ZERO };
        Self { candidates, chosen: OnceLock::new(), samples: Mutex::new(samples) }
    }

    /// Runs a copy of `bytes` by the loop that was chosen, or by the one whose turn it is.
    #[inline]
    pub(super) fn run(&self, bytes: usize, mut copy: impl FnMut(StreamLoop)) {
        match self.settled() {
            Some(chosen) => copy(chosen),
            None => self.try_next(bytes, &mut copy),
        }
    }

    /// The loop that was chosen.
    #[inline]
    pub(super) fn settled(&self) -> Option<StreamLoop> {
        self.chosen.get().map(|(chosen, _)| *chosen)
    }

    /// The loop that copies take now.
    pub(super) fn choice(&self) -> StreamChoice {
        if let Some((chosen, origin)) = self.chosen.get().copied().or_else(|| self.without_trials()) {
            return StreamChoice { stream_loop: chosen, origin, is_final: true };
        }
        StreamChoice { stream_loop: known(), origin: LoopOrigin::Processor, is_final: false }
    }

    /// The loop that the variable names, if it forbids trials.
    fn without_trials(&self) -> Option<(StreamLoop, LoopOrigin)> {
        match Setting::of_this_process() {
            Ok(Setting::Loop(given)) => {
                // Pages are copied by fours, whatever the variable says of ranges.
                let has_others = self.candidates.iter().any(|candidate| candidate.streams != 4);
                let streams = if has_others { given.streams } else { 4 };
                Some((StreamLoop { streams, ..*given }, LoopOrigin::Setting))
            }
            Ok(Setting::Processor) => Some((known(), LoopOrigin::Processor)),
            // An error: the backend that copies says so before it opens a device.
            Ok(Setting::Measure) | Err(_) => None,
        }
    }

    /// Runs a copy by the loop whose turn it is, and measures it. A thread does not wait for another thread's
    /// trial: it takes the known loop.
    #[cold]
    fn try_next(&self, bytes: usize, copy: &mut dyn FnMut(StreamLoop)) {
        if let Some(given) = self.without_trials() {
            return copy(self.chosen.get_or_init(|| given).0);
        }
        let Ok(mut samples) = self.samples.try_lock() else { return copy(known()) };
        let Some(candidate) = samples.next(self.candidates) else { return copy(known()) };
        let begun = Instant::now();
        copy(candidate);
        samples.add(bytes, begun.elapsed());
        if samples.next(self.candidates).is_none() {
            let chosen = samples.fastest(self.candidates, known());
            tracing::info!(stream_loop = %chosen.0, origin = %chosen.1, "streaming copies have chosen their loop");
            self.chosen.get_or_init(|| chosen);
        }
    }
}

impl Samples {
    /// The loop whose sample is not complete. `None` after the last round.
    fn next(&self, candidates: &[StreamLoop]) -> Option<StreamLoop> {
        let is_done = self.rates.len() >= ROUNDS * candidates.len();
        (!is_done).then(|| candidates[self.rates.len() % candidates.len()])
    }

    fn add(&mut self, bytes: usize, time: Duration) {
        self.bytes += bytes;
        self.time += time;
        if self.bytes >= SAMPLE {
            self.rates.push(self.bytes as f64 / 1e9 / self.time.as_secs_f64().max(1e-9));
            (self.bytes, self.time) = (0, Duration::ZERO);
        }
    }

    /// The fastest loop, or the known one if that is nearly as fast.
    fn fastest(&self, candidates: &[StreamLoop], known: StreamLoop) -> (StreamLoop, LoopOrigin) {
        let counted = |candidate: usize| {
            let mut rates: Vec<f64> =
                self.rates.iter().skip(candidate).step_by(candidates.len()).copied().collect();
            rates.sort_by(|a, b| b.total_cmp(a));
            rates.get(COUNTED).copied().unwrap_or_default()
        };
        let rates: Vec<f64> = (0..candidates.len()).map(counted).collect();
        let of =
            |wanted| candidates.iter().zip(&rates).find(|(it, _)| **it == wanted).map_or(0.0, |it| *it.1);
        match candidates.iter().zip(&rates).max_by(|a, b| a.1.total_cmp(b.1)) {
            Some((fastest, rate)) if *rate > of(known) * GAIN => (*fastest, LoopOrigin::Measured),
            _ => (known, LoopOrigin::Processor),
        }
    }
}

/// The loop that is known to be good on this kind of processor ([`StreamLoop`] has figures).
fn known() -> StreamLoop {
    static KNOWN: OnceLock<StreamLoop> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let leaf = __cpuid(0);
        let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
        of_kind(&vendor, __cpuid(1).eax)
    })
}

/// As [`known`], by the vendor and the register that has family and model (AMD's CPUID specification, leaf 1).
fn of_kind(vendor: &[u8], signature: u32) -> StreamLoop {
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    let model = (signature >> 4 & 0xf) | (signature >> 12 & 0xf0);
    match (vendor, family, model) {
        (b"GenuineIntel", ..) | (b"AuthenticAMD", 0x19, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf) => {
            StreamLoop::new(4, 128)
        }
        // Zen 3, and kinds that were not measured: long bursts lose a tenth on Zen 4, and short ones two thirds on
        // Zen 3.
        _ => StreamLoop::new(4, 512),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILAN: u32 = 0x00a0_0f11;
    const GENOA: u32 = 0x00a1_0f11;
    const SAPPHIRE_RAPIDS: u32 = 0x000c_06f2;

    /// The choice after all rounds, on a processor whose loops have these rates in GB/s.
    fn chosen(known: StreamLoop, rate: impl Fn(StreamLoop, usize) -> f64) -> (StreamLoop, LoopOrigin) {
        let mut samples = Samples { rates: Vec::new(), bytes: 0, time: Duration::ZERO };
        let mut tried = 0;
        while let Some(candidate) = samples.next(RANGES.candidates) {
            // Two copies to a sample.
            let rate = rate(candidate, tried / 2 / RANGES.candidates.len());
            samples.add(SAMPLE / 2, Duration::from_secs_f64(SAMPLE as f64 / 2e9 / rate));
            tried += 1;
        }
        assert_eq!(tried, 2 * ROUNDS * RANGES.candidates.len());
        samples.fastest(RANGES.candidates, known)
    }

    #[test]
    fn the_table_knows_processors_by_their_models() {
        assert_eq!(of_kind(b"AuthenticAMD", MILAN), StreamLoop::new(4, 512));
        assert_eq!(of_kind(b"AuthenticAMD", GENOA), StreamLoop::new(4, 128));
        assert_eq!(of_kind(b"GenuineIntel", SAPPHIRE_RAPIDS), StreamLoop::new(4, 128));
        assert_eq!(of_kind(b"HygonGenuine", 0), StreamLoop::new(4, 512));
    }

    /// Each kind's loop is tried too, so that it can win.
    #[test]
    fn the_known_loops_are_candidates() {
        for signature in [MILAN, GENOA] {
            let known = of_kind(b"AuthenticAMD", signature);
            assert!(RANGES.candidates.contains(&known) && PAGES.candidates.contains(&known), "{known}");
        }
    }

    #[test]
    fn a_loop_that_is_clearly_faster_replaces_the_known_one() {
        let known = StreamLoop::new(4, 128);
        assert_eq!(chosen(known, |_, _| 10.0), (known, LoopOrigin::Processor));
        assert_eq!(
            chosen(known, |it, _| if it == known { 9.6 } else { 10.0 }),
            (known, LoopOrigin::Processor)
        );
        // A Zen 3 that pretends to be another processor.
        let zen3 = |it: StreamLoop, _| match (it.streams, it.burst) {
            (4, 128) => 3.8,
            (4, 512) => 13.3,
            (1, _) => 9.2,
            _ => 11.4,
        };
        assert_eq!(chosen(known, zen3), (StreamLoop::new(4, 512), LoopOrigin::Measured));
    }

    /// Four samples of a loop may be interrupted, and two may find their bytes in a cache.
    #[test]
    fn odd_samples_decide_nothing() {
        let (known, other) = (StreamLoop::new(4, 512), StreamLoop::new(2, 256));
        let rate = |it: StreamLoop, round: usize| match round {
            0..4 if it == known => 0.1,
            0..2 if it == other => 100.0,
            _ => 10.0,
        };
        assert_eq!(chosen(known, rate), (known, LoopOrigin::Processor));
    }

    #[test]
    fn no_loop_is_tried_once_one_is_chosen() {
        static TRIALS: Trials = Trials::new(&[StreamLoop::new(4, 128), StreamLoop::new(1, 512)]);
        let mut tried = Vec::new();
        while !TRIALS.choice().is_final {
            TRIALS.run(SAMPLE, |stream_loop| tried.push(stream_loop));
        }
        assert_eq!(tried.len(), 2 * ROUNDS, "{tried:?}");
        let chosen = TRIALS.choice();
        TRIALS.run(SAMPLE, |stream_loop| assert_eq!(stream_loop, chosen.stream_loop));
        assert_eq!(TRIALS.choice(), chosen);
    }

    /// A thread that copies while another one tries a loop takes the known loop.
    #[test]
    fn a_second_thread_does_not_wait_for_a_trial() {
        static TRIALS: Trials = Trials::new(&[StreamLoop::new(1, 512)]);
        TRIALS.run(1, |_| TRIALS.run(1, |stream_loop| assert_eq!(stream_loop, known())));
        assert_eq!(TRIALS.settled(), None);
    }
}
