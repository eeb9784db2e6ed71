//! Incast: many senders to one receiver, limited by its line rate and its completion queue.
//!
//! Grants reach their senders at once, because the control connection is not modelled.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, EvenShares, Fabric, FabricBuilder, Grant, GrantPolicy, GrantRequest, Op, Pages, Peer,
    Time, TransportConfig, VirtualClock, WriteOptions,
};
use serde::Serialize;

use super::group::untouched;
use super::profile::{Profile, ProfileName};
use crate::Common;
use crate::failure::{CommandFailure, CommandResult};
use crate::output;

use crate::units::round;

/// The maximum number of senders.
const MAX: u32 = 4096;
/// The size of a page. Each page has an imm.
const PAGE: usize = 4 << 10;
/// The number of pages of each sender.
const PAGES: u32 = 1024;
/// The time between two polls of the receiver's completion queue, as of a thread that also does other work. In this
/// time its line carries 1500 pages.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// The imm of all pages.
const IMM: u32 = 1;

#[derive(Debug, Serialize)]
struct IncastRow {
    model: &'static str,
    profile: ProfileName,
    senders: u32,
    cq_depth: u32,
    grants: bool,
    /// The imms sent, and the imms counted by the receiver.
    sent: u64,
    arrived: u64,
    /// The imms lost to a full completion queue, and the largest number that the queue held.
    overruns: u64,
    fullest: usize,
    /// The difference between the fastest and the slowest sender when the first was done, in percent of the average.
    spread_percent: f64,
    gbps: f64,
    ceiling_gbps: f64,
}

/// Grants without limit.
struct UnlimitedGrants;

impl GrantPolicy for UnlimitedGrants {
    fn grant(&self, _: &GrantRequest<'_>) -> Grant {
        Grant::UNLIMITED
    }
}

struct IncastSender {
    fabric: Fabric,
    op: Op,
    done: bool,
    /// The receiver's peer.
    peer: Peer,
}

/// Simulates `senders` hosts that write pages with imms to one host. Each host has one card.
pub fn run(
    common: &Common,
    name: ProfileName,
    profile: &Profile,
    senders: u32,
    cq_depth: u32,
    grants: bool,
) -> CommandResult {
    if senders == 0 || senders > MAX || cq_depth == 0 {
        return Err(CommandFailure::new(format!(
            "--incast must be between 1 and {MAX}, and --cq-depth at least 1"
        )));
    }
    let (clock, switch) = (VirtualClock::default(), Switch::default());
    let mut card = profile.card.clone();
    card.cq_depth = Some(cq_depth);
    let open = |host: u32| -> CommandResult<Fabric> {
        let card = Null::new(1).link(card.clone()).switch(&switch);
        Ok(FabricBuilder::new()
            .transport(TransportConfig::new("cards", Arc::new(card)))
            .clock(Arc::new(clock.clone()))
            .seed(profile.seed.wrapping_mul(10_000).wrapping_add(host.into()))
            .grant_policy(if grants { Arc::new(EvenShares) } else { Arc::new(UnlimitedGrants) })
            .max_operations(16)
            .flight_recorder(0)
            .caller_driven()
            .open()?)
    };
    let receiver = open(0)?;
    let landing = untouched(&receiver, PAGES as usize * PAGE, Access::REMOTE_WRITE)?.descriptor();
    let pages = Pages::new((0..PAGES).collect::<Vec<_>>());
    let mut all = Vec::new();
    for host in 1..=senders {
        let fabric = open(host)?;
        let (to_receiver, peer) = fabric.connect_local(&receiver)?;
        let landing = to_receiver.import(&landing)?;
        let source = untouched(&fabric, PAGE, Access::LOCAL)?;
        let (from, options) = (Pages::new(vec![0; PAGES as usize]), WriteOptions::new().imm(IMM).per_wr());
        let op = to_receiver.write_pages_with(&source, &from, &landing, &pages, PAGE, &options)?;
        all.push(IncastSender { fabric, op, done: false, peer });
    }
    let mut spread = None;
    let mut next_poll = Time::ZERO;
    while all.iter().any(|sender| !sender.done) {
        let mut events = 0;
        for sender in &mut all {
            events += sender.fabric.step().events;
            if !sender.done
                && let Some(ended) = sender.op.try_result()
            {
                ended?;
                sender.done = true;
            }
        }
        if spread.is_none() && all.iter().any(|sender| sender.done) {
            spread = Some(spread_percent(&all));
        }
        if clock.now() >= next_poll {
            next_poll = clock.now().after(POLL_INTERVAL);
            while receiver.step().events > 0 {
                events += 1;
            }
        }
        if events == 0 {
            let due = all.iter().map(|sender| sender.fabric.due()).fold(next_poll, Time::min);
            clock.advance(due.since(clock.now()).max(Duration::from_nanos(1)));
        }
    }
    let span = clock.now().since(Time::ZERO).as_secs_f64();
    while receiver.step().events > 0 {}
    let sent = u64::from(senders) * u64::from(PAGES);
    let row = IncastRow {
        model: "simulation, not a measurement",
        profile: name,
        senders,
        cq_depth,
        grants,
        sent,
        arrived: all.iter().map(|sender| sender.peer.imm(IMM).count()).sum(),
        overruns: switch.overruns(),
        fullest: switch.fullest(),
        spread_percent: round(spread.unwrap_or(0.0)),
        gbps: round((sent * PAGE as u64 * 8) as f64 / span / 1e9),
        ceiling_gbps: round(profile.card.bits_per_s.unwrap_or(0) as f64 / 1e9),
    };
    if common.json {
        return output::json(&row);
    }
    output::print_text(&format!(
        "{} senders, a completion queue of {}, {}: {} of {} imms arrived, {} overruns, at most {} in the queue; \
         spread of shares {:.1} %, {:.1} of {:.1} Gbps; a simulation, not a measurement",
        row.senders,
        row.cq_depth,
        if grants { "grants" } else { "no grants" },
        row.arrived,
        row.sent,
        row.overruns,
        row.fullest,
        row.spread_percent,
        row.gbps,
        row.ceiling_gbps
    ))
}

fn spread_percent(all: &[IncastSender]) -> f64 {
    let done =
        |sender: &IncastSender| sender.fabric.counters().iter().map(|rail| rail.completions).sum::<u64>();
    let done: Vec<_> = all.iter().map(done).collect();
    let (least, most) = (done.iter().min().copied().unwrap_or(0), done.iter().max().copied().unwrap_or(0));
    let average = done.iter().sum::<u64>() as f64 / done.len().max(1) as f64;
    (most - least) as f64 / average.max(1.0) * 100.0
}
