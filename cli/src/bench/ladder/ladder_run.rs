//! The measurement of a rung: paged writes between two fabrics of this process.

use std::collections::VecDeque;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::spi::{Backend, DeviceInfo};
use multirail::{Access, Fabric, FabricBuilder, Op, Pages, Peer, Region, RemoteRegion, TransportConfig};

use super::rung::Rung;
use crate::failure::{CommandFailure, CommandResult};
use crate::program;
use crate::simulate::shuffled_pages;

/// The number of pages of an operation.
const PAGES: u32 = 1024;
/// The number of outstanding operations per rail group, so that an engine always has requests to post.
const INFLIGHT: usize = 4;
/// The limit of an operation.
const LIMIT: Duration = Duration::from_secs(30);

/// Two connected fabrics with the settings of a rung.
pub struct LadderRun {
    fabric: Fabric,
    _target: (Fabric, Region),
    peer: Peer,
    source: Region,
    landing: RemoteRegion,
    pages: [Pages; 2],
    page: usize,
    inflight: usize,
}

/// The devices of both fabrics.
pub struct LadderDevices {
    pub backend: Arc<dyn Backend>,
    pub devices: Vec<DeviceInfo>,
}

impl LadderRun {
    /// Opens `devices` on both sides, or only the first of them if the rung has one rail.
    pub fn open(
        devices: &LadderDevices,
        rung: &Rung,
        page: usize,
        open: impl Fn(FabricBuilder) -> FabricBuilder,
    ) -> CommandResult<Self> {
        let used = if rung.all_rails { &devices.devices[..] } else { &devices.devices[..1] };
        let transport = TransportConfig::new("ladder", Arc::clone(&devices.backend)).devices(used.to_vec());
        let builder = || FabricBuilder::new().transport(transport.clone()).flight_recorder(0);
        let (fabric, target) = (open(builder()).open()?, open(builder()).open()?);
        let (peer, _) = fabric.connect_local(&target)?;
        let bytes = PAGES as usize * page;
        let source = fabric.alloc(bytes, Access::LOCAL)?;
        let target_region = target.alloc(bytes, Access::REMOTE_WRITE)?;
        let landing = peer.import(&target_region.descriptor())?;
        let mut random = fastrand::Rng::with_seed(1);
        let pages = [shuffled_pages(PAGES, &mut random), shuffled_pages(PAGES, &mut random)];
        let groups: usize = fabric.transports().iter().map(|transport| transport.groups.len()).sum();
        let inflight = INFLIGHT * groups;
        let ladder_run =
            Self { fabric, _target: (target, target_region), peer, source, landing, pages, page, inflight };
        if rung.warm {
            (0..groups).try_for_each(|_| ladder_run.run(1).map(drop))?;
        }
        Ok(ladder_run)
    }

    fn post(&self) -> CommandResult<Op> {
        let [from, to] = &self.pages;
        Ok(self.peer.write_pages(&self.source, from, &self.landing, to, self.page)?)
    }

    /// Moves all pages `times` times. Returns the number of work requests.
    pub fn run(&self, times: u64) -> CommandResult<u64> {
        let mut left = 0..times;
        self.run_while(|| left.next().is_some())
    }

    /// Runs for `span`, or until `ends` returns true. Returns the number of work requests and the time.
    pub fn run_for(&self, span: Duration, ends: impl Fn() -> bool) -> CommandResult<(u64, Duration)> {
        let begun = Instant::now();
        Ok((self.run_while(|| begun.elapsed() < span && !ends())?, begun.elapsed()))
    }

    /// Posts operations while `more` returns true, then waits for the rest.
    fn run_while(&self, mut more: impl FnMut() -> bool) -> CommandResult<u64> {
        let before = self.requests();
        let mut flight = VecDeque::with_capacity(self.inflight);
        while more() {
            if flight.len() == self.inflight {
                flight.pop_front().map_or(Ok(()), finish)?;
            }
            flight.push_back(self.post()?);
        }
        flight.into_iter().try_for_each(finish)?;
        Ok(self.requests() - before)
    }

    fn requests(&self) -> u64 {
        self.fabric.counters().iter().map(|rail| rail.completions).sum()
    }
}

fn finish(mut op: Op) -> CommandResult {
    op.wait(LIMIT).map(drop).map_err(CommandFailure::from)
}

/// The operations of the two counted runs. Their difference does not include the start of the program.
const FEW: u64 = 4;
const MANY: u64 = 24;

/// Counts the instructions per work request of rung `number` on null devices, with valgrind in another run of this
/// program. The caller drives the engine in that run, because valgrind would count polling threads too.
pub fn instructions(number: usize, options: &[String]) -> CommandResult<f64> {
    let (few, many) = (run(number, FEW, options)?, run(number, MANY, options)?);
    let requests = many.0.saturating_sub(few.0).max(1);
    Ok(many.1.saturating_sub(few.1) as f64 / requests as f64)
}

/// The work requests and instructions of a run.
fn run(number: usize, operations: u64, options: &[String]) -> CommandResult<(u64, u64)> {
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .args(program::words()?)
        .args(["bench", "ladder", "--counted", &format!("{number}:{operations}")])
        .args(options)
        .output()
        .map_err(|e| {
            CommandFailure::new(format!("cannot run valgrind ({e}); install it, or remove --instructions"))
        })?;
    let stderr = String::from_utf8_lossy(&run.stderr);
    let collected = stderr.lines().find_map(|line| line.split("Collected :").nth(1));
    let instructions = collected.and_then(|number| number.trim().parse().ok());
    let requests = String::from_utf8_lossy(&run.stdout).trim().parse().ok();
    match (requests, instructions) {
        (Some(requests), Some(instructions)) if run.status.success() => Ok((requests, instructions)),
        _ => Err(CommandFailure::new(format!(
            "valgrind printed no count: {}",
            stderr.lines().last().unwrap_or("")
        ))),
    }
}

/// Runs the counted operations and prints the number of work requests.
pub fn counted(
    devices: &LadderDevices,
    rung: &Rung,
    batch: usize,
    page: usize,
    operations: u64,
) -> CommandResult {
    let workers = rung.workers(batch, &[]);
    let ladder_run =
        LadderRun::open(devices, rung, page, |builder| builder.workers(workers.clone()).caller_driven())?;
    let requests = ladder_run.run(operations)?;
    crate::output::line(&requests.to_string())
}

/// Parses `NUMBER:OPERATIONS` of a counted run.
pub fn parse(text: &str) -> Result<(usize, u64), String> {
    let parsed = text
        .split_once(':')
        .and_then(|(rung, operations)| Some((rung.parse().ok()?, operations.parse().ok()?)));
    parsed.ok_or_else(|| "give the number of a rung and of operations, such as 0:24".to_owned())
}
