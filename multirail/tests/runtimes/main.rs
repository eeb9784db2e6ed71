//! Every public future on every kind of executor, and without one.
//!
//! `scenario` awaits each future of the library once. `executors` runs it on many executors,
//! among them the one in `strict`, which shows lost wakeups. `blocking` uses no executor, and
//! `lossless` drops waits before they complete. The compiler checks `sendable`. `select` and
//! `flood` show that no late byte of a dropped operation lands, and `between` shows it between
//! two processes. It also shows that a blocked runtime loses no peer. `child` is the other process.
//! This file opens fabrics on loopback, plain or with a link model on which every request is late, and
//! makes pages with an expected content.

mod between;
mod blocking;
mod child;
mod executors;
mod flood;
mod lossless;
mod scenario;
mod select;
mod sendable;
mod strict;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::{Access, Fabric, FabricBuilder, Peer, Region, RemoteRegion, Result, TransportConfig};

/// The limit of waits, also on a loaded machine.
pub(crate) const LIMIT: Duration = limit::HANG;

/// On a late link a request arrives after this time, or up to twice this time, in any order.
const LATENCY: Duration = Duration::from_millis(2);

/// The devices of a fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestDevices {
    /// Copies at once, with small operations in the calling thread.
    Plain,
    /// Every operation is pending for a while.
    Late,
}

impl TestDevices {
    /// Both kinds.
    pub(crate) const ALL: [Self; 2] = [Self::Plain, Self::Late];

    /// Opens a fabric with default settings.
    pub(crate) fn open(self, seed: u64) -> Result<Fabric> {
        self.builder(seed).open()
    }

    /// A builder with default settings.
    pub(crate) fn builder(self, seed: u64) -> FabricBuilder {
        let link = LinkModel { reorder: true, latency: LATENCY, jitter: LATENCY, ..LinkModel::default() };
        let config = match self {
            Self::Plain => LoopbackConfig::default(),
            Self::Late => LoopbackConfig::default().link(link),
        };
        let loopback = Arc::new(Loopback::with(config));
        FabricBuilder::new().transport(TransportConfig::new("loopback", loopback)).seed(seed)
    }
}

/// Awaits `future` with a limit. The limit does not make it poll more often.
///
/// # Panics
/// After the limit: the future never completes, or a wakeup was lost.
pub(crate) async fn limited<T>(future: impl Future<Output = T>) -> T {
    let late = async {
        smol::Timer::after(LIMIT).await;
        panic!("the future did not complete within {LIMIT:?}")
    };
    // The limit is polled first, so that its own wakeup cannot replace a lost one.
    smol::future::or(late, future).await
}

/// Waits until every earlier request to `peer` has arrived, if it still can: each probe takes one latency, and no
/// request takes more than two.
pub(crate) async fn outlast(peer: &Peer, from: &Region, probe: &RemoteRegion) -> Result<()> {
    for _ in 0..3 {
        peer.write(from, 0..64, probe, 0)?.await?;
    }
    Ok(())
}

/// The size of a page in bytes.
pub(crate) const PAGE: usize = 64 << 10;

/// A region that its owner fills and checks as a whole.
pub(crate) struct TestPage {
    pub(crate) region: Region,
    seed: u64,
}

impl TestPage {
    /// A page with the content of `seed`.
    pub(crate) fn new(fabric: &Fabric, access: Access, seed: u64) -> Result<Self> {
        let region = fabric.alloc(PAGE, access)?;
        let mut page = Self { region, seed };
        page.fill(seed)?;
        Ok(page)
    }

    /// Fills the page with the content of `seed`, as its owner.
    pub(crate) fn fill(&mut self, seed: u64) -> Result<()> {
        self.seed = seed;
        self.region.copy_in(0, &content(seed))
    }

    /// The number of bytes that differ from the expected content.
    pub(crate) fn wrong_bytes(&self) -> usize {
        differing(&self.region, self.seed)
    }
}

/// The number of bytes of `region` that differ from the content of `seed`.
pub(crate) fn differing(region: &Region, seed: u64) -> usize {
    let mut actual = vec![0; PAGE];
    region.copy_out(0, &mut actual).expect("a page");
    actual.iter().zip(content(seed)).filter(|(got, want)| *got != want).count()
}

fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
