//! `multirail simulate`: the engine, unmodified, in virtual time against modelled cards.
//!
//! It is a model: cards are a line rate, a rate of requests and a latency; what a
//! request costs the processor is measured in the same run, or given. It says what the
//! engine would feed, not what a network would carry.

mod cost;
mod fairness;
mod group;
mod host;
mod incast;
mod peer_memory;
mod profile;
mod row;

use std::time::Duration;

use super::Common;
use super::failure::{CommandResult, Failure};
use super::units::Size;
pub use group::shuffled_pages;
use host::Host;
use profile::{Name, Profile};
use row::Row;

/// Page sizes where none is asked for.
const SIZES: [u64; 6] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Virtual time that is measured, after a tenth of it to fill the queues.
const SPAN: Duration = Duration::from_millis(50);

#[derive(clap::Args)]
pub struct SimulateArguments {
    /// The host to impersonate, at both ends
    #[arg(long, value_enum, default_value_t = Name::P5)]
    profile: Name,

    /// Bytes of a page; several may be given [default: 1KiB to 1MiB]
    #[arg(long, value_name = "SIZE")]
    size: Vec<Size>,

    /// Cores that drive the rail groups [default: one per group]
    #[arg(long, value_name = "N")]
    cores: Option<u32>,

    /// Rail groups, each with its own cards and its own engine
    #[arg(long, value_name = "N")]
    groups: Option<u32>,

    /// Cards of a rail group
    #[arg(long, value_name = "N")]
    cards: Option<u32>,

    /// Cards that the first group has lost
    #[arg(long, value_name = "N", default_value_t = 0)]
    lost_cards: u32,

    /// Cards of each of the other host's rail groups [default: as many]
    #[arg(long, value_name = "N")]
    remote_cards: Option<u32>,

    /// Payload of one card, in Gbps
    #[arg(long, value_name = "GBPS")]
    card_gbps: Option<f64>,

    /// Requests per second one card takes, whatever their size; 0 for no limit
    #[arg(long, value_name = "N")]
    op_rate: Option<u64>,

    /// Processor time per request [default: measured on this machine, on null devices]
    #[arg(long, value_name = "NS")]
    post_cost_ns: Option<f64>,

    /// Also find the fewest cores that reach 99 % of what all of them reach
    #[arg(long)]
    fewest_cores: bool,

    /// Connect so many peers instead, write to each once, and print the memory each takes
    #[arg(long, value_name = "N")]
    peers: Option<u32>,

    /// Time small writes to one host beside a large one to another instead
    #[arg(long, conflicts_with = "peers")]
    fairness: bool,

    /// Bytes of the large write of --fairness
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "fairness")]
    large: Size,

    /// Let so many hosts write to one instead, pages of 4 KiB with an imm each
    #[arg(long, value_name = "N", conflicts_with_all = ["peers", "fairness"])]
    incast: Option<u32>,

    /// Imms that a card's completion queue holds, with --incast
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "incast")]
    cq_depth: u32,

    /// Let the receiver of --incast grant without limit, and lose what it cannot hold
    #[arg(long, requires = "incast")]
    no_grants: bool,

    /// Seed of the devices' dice
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Simulates, and prints a row per page size.
pub fn run(common: &Common, arguments: SimulateArguments) -> CommandResult {
    let profile = arguments.profile()?;
    if let Some(peers) = arguments.peers {
        return peer_memory::run(common, &profile, peers);
    }
    if let Some(senders) = arguments.incast {
        let (depth, grants) = (arguments.cq_depth, !arguments.no_grants);
        return incast::run(common, arguments.profile, &profile, senders, depth, grants);
    }
    let cost = match arguments.post_cost_ns {
        Some(nanos) if nanos.is_finite() && nanos >= 0.0 => nanos,
        Some(_) => return Err(Failure::new("--post-cost-ns is a number of nanoseconds, 0 or more")),
        None => cost::measured(profile.cards)?,
    };
    if arguments.fairness {
        return fairness::run(common, arguments.profile, &profile, cost, arguments.large.0);
    }
    let sizes = match &arguments.size[..] {
        [] => SIZES.to_vec(),
        sizes => sizes.iter().map(|size| size.0).collect(),
    };
    let cores = arguments.cores.unwrap_or(profile.groups);
    let mut rows = Vec::new();
    for size in sizes {
        if size == 0 || size > 1 << 30 {
            return Err(Failure::new("--size is between 1 byte and 1 GiB"));
        }
        let row = |cores| {
            let measured = Host::new(&profile, cores, cost, size)?.run(SPAN)?;
            CommandResult::Ok(Row::new(arguments.profile, &profile, cores, cost, size, &measured))
        };
        let mut full = row(cores)?;
        if arguments.fewest_cores {
            full.fewest_cores = Some(fewest(cores, full.gbps, row)?);
        }
        rows.push(full);
    }
    Row::print(common, &rows)
}

/// The fewest cores that reach 99 % of `gbps`.
fn fewest(most: u32, gbps: f64, row: impl Fn(u32) -> CommandResult<Row>) -> CommandResult<u32> {
    for cores in 1..most {
        if row(cores)?.gbps >= 0.99 * gbps {
            return Ok(cores);
        }
    }
    Ok(most)
}

impl SimulateArguments {
    /// The named profile with what the options change.
    fn profile(&self) -> CommandResult<Profile> {
        let mut profile = Profile::named(self.profile);
        profile.groups = self.groups.unwrap_or(profile.groups);
        profile.cards = self.cards.unwrap_or(profile.cards);
        profile.lost_cards = self.lost_cards;
        profile.remote_cards = self.remote_cards;
        profile.seed = self.seed;
        if let Some(gbps) = self.card_gbps {
            profile.card.bits_per_s = Some((gbps * 1e9) as u64);
        }
        match self.op_rate {
            Some(0) => profile.card.ops_per_s = None,
            Some(rate) => profile.card.ops_per_s = Some(rate),
            None => {}
        }
        profile.check()?;
        if self.cores.is_some_and(|cores| cores == 0 || cores > profile.groups) {
            return Err(Failure::new(format!(
                "--cores is between 1 and the {} rail groups: a group is driven by one core",
                profile.groups
            )));
        }
        Ok(profile)
    }
}
