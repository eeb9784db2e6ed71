//! A small write to one host beside a large one to another, over the same cards.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Peer, Region, RemoteRegion, Time, TransportConfig, VirtualClock,
};
use serde::Serialize;

use super::cost::Meter;
use super::memory::untouched;
use super::profile::{Name, Profile};
use crate::Common;
use crate::failure::{Done, Failure};
use crate::output;
use crate::table;
use crate::units::{Size, round};

/// Bytes of a small write.
const SMALL: usize = 4 << 10;
/// Small writes that are timed, with and without the large one.
const TIMED: usize = 2000;
/// The longest pause between two small writes: several chunks on the line, so that they
/// come at all moments of it.
const PAUSE: Duration = Duration::from_micros(50);

#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    profile: Name,
    rails: u32,
    small: u64,
    large: u64,
    idle_p50_us: f64,
    idle_p99_us: f64,
    beside_p50_us: f64,
    beside_p99_us: f64,
    /// Of the 99th percentiles.
    times_idle: f64,
    /// What the large write moved meanwhile.
    large_gbps: f64,
    ceiling_gbps: f64,
}

/// One rail group, and two groups of other hosts.
struct Scene {
    clock: VirtualClock,
    fabrics: [Fabric; 3],
    source: Region,
    far: (Peer, RemoteRegion),
    near: (Peer, RemoteRegion),
    large: u64,
    /// The large write under way, and again and again.
    beside: Option<Op>,
    meter: Meter,
    random: fastrand::Rng,
}

/// Times small writes, without and with a large one of `large` bytes.
pub fn run(common: &Common, name: Name, profile: &Profile, cost: f64, large: u64) -> Done {
    if large == 0 || large > 1 << 32 {
        return Err(Failure::new("--large is between 1 byte and 4 GiB"));
    }
    let mut scene = Scene::open(profile, cost, large)?;
    let idle = scene.timed()?;
    let (begun, before) = (scene.clock.now(), scene.posted());
    scene.beside = Some(scene.write_large()?);
    let beside = scene.timed()?;
    let span = scene.clock.now().since(begun);
    let bytes = scene.posted() - before - (TIMED * SMALL) as u64;
    let row = Row {
        model: "simulation, not a measurement",
        profile: name,
        rails: profile.cards_of(0),
        small: SMALL as u64,
        large,
        idle_p50_us: micros(&idle, 50),
        idle_p99_us: micros(&idle, 99),
        beside_p50_us: micros(&beside, 50),
        beside_p99_us: micros(&beside, 99),
        times_idle: round(micros(&beside, 99) / micros(&idle, 99)),
        large_gbps: round(bytes as f64 * 8.0 / span.as_secs_f64() / 1e9),
        ceiling_gbps: round(
            f64::from(profile.cards_of(0)) * profile.card.bits_per_s.unwrap_or(0) as f64 / 1e9,
        ),
    };
    if common.json {
        return output::json(&row);
    }
    table::sentence(&format!(
        "a write of {} takes {:.1} us at the 99th percentile, {:.1} us beside one of {} ({:.2} times), which \
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

impl Scene {
    fn open(profile: &Profile, cost: f64, large: u64) -> Done<Self> {
        let (clock, switch) = (VirtualClock::default(), Switch::default());
        let open = |host: u64| -> Done<Fabric> {
            let cards = Null::new(profile.cards_of(0)).link(profile.card.clone()).switch(&switch);
            Ok(FabricBuilder::new()
                .transport(TransportConfig::new("cards", Arc::new(cards)))
                .clock(Arc::new(clock.clone()))
                .seed(profile.seed.wrapping_mul(1000).wrapping_add(host))
                .caller_driven()
                .open()?)
        };
        let fabrics = [open(0)?, open(1)?, open(2)?];
        let reach = |host: usize, bytes: u64| -> Done<(Peer, RemoteRegion)> {
            let peer = fabrics[0].connect_local(&fabrics[host])?.0;
            let landing = untouched(&fabrics[host], bytes as usize, Access::REMOTE_WRITE)?;
            let landing = peer.import(&landing.descriptor())?;
            Ok((peer, landing))
        };
        let (far, near) = (reach(1, large)?, reach(2, SMALL as u64)?);
        let source = untouched(&fabrics[0], large.max(SMALL as u64) as usize, Access::LOCAL)?;
        let random = fastrand::Rng::with_seed(profile.seed);
        Ok(Self { clock, fabrics, source, far, near, large, beside: None, meter: Meter::new(cost), random })
    }

    /// Small writes one after another, at all moments: their latencies, sorted.
    fn timed(&mut self) -> Done<Vec<Duration>> {
        let mut latencies = Vec::with_capacity(TIMED);
        while latencies.len() < TIMED {
            let pause = Duration::from_nanos(self.random.u64(..PAUSE.as_nanos() as u64));
            let until = self.clock.now().after(pause);
            while self.clock.now() < until {
                self.turn(until)?;
            }
            let begun = self.clock.now();
            let mut op = self.near.0.write(&self.source, 0..SMALL, &self.near.1, 0)?;
            let written = loop {
                if let Some(written) = op.try_result() {
                    break written;
                }
                self.turn(Time::NEVER)?;
            };
            written?;
            latencies.push(self.clock.now().since(begun));
        }
        latencies.sort_unstable();
        Ok(latencies)
    }

    /// One turn of all; the clock moves by what it cost, or to the next news before `until`.
    fn turn(&mut self, until: Time) -> Done {
        if let Some(ended) = self.beside.as_mut().and_then(Op::try_result) {
            ended?;
            self.beside = Some(self.write_large()?);
        }
        let turn = self.fabrics[0].step();
        let events = turn.events + self.fabrics[1..].iter().map(|fabric| fabric.step().events).sum::<usize>();
        self.clock.advance(self.meter.charge(turn.posted));
        if events > 0 {
            return Ok(());
        }
        let due = self.fabrics.iter().map(Fabric::due).fold(until, Time::min);
        if due == Time::NEVER {
            return Err(Failure::new("the simulated host stands still: this is a bug, please report it"));
        }
        self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        Ok(())
    }

    fn write_large(&self) -> Done<Op> {
        let (peer, landing) = &self.far;
        Ok(peer.write(&self.source, 0..self.large as usize, landing, 0)?)
    }

    /// Bytes that the cards were given so far.
    fn posted(&self) -> u64 {
        self.fabrics[0].counters().iter().map(|rail| rail.bytes).sum()
    }
}
