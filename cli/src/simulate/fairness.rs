//! Latency of small writes to one host while a large write to another host uses the same cards.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Peer, Region, RemoteRegion, Time, TransportConfig, VirtualClock,
};
use serde::Serialize;

use super::group::untouched;
use super::host::CpuMeter;
use super::profile::{Profile, ProfileName};
use crate::Common;
use crate::failure::{CommandFailure, CommandResult};
use crate::output;

use crate::units::{Size, round};

/// The size of a small write.
const SMALL: usize = 4 << 10;
/// The number of timed small writes, with and without the large write.
const SAMPLES: usize = 2000;
/// The longest pause between two small writes. It is as long as several chunks take on the wire, so that small writes
/// begin at any moment of a chunk.
const PAUSE: Duration = Duration::from_micros(50);

#[derive(Debug, Serialize)]
struct FairnessRow {
    model: &'static str,
    profile: ProfileName,
    rails: u32,
    small: u64,
    large: u64,
    idle_p50_us: f64,
    idle_p99_us: f64,
    beside_p50_us: f64,
    beside_p99_us: f64,
    /// The ratio of the 99th percentiles.
    times_idle: f64,
    /// The throughput of the large write.
    large_gbps: f64,
    ceiling_gbps: f64,
}

/// One rail group, and the groups of two other hosts.
struct FairnessModel {
    clock: VirtualClock,
    fabrics: [Fabric; 3],
    source: Region,
    large_target: (Peer, RemoteRegion),
    small_target: (Peer, RemoteRegion),
    large: u64,
    /// The outstanding large write. A new one starts when it completes.
    large_write: Option<Op>,
    meter: CpuMeter,
    random: fastrand::Rng,
}

/// Measures small writes, without and with a large write of `large` bytes.
pub fn run(common: &Common, name: ProfileName, profile: &Profile, cost: f64, large: u64) -> CommandResult {
    if large == 0 || large > 1 << 32 {
        return Err(CommandFailure::new("--large must be between 1 byte and 4 GiB"));
    }
    let mut simulation = FairnessModel::open(profile, cost, large)?;
    let idle = simulation.timed()?;
    let (begun, before) = (simulation.clock.now(), simulation.posted());
    simulation.large_write = Some(simulation.write_large()?);
    let large_write = simulation.timed()?;
    let span = simulation.clock.now().since(begun);
    let bytes = simulation.posted() - before - (SAMPLES * SMALL) as u64;
    let row = FairnessRow {
        model: "simulation, not a measurement",
        profile: name,
        rails: profile.cards_of(0),
        small: SMALL as u64,
        large,
        idle_p50_us: micros(&idle, 50),
        idle_p99_us: micros(&idle, 99),
        beside_p50_us: micros(&large_write, 50),
        beside_p99_us: micros(&large_write, 99),
        times_idle: round(micros(&large_write, 99) / micros(&idle, 99)),
        large_gbps: round(bytes as f64 * 8.0 / span.as_secs_f64() / 1e9),
        ceiling_gbps: round(
            f64::from(profile.cards_of(0)) * profile.card.bits_per_s.unwrap_or(0) as f64 / 1e9,
        ),
    };
    if common.json {
        return output::json(&row);
    }
    output::print_text(&format!(
        "a write of {} takes {:.1} us at the 99th percentile, {:.1} us during a write of {} ({:.2} times), which \
         moves {:.1} of {:.1} Gbps; a simulation, not a measurement",
        Size(row.small),
        row.idle_p99_us,
        row.beside_p99_us,
        Size(row.large),
        row.times_idle,
        row.large_gbps,
        row.ceiling_gbps
    ))
}

fn micros(sorted: &[Duration], percent: usize) -> f64 {
    round(sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)].as_secs_f64() * 1e6)
}

impl FairnessModel {
    fn open(profile: &Profile, cost: f64, large: u64) -> CommandResult<Self> {
        let (clock, switch) = (VirtualClock::default(), Switch::default());
        let open = |host: u64| -> CommandResult<Fabric> {
            let cards = Null::new(profile.cards_of(0)).link(profile.card.clone()).switch(&switch);
            Ok(FabricBuilder::new()
                .transport(TransportConfig::new("cards", Arc::new(cards)))
                .clock(Arc::new(clock.clone()))
                .seed(profile.seed.wrapping_mul(1000).wrapping_add(host))
                .caller_driven()
                .open()?)
        };
        let fabrics = [open(0)?, open(1)?, open(2)?];
        let reach = |host: usize, bytes: u64| -> CommandResult<(Peer, RemoteRegion)> {
            let peer = fabrics[0].connect_local(&fabrics[host])?.0;
            let landing = untouched(&fabrics[host], bytes as usize, Access::REMOTE_WRITE)?;
            let landing = peer.import(&landing.descriptor())?;
            Ok((peer, landing))
        };
        let (large_target, small_target) = (reach(1, large)?, reach(2, SMALL as u64)?);
        let source = untouched(&fabrics[0], large.max(SMALL as u64) as usize, Access::LOCAL)?;
        let random = fastrand::Rng::with_seed(profile.seed);
        Ok(Self {
            clock,
            fabrics,
            source,
            large_target,
            small_target,
            large,
            large_write: None,
            meter: CpuMeter::new(cost),
            random,
        })
    }

    /// Runs small writes one after another at random moments. Returns their sorted latencies.
    fn timed(&mut self) -> CommandResult<Vec<Duration>> {
        let mut latencies = Vec::with_capacity(SAMPLES);
        while latencies.len() < SAMPLES {
            let pause = Duration::from_nanos(self.random.u64(..PAUSE.as_nanos() as u64));
            let until = self.clock.now().after(pause);
            while self.clock.now() < until {
                self.step(until)?;
            }
            let begun = self.clock.now();
            let mut op = self.small_target.0.write(&self.source, 0..SMALL, &self.small_target.1, 0)?;
            let written = loop {
                if let Some(written) = op.try_result() {
                    break written;
                }
                self.step(Time::NEVER)?;
            };
            written?;
            latencies.push(self.clock.now().since(begun));
        }
        latencies.sort_unstable();
        Ok(latencies)
    }

    /// Runs one turn of all fabrics. The clock moves by the CPU cost, or to the next event before `until`.
    fn step(&mut self, until: Time) -> CommandResult {
        if let Some(ended) = self.large_write.as_mut().and_then(Op::try_result) {
            ended?;
            self.large_write = Some(self.write_large()?);
        }
        let step = self.fabrics[0].step();
        let events = step.events + self.fabrics[1..].iter().map(|fabric| fabric.step().events).sum::<usize>();
        self.clock.advance(self.meter.charge(step.posted));
        if events > 0 {
            return Ok(());
        }
        let due = self.fabrics.iter().map(Fabric::due).fold(until, Time::min);
        if due == Time::NEVER {
            return Err(CommandFailure::new(
                "the simulation makes no progress; this is a bug, please report it",
            ));
        }
        self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        Ok(())
    }

    fn write_large(&self) -> CommandResult<Op> {
        let (peer, landing) = &self.large_target;
        Ok(peer.write(&self.source, 0..self.large as usize, landing, 0)?)
    }

    /// The bytes that were posted to the cards.
    fn posted(&self) -> u64 {
        self.fabrics[0].counters().iter().map(|rail| rail.bytes).sum()
    }
}
