//! What every rung is measured by: paged writes between two fabrics of this process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::spi::{Backend, DeviceInfo};
use multirail::{Access, Fabric, FabricBuilder, Op, Pages, Peer, Region, RemoteRegion, TransportConfig};

use super::rung::Rung;
use crate::failure::{CommandResult, Failure};
use crate::simulate::shuffled_pages;

/// Pages of one operation.
const PAGES: u32 = 1024;
/// Operations kept under way for each rail group: an engine always has something to post.
const INFLIGHT: usize = 4;
/// Longer than any operation takes.
const LIMIT: Duration = Duration::from_secs(30);

/// Two connected fabrics, one of them with a rung's switches.
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

/// What to open it with.
pub struct Devices {
    pub backend: Arc<dyn Backend>,
    pub devices: Vec<DeviceInfo>,
}

impl LadderRun {
    /// Opens `devices` (the first of them, if the rung has one rail) on both sides.
    pub fn open(
        devices: &Devices,
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

    /// Moves all pages `times` times; returns the work requests that took.
    pub fn run(&self, times: u64) -> CommandResult<u64> {
        let mut left = 0..times;
        self.run_while(|| left.next().is_some())
    }

    /// Runs for `span`, or until `ends` says so; returns the work requests and the time they took.
    pub fn run_for(&self, span: Duration, ends: impl Fn() -> bool) -> CommandResult<(u64, Duration)> {
        let begun = Instant::now();
        Ok((self.run_while(|| begun.elapsed() < span && !ends())?, begun.elapsed()))
    }

    /// Posts operations while `more` says so, then waits for the rest.
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
    op.wait(LIMIT).map(drop).map_err(Failure::from)
}
