//! `multirail bench`: measures a transfer and compares it with memcpy in the same run.

mod client;
mod content;
mod failing;
mod ladder;
mod layout;
mod limit;
mod load;
mod load_runner;
mod memory;
mod page;
pub(super) mod protocol;
mod rails;
mod report;
mod row;
mod sampler;
mod server;
mod spawn;
mod verification;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use multirail::{CoalescePolicy, Fabric, Paths};

use super::Common;
use super::common::ObserveOptions;
use super::failure::{CommandFailure, CommandResult};
use super::units::{self, Size};
use client::Client;
use failing::{FailRail, RailFailure};
use load::{BenchLoad, OpKind};
use memory::BenchMemory;
use page::ResultPage;
use report::RowReport;
use row::BenchRow;

/// The sizes of `--sweep`.
const SWEEP: [u64; 11] =
    [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20];

/// The default number of pages, and the most bytes of the default.
const DEFAULT_PAGES: u32 = 1024;
const DEFAULT_TOTAL: u64 = 64 << 20;

/// The default number of regions of a list: one for each layer of a large model.
const DEFAULT_REGIONS: u32 = 80;

/// The method of measurement, for `--help`.
const METHOD: &str = "\
Without a subcommand, bench starts a second process and measures against it.

One op is one page for write, write-imm, read and send. For write-pages, read-pages, write-list and read-list \
one op is all --pages pages; bench plans each op anew and prepares none. A list spreads its pages over \
--regions regions on each side, as a KV cache has one region per layer, and each page moves between two regions \
of the same number. \
Latency is the time from post to completion; of ops shorter than 2 µs, bench times only a sample. \
\"post µs\" is the mean time of the call that posts an op. An op that runs in the calling thread ends within \
this call and has no work requests (WRs). Merged pages share the WR of the page before them. The limit \
is one thread's memcpy between local regions, with the same sizes, total and order of pages. Its \
rounds alternate with the transfer's rounds, and both speeds are medians of rounds. If a side is on a GPU, \
the limit is one contiguous CUDA copy (cuMemcpyAsync and the wait for it) of the same number of bytes between \
two buffers of the same kinds; host memory is page-locked then. Verification compares every byte of the \
target, on the GPU if it is there: once before the rounds and, after overwriting the target, once after them.

A result over 100 % of the limit means that the backend copied with more than one thread. INT, TERM or a \
failure end a bench early; it prints what it measured until then.

With --fail-rail, the row also has the lost rail and what the other rails replayed. The first device of a transport \
cannot be lost, since a closed endpoint forgets messages of bench that it has acknowledged, nor one without others in its \
rail group. The peer's side of the rail is not touched: it fences what may still arrive.

The client has the memory of one side, and the server that of the other. --src is the source of the bytes: \
the client's side, except for reads.

Exit code: 0 if everything was measured, and verified unless --no-verify; 1 if not (stderr has the reason); 2 if \
the arguments are invalid; 128 plus the signal's number (130, 143) if a signal ended it.";

/// The exit codes of a measurement.
const EXIT: &str = "Exit code: 0 if everything was measured, 1 if not (stderr has the reason), 2 if the arguments are \
    invalid, 128 plus the signal's number (130, 143) if a signal ended it.";

/// The arguments of `multirail bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXIT, after_long_help = METHOD)]
pub struct BenchArguments {
    #[command(subcommand)]
    role: Option<BenchRole>,

    #[command(flatten)]
    measured: MeasureOptions,

    /// Run both sides in this process, without sockets
    #[arg(long)]
    in_process: bool,
}

#[derive(clap::Subcommand)]
enum BenchRole {
    /// Serve one client, then exit
    #[command(
        after_help = "Exit code: 0 if the client finished, 1 if not (stderr has the reason), 2 if the \
        arguments are invalid."
    )]
    Server(server::ServerArguments),
    /// Measure the gain of each step from one rail to lazy posting
    #[command(after_help = EXIT)]
    Ladder(ladder::LadderArguments),
    /// Measure against a server
    #[command(after_help = EXIT)]
    Client {
        /// The address that the server printed
        address: String,
        #[command(flatten)]
        measured: MeasureOptions,
    },
}

/// The options of a measurement.
#[derive(clap::Args, Clone)]
struct MeasureOptions {
    /// The operation
    #[arg(long, value_enum, default_value = "write-pages")]
    op: OpKind,

    /// Size of a page; for lists, of an entry
    #[arg(long, default_value = "64KiB", value_name = "SIZE", conflicts_with = "sweep")]
    size: Size,

    /// Number of pages, moved in random order; with 1 the same bytes stay in the cache
    /// [default: 1024, fewer if they exceed 64 MiB]
    #[arg(long, value_name = "COUNT")]
    pages: Option<u32>,

    /// Number of regions on each side, for write-list and read-list [default: 80, fewer if the
    /// runs and the other pages do not fill them]
    #[arg(long, value_name = "COUNT")]
    regions: Option<u32>,

    /// Share of the pages that lie in runs of 8 neighbours on both sides, from 0 to 1. Of the other pages, no two are
    /// neighbours on both sides. Only for operations that move all pages
    #[arg(long, default_value_t = 0.0, value_parser = units::share, value_name = "SHARE")]
    contiguous: f64,

    /// Source memory: host, host-pageable (no peer can map it), host-pinned (page-locked for GPUs)
    /// or gpu:N
    #[arg(long, default_value_t = BenchMemory::Host, value_name = "MEMORY")]
    src: BenchMemory,

    /// Destination memory: the same kinds
    #[arg(long, default_value_t = BenchMemory::Host, value_name = "MEMORY")]
    dst: BenchMemory,

    /// Number of GPU blocks that copy, in loopback [default: $MULTIRAIL_GPU_BLOCKS, or loopback's own]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpu_blocks: Option<u32>,

    /// Number of outstanding operations
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    inflight: u32,

    /// How long to measure each size
    #[arg(long, default_value = "2s", value_parser = units::duration, value_name = "TIME")]
    duration: Duration,

    /// Measure sizes from 8 B to 4 MiB
    #[arg(long)]
    sweep: bool,

    /// Lose the rail of this device, as in lo1@0.5: so many seconds after the measurement begins, bench closes the
    /// device's endpoint on this side as soon as requests are outstanding there. The other rails of its group replay
    /// them and go on. loopback then has four modelled cards, lo0 to lo3
    #[arg(long, value_name = "NAME@SECONDS")]
    fail_rail: Option<FailRail>,

    #[command(flatten)]
    observed: ObserveOptions,

    /// Also write a page with the results to this file: plots, this machine, findings of doctor; any browser shows it,
    /// without a network
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Do not compare the bytes that arrived
    #[arg(long)]
    no_verify: bool,

    /// Do not measure the limit; only the transfer runs
    #[arg(long)]
    no_limit: bool,

    /// Allow the measured bytes these paths alone: rdma, gpu-copy, memory-copy, sockets, staged or coalesced, with commas between them
    /// [default: $MULTIRAIL_PATHS, or all]
    #[arg(long, value_name = "PATHS")]
    path: Option<Paths>,

    /// Whether small pages share large work requests, through slots of both sides. A server that was started by
    /// hand needs MULTIRAIL_COALESCE=never, auto or always
    /// [default: $MULTIRAIL_COALESCE, or never]
    #[arg(long, value_name = "POLICY")]
    coalesce: Option<CoalescePolicy>,

    /// Tell the transport that neither side is in a CPU cache
    #[arg(long)]
    cold: bool,
}

impl BenchArguments {
    /// Returns true for the ladder, which opens its own devices.
    pub fn is_ladder(&self) -> bool {
        matches!(self.role, Some(BenchRole::Ladder(_)))
    }
}

impl MeasureOptions {
    /// Applies settings that fabrics read when they are opened.
    fn apply_settings(&self) {
        if let Some(blocks) = self.gpu_blocks {
            memory::set_gpu_blocks(blocks);
        }
        if let Some(policy) = self.coalesce {
            memory::set_coalescing(policy);
        }
    }

    /// Opens the fabric of the client, and what is to fail in it.
    fn open(&self, common: &Common) -> CommandResult<(Fabric, Option<Arc<RailFailure>>)> {
        match &self.fail_rail {
            None => Ok((common.open_observed(&self.observed)?, None)),
            Some(rail) if rail.after >= self.duration => Err(CommandFailure::Invalid(format!(
                "--fail-rail {}@{}: the measurement takes {} s; give fewer seconds or a longer --duration",
                rail.device,
                rail.after.as_secs_f64(),
                self.duration.as_secs_f64()
            ))),
            Some(rail) => {
                let (fabric, failure) = failing::open(common, rail, &self.observed)?;
                Ok((fabric, Some(failure)))
            }
        }
    }

    fn loads(&self) -> CommandResult<Vec<BenchLoad>> {
        let sizes = if self.sweep { SWEEP.to_vec() } else { vec![self.size.0] };
        let loads = sizes.into_iter().enumerate().map(|(at, size)| {
            let default_pages = (DEFAULT_TOTAL / size.max(1)).clamp(1, u64::from(DEFAULT_PAGES)) as u32;
            let pages = self.pages.unwrap_or(default_pages);
            let runs = self.runs(pages)?;
            let most_regions = if self.op.is_list() { DEFAULT_REGIONS } else { 1 };
            let default_regions = BenchLoad::units(pages, runs).clamp(1, most_regions);
            let load = BenchLoad {
                kind: self.op,
                size,
                pages,
                regions: self.regions.unwrap_or(default_regions),
                runs,
                inflight: self.inflight,
                seed: fastrand::u64(..),
                imm: at as u32,
                src: self.src,
                dst: self.dst,
            };
            load.check().map_err(CommandFailure::Invalid)?;
            Ok(load)
        });
        loads.collect()
    }

    /// The number of runs that hold the contiguous share of `pages`.
    fn runs(&self, pages: u32) -> CommandResult<u32> {
        let (share, run) = (self.contiguous, BenchLoad::RUN);
        // The addend outweighs the rounding of shares like 0.3.
        let runs = (f64::from(pages) * share / f64::from(run) + 1e-6) as u32;
        match runs.min(pages / run) {
            0 if share > 0.0 => Err(CommandFailure::Invalid(format!(
                "--contiguous {share} of {pages} pages is less than a run of {run} pages; use more --pages or remove --contiguous"
            ))),
            runs => Ok(runs),
        }
    }
}

/// Runs the given side, or both.
pub fn run(common: &Common, arguments: BenchArguments) -> CommandResult {
    match arguments.role {
        Some(BenchRole::Server(server)) => server::run(common, &server),
        Some(BenchRole::Client { address, measured }) => {
            measured.apply_settings();
            let loads = measured.loads()?;
            let (fabric, failure) = measured.open(common)?;
            let report = report(common, &measured, &loads, &[&fabric])?;
            report.end(measure_at(common, (&fabric, failure), &address, &measured, &loads, &report))
        }
        Some(BenchRole::Ladder(ladder)) => ladder::run(common, &ladder),
        None if arguments.in_process => in_process(common, &arguments.measured),
        None => two_processes(common, &arguments.measured),
    }
}

fn two_processes(common: &Common, measured: &MeasureOptions) -> CommandResult {
    measured.apply_settings();
    let loads = measured.loads()?;
    let (fabric, failure) = measured.open(common)?;
    let report = report(common, measured, &loads, &[&fabric])?;
    let done = spawn::ServerProcess::start(common).and_then(|mut server| {
        let address = server.address().to_owned();
        match measure_at(common, (&fabric, failure), &address, measured, &loads, &report) {
            Ok(()) => server.finish(),
            Err(failure) => Err(server.explain(failure)),
        }
    });
    report.end(done)
}

fn in_process(common: &Common, measured: &MeasureOptions) -> CommandResult {
    measured.apply_settings();
    let loads = measured.loads()?;
    let ((here, failure), there) = (measured.open(common)?, common.open()?);
    let (peer, origin) = here.connect_local(&there)?;
    let report = report(common, measured, &loads, &[&here, &there])?;
    let ours = origin.clone();
    let target = std::thread::spawn(move || server::serve_one(&there, &ours, |_| Ok(())));
    let client = Client::connect(&here, &peer, failure);
    let done = client.and_then(|client| measure(client, measured, &loads, &report));
    if done.is_err() {
        // The client sends no end message now, so the server must not wait for one.
        origin.disconnect();
    }
    let served = target.join().unwrap_or_else(|_| Err(CommandFailure::new("the server's thread panicked")));
    report.end(done.and(served))
}

/// A report that ends early after a signal to this process. The first fabric is that of the client.
fn report(
    common: &Common,
    measured: &MeasureOptions,
    loads: &[BenchLoad],
    fabrics: &[&Fabric],
) -> CommandResult<Arc<RowReport<BenchRow>>> {
    let report = RowReport::new(common.json, loads.len(), "sizes", BenchRow::print);
    if let (Some(path), Some(fabric)) = (&measured.report, fabrics.first()) {
        let page = ResultPage::begin(common, path, fabric)?;
        report.at_end(move |rows, failure| page.finish(rows, failure));
    }
    report.take_signals(fabrics.iter().map(|fabric| fabric.downgrade()).collect())?;
    Ok(report)
}

fn measure_at(
    common: &Common,
    (fabric, failure): (&Fabric, Option<Arc<RailFailure>>),
    address: &str,
    measured: &MeasureOptions,
    loads: &[BenchLoad],
    report: &RowReport<BenchRow>,
) -> CommandResult {
    let peer = super::connection::connect(fabric, address)?;
    let client = Client::connect(fabric, &peer, failure);
    let done = client.and_then(|client| measure(client, measured, loads, report));
    done.inspect_err(|_| {
        if !report.is_interrupted() {
            common.dumps.after_failure(fabric);
        }
    })
}

/// Measures every load until a signal arrives.
fn measure(
    mut client: Client<'_>,
    measured: &MeasureOptions,
    loads: &[BenchLoad],
    report: &RowReport<BenchRow>,
) -> CommandResult {
    for load in loads {
        if report.is_interrupted() {
            break;
        }
        if load.kind == OpKind::Send && measured.sweep && load.size > client.max_message() {
            super::output::print_error(&format!(
                "{} and larger: skipped, they exceed the largest message",
                Size(load.size)
            ));
            break;
        }
        client.measure(load, measured, report)?;
    }
    client.finish()
}
