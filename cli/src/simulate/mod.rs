//! `multirail simulate`: the unmodified engine in virtual time against simulated cards.
//!
//! A card is modelled by a line rate, a request rate and a latency. The CPU cost of a request is measured in the same
//! run, given, or counted in instructions, with those of a provider. The result is what the engine could send, not what
//! a network would carry. Slots of coalesced pages are modelled by their stages (`coalesced_group`).

mod coalesced_group;
mod costs;
mod fail_rails;
mod failing_group;
mod fairness;
mod group;
mod host;
mod incast;
mod peer_memory;
mod profile;
mod provider;
mod row;
mod way_plan;

use std::time::Duration;

use super::Common;
use super::failure::{CommandFailure, CommandResult};
use super::units::Size;
use costs::{MemoryKind, ProcessorCosts};
pub use group::shuffled_pages;
use host::SimulatedHost;
use profile::{Profile, ProfileName};
use provider::CountedProvider;
use row::PageSizeRow;
use way_plan::{Coalesce, PageOptions, WayPlan};

/// The default page sizes.
const SIZES: [u64; 6] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// The measured virtual time. A tenth of it runs before, to fill the queues.
const SPAN: Duration = Duration::from_millis(50);

#[derive(clap::Args)]
pub struct SimulateArguments {
    /// The host to simulate, on both sides
    #[arg(long, value_enum, default_value_t = ProfileName::P5)]
    profile: ProfileName,

    /// Size of a page; several may be given [default: 1KiB to 1MiB]
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

    /// Lost cards of the first group
    #[arg(long, value_name = "N", default_value_t = 0)]
    lost_cards: u32,

    /// Cards of each of the other host's rail groups [default: as many]
    #[arg(long, value_name = "N")]
    remote_cards: Option<u32>,

    /// Payload of one card, in Gbps
    #[arg(long, value_name = "GBPS")]
    card_gbps: Option<f64>,

    /// Requests per second of one card, for any size; 0 for no limit
    #[arg(long, value_name = "N")]
    op_rate: Option<u64>,

    /// The engine's CPU time per request. --provider adds the provider's [default: counted in instructions with
    /// --provider, otherwise measured on this machine with null devices]
    #[arg(long, value_name = "NS")]
    post_cost_ns: Option<f64>,

    /// Instructions per nanosecond of a core, for --provider and for slots. The default is an assumption for p5's Zen
    /// 3: 1.5 a cycle at 3 GHz
    #[arg(long, value_name = "N", default_value_t = 4.5)]
    instructions_per_ns: f64,

    /// Whether small pages are gathered into slots that the target scatters. The stages of a slot are modelled
    #[arg(long, value_enum, default_value_t = Coalesce::Never, conflicts_with_all = [
        "peers", "fairness", "incast", "fail_rails"])]
    coalesce: Coalesce,

    /// Bytes of the pages in a slot [default: 512 KiB for GPU memory, 256 KiB for host memory]
    #[arg(long, value_name = "SIZE")]
    slot_bytes: Option<Size>,

    /// Memory of a rail pair's slots, on each side [default: 4 MiB for each 100 Gbps of a card]
    #[arg(long, value_name = "SIZE")]
    ring_bytes: Option<Size>,

    /// Memory of the pages, on both sides
    #[arg(long, value_enum, default_value_t = MemoryKind::Gpu)]
    memory: MemoryKind,

    /// Pages that follow each other in both memories: they are merged
    #[arg(long, value_name = "PAGES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    run: u32,

    /// Pages that follow each other at the target: a card's gather list may take them. EFA has none
    #[arg(long, value_name = "PAGES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    target_run: u32,

    /// Also find the smallest number of cores that reaches 99 % of the throughput of all
    #[arg(long)]
    fewest_cores: bool,

    /// Instead, connect this many peers, write to each once, and print the memory per peer
    #[arg(long, value_name = "N")]
    peers: Option<u32>,

    /// Instead, measure small writes to one host during a large write to another
    #[arg(long, conflicts_with = "peers")]
    fairness: bool,

    /// Size of the large write of --fairness
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "fairness")]
    large: Size,

    /// Instead, let this many hosts write to one, in pages of 4 KiB with an imm each
    #[arg(long, value_name = "N", conflicts_with_all = ["peers", "fairness"])]
    incast: Option<u32>,

    /// Depth of a card's completion queue, in imms, with --incast
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "incast")]
    cq_depth: u32,

    /// With --incast, grant without limit: the receiver loses imms that its queue cannot hold
    #[arg(long, requires = "incast")]
    no_grants: bool,

    /// Instead, lose this many rails in the middle of a transfer: one of each rail group in turn. Their groups' other
    /// rails replay what was not acknowledged, once the other host has fenced the lost rails. Real memory is written
    /// through loopback's link model, which delivers what a lost rail had sent up to 1 ms after the loss. Each
    /// operation's target writes over its memory once the operation has ended: bytes that change it then are late bytes
    #[arg(long, value_name = "N", conflicts_with_all = [
        "peers", "fairness", "incast", "remote_cards", "lost_cards", "cores", "fewest_cores"])]
    fail_rails: Option<u32>,

    /// How long the other host takes to fence a rail, in µs, with --fail-rails. An EFA card needs half a second, 500000
    #[arg(long, value_name = "US", default_value_t = 30, requires = "fail_rails",
        value_parser = clap::value_parser!(u64).range(..=60_000_000))]
    fence_us: u64,

    /// Seed of the devices' random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs the simulation and prints one row per page size.
pub fn run(common: &Common, arguments: SimulateArguments) -> CommandResult {
    let profile = arguments.profile()?;
    if common.provider.name().is_some() && (arguments.peers.is_some() || arguments.incast.is_some()) {
        return Err(CommandFailure::new("--provider has no effect on --peers and --incast; remove it"));
    }
    if let Some(peers) = arguments.peers {
        return peer_memory::run(common, &profile, peers);
    }
    if let Some(senders) = arguments.incast {
        let (depth, grants) = (arguments.cq_depth, !arguments.no_grants);
        return incast::run(common, arguments.profile, &profile, senders, depth, grants);
    }
    let costs = arguments.costs(common, &profile)?;
    if arguments.fairness {
        if costs.provider == Some(CountedProvider::Efa117) {
            return Err(CommandFailure::new(
                "--fairness has one cost for all requests, and those of efa-1.17 differ",
            ));
        }
        return fairness::run(common, arguments.profile, &profile, costs.request_ns(0), arguments.large.0);
    }
    let sizes = match &arguments.size[..] {
        [] => SIZES.to_vec(),
        sizes => sizes.iter().map(|size| size.0).collect(),
    };
    if sizes.iter().any(|size| *size == 0 || *size > 1 << 30) {
        return Err(CommandFailure::new("--size must be between 1 byte and 1 GiB"));
    }
    if let Some(failed) = arguments.fail_rails {
        let fence_takes = Duration::from_micros(arguments.fence_us);
        return fail_rails::run(common, arguments.profile, &profile, failed, &sizes, &costs, fence_takes);
    }
    let options = arguments.page_options(&profile, &sizes)?;
    let cores = arguments.cores.unwrap_or(profile.groups);
    let mut rows = Vec::new();
    for size in sizes {
        let row = |cores| {
            let plan = WayPlan::new(&profile, &costs, &options, size, cores);
            let measured = SimulatedHost::new(&profile, cores, &plan)?.run(SPAN)?;
            let by = (&plan, cores);
            CommandResult::Ok(PageSizeRow::new(
                arguments.profile,
                &profile,
                &costs,
                &options,
                size,
                by,
                &measured,
            ))
        };
        let mut full = row(cores)?;
        if arguments.fewest_cores {
            full.fewest_cores = Some(fewest(cores, full.gbps, row)?);
        }
        rows.push(full);
    }
    PageSizeRow::print(common, &rows)
}

/// The fewest cores that reach 99 % of `gbps`.
fn fewest(most: u32, gbps: f64, row: impl Fn(u32) -> CommandResult<PageSizeRow>) -> CommandResult<u32> {
    for cores in 1..most {
        if row(cores)?.gbps >= 0.99 * gbps {
            return Ok(cores);
        }
    }
    Ok(most)
}

impl SimulateArguments {
    /// The costs of the processors.
    fn costs(&self, common: &Common, profile: &Profile) -> CommandResult<ProcessorCosts> {
        let instructions_per_ns = self.instructions_per_ns;
        if !(0.1..=100.0).contains(&instructions_per_ns) {
            return Err(CommandFailure::new("--instructions-per-ns must be between 0.1 and 100"));
        }
        let provider = common.provider.name().map(CountedProvider::named).transpose()?;
        let ours_ns = match self.post_cost_ns {
            Some(nanos) if nanos.is_finite() && nanos >= 0.0 => nanos,
            Some(_) => {
                return Err(CommandFailure::new("--post-cost-ns must be a number of nanoseconds, 0 or more"));
            }
            None if provider.is_some() => ProcessorCosts::counted_ours(instructions_per_ns),
            None => host::measured(profile.cards)?,
        };
        Ok(ProcessorCosts { ours_ns, provider, instructions_per_ns })
    }

    /// What pages are like, and how they may travel.
    fn page_options(&self, profile: &Profile, sizes: &[u64]) -> CommandResult<PageOptions> {
        if self.coalesce != Coalesce::Never && profile.remote_cards.is_some() {
            return Err(CommandFailure::new(
                "--coalesce models as many cards on the other host: remove --remote-cards, or give --coalesce never",
            ));
        }
        let slot_bytes = self.slot_bytes.as_ref().map_or_else(|| self.memory.slot_bytes(), |slot| slot.0);
        if !(4 << 10..=4 << 20).contains(&slot_bytes) {
            return Err(CommandFailure::new("--slot-bytes must be between 4 KiB and 4 MiB"));
        }
        let ring_bytes = self.ring_bytes.as_ref().map_or_else(|| WayPlan::ring_bytes(profile), |ring| ring.0);
        if ring_bytes < 2 * slot_bytes || ring_bytes > 1 << 30 {
            return Err(CommandFailure::new("--ring-bytes must be at least two slots, and at most 1 GiB"));
        }
        let longest = u64::from(self.run.max(self.target_run));
        if sizes.iter().any(|size| size.saturating_mul(longest) > 1 << 30) {
            return Err(CommandFailure::new("a run of --run or --target-run pages must not exceed 1 GiB"));
        }
        Ok(PageOptions {
            memory: self.memory,
            coalesce: self.coalesce,
            slot_bytes,
            ring_bytes,
            run: self.run.into(),
            target_run: self.target_run.into(),
        })
    }

    /// The named profile, changed by the options.
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
            return Err(CommandFailure::new(format!(
                "--cores must be between 1 and {}, the number of rail groups: one core drives a group",
                profile.groups
            )));
        }
        Ok(profile)
    }
}
