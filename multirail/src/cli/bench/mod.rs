//! `multirail bench`: a transfer measured against the memcpy limit of the same run.

mod blocks;
mod client;
mod content;
mod ladder;
mod limit;
mod load;
mod mover;
mod place;
pub(super) mod protocol;
mod rails;
mod row;
mod sampler;
mod server;
mod spawn;
mod verification;

use std::time::Duration;

use multirail::Fabric;

use super::Common;
use super::failure::{Done, Failure};
use super::units::{self, Size};
use client::Client;
use load::{Kind, Load};
use place::Place;
use row::Row;

/// Sizes of `--sweep`.
const SWEEP: [u64; 11] =
    [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20];

/// Pages where none are asked for, and the bytes they may add up to then.
const DEFAULT_PAGES: u32 = 1024;
const DEFAULT_TOTAL: u64 = 64 << 20;

/// How the figures come about, told by `--help`.
const METHOD: &str = "\
Without a command, a second process is started and measured against.

An op is one page moved by write, write-imm, read or send; for write-pages it is one whole batch of \
--pages pages. Latency runs from post to done; of ops shorter than 2 µs one in many is timed. The limit \
is one thread's memcpy between two local regions, with the same sizes, total and order of pages, in \
rounds that alternate with the transfer's; both speeds are medians of rounds. Where a side is a GPU's, \
the limit is one contiguous copy by CUDA (cuMemcpyAsync, and the wait for it) of as many bytes between \
two other memories of these kinds; the host's is page-locked then. Verification compares every byte at \
the target, by the GPU where it is a GPU's, once before the rounds and, after overwriting it, once after them.

The client has one side's memory, the server the other's; --src is where the bytes come from: the \
client's side, except of reads.";

/// What to measure, and as which side.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_long_help = METHOD)]
pub struct BenchArguments {
    #[command(subcommand)]
    role: Option<Role>,

    #[command(flatten)]
    measured: Measured,

    /// Run both sides in this process, without sockets
    #[arg(long)]
    in_process: bool,
}

#[derive(clap::Subcommand)]
enum Role {
    /// Be the target of one client, then exit
    Server(server::ServerArguments),
    /// Measure what each step from one rail to lazy posting gains, one after another
    Ladder(ladder::LadderArguments),
    /// Measure against a server
    Client {
        /// The address the server printed
        address: String,
        #[command(flatten)]
        measured: Measured,
    },
}

/// What to measure.
#[derive(clap::Args, Clone)]
struct Measured {
    /// The operation
    #[arg(long, value_enum, default_value = "write-pages")]
    op: Kind,

    /// Bytes of a page
    #[arg(long, default_value = "64KiB", value_name = "SIZE", conflicts_with = "sweep")]
    size: Size,

    /// Pages, moved in shuffled order; 1 keeps the same bytes hot
    /// [default: 1024, fewer if they exceed 64 MiB]
    #[arg(long, value_name = "COUNT")]
    pages: Option<u32>,

    /// Where the bytes come from: host, host-pageable (no peer can map it), host-pinned
    /// (page-locked for GPUs) or gpu:N
    #[arg(long, default_value_t = Place::Host, value_name = "MEMORY")]
    src: Place,

    /// Where they go: the same
    #[arg(long, default_value_t = Place::Host, value_name = "MEMORY")]
    dst: Place,

    /// Blocks of a GPU that copy, in loopback [default: $MULTIRAIL_GPU_BLOCKS, or loopback's own]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpu_blocks: Option<u32>,

    /// Operations under way at once
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    inflight: u32,

    /// How long to measure each size
    #[arg(long, default_value = "2s", value_parser = units::duration, value_name = "TIME")]
    duration: Duration,

    /// Measure sizes from 8 B to 4 MiB
    #[arg(long)]
    sweep: bool,

    /// Do not compare the bytes that arrived
    #[arg(long)]
    no_verify: bool,

    /// Do not measure the limit: the transfer alone runs all the time
    #[arg(long)]
    no_limit: bool,

    /// Tell the transport that neither side is in a cache
    #[arg(long)]
    cold: bool,
}

impl Measured {
    /// Hands settings on to what is opened after this.
    fn settle(&self) {
        if let Some(blocks) = self.gpu_blocks {
            blocks::set(blocks);
        }
    }

    fn loads(&self) -> Done<Vec<Load>> {
        let sizes = if self.sweep { SWEEP.to_vec() } else { vec![self.size.0] };
        let loads = sizes.into_iter().enumerate().map(|(at, size)| {
            let affordable = (DEFAULT_TOTAL / size.max(1)).clamp(1, u64::from(DEFAULT_PAGES)) as u32;
            let load = Load {
                kind: self.op,
                size,
                pages: self.pages.unwrap_or(affordable),
                inflight: self.inflight,
                seed: fastrand::u64(..),
                imm: at as u32,
                src: self.src,
                dst: self.dst,
            };
            load.check().map_err(Failure::new)?;
            Ok(load)
        });
        loads.collect()
    }
}

/// Runs the role asked for, or both.
pub fn run(common: &Common, arguments: BenchArguments) -> Done {
    match arguments.role {
        Some(Role::Server(server)) => server::run(common, &server),
        Some(Role::Client { address, measured }) => {
            measured.settle();
            let loads = measured.loads()?;
            let fabric = common.open()?;
            measure_at(common, &fabric, &address, &measured, &loads)
        }
        Some(Role::Ladder(ladder)) => ladder::run(common, &ladder),
        None if arguments.in_process => in_process(common, &arguments.measured),
        None => two_processes(common, &arguments.measured),
    }
}

fn two_processes(common: &Common, measured: &Measured) -> Done {
    measured.settle();
    let loads = measured.loads()?;
    let fabric = common.open()?;
    let mut server = spawn::Server::start(common)?;
    let address = server.address().to_owned();
    match measure_at(common, &fabric, &address, measured, &loads) {
        Ok(()) => server.finish(),
        Err(failure) => Err(server.explain(failure)),
    }
}

fn in_process(common: &Common, measured: &Measured) -> Done {
    measured.settle();
    let loads = measured.loads()?;
    let (here, there) = (common.open()?, common.open()?);
    let (peer, origin) = here.connect_local(&there)?;
    let ours = origin.clone();
    let target = std::thread::spawn(move || server::serve_one(&there, &ours, |_| Ok(())));
    let done = Client::greet(&here, &peer).and_then(|client| measure(common, client, measured, &loads));
    if done.is_err() {
        // Nobody says goodbye to the server now: it must not wait for that.
        origin.disconnect();
    }
    let served = target.join().unwrap_or_else(|_| Err(Failure::new("the server's thread panicked")));
    done.and(served)
}

fn measure_at(common: &Common, fabric: &Fabric, address: &str, measured: &Measured, loads: &[Load]) -> Done {
    let peer = super::wait::connect(fabric, address)?;
    let done = Client::greet(fabric, &peer).and_then(|client| measure(common, client, measured, loads));
    done.inspect_err(|_| common.dumps.after_failure(fabric))
}

fn measure(common: &Common, mut client: Client<'_>, measured: &Measured, loads: &[Load]) -> Done {
    let mut rows = Vec::new();
    for load in loads {
        if load.kind == Kind::Send && measured.sweep && load.size > client.max_message() {
            super::output::complain(&format!(
                "{} and above: over the largest message, left out",
                Size(load.size)
            ));
            break;
        }
        let row = client.measure(load, measured)?;
        match common.json {
            true => super::output::json(&row)?,
            false => rows.push(row),
        }
    }
    client.leave()?;
    if rows.is_empty() { Ok(()) } else { Row::print(&rows) }
}
