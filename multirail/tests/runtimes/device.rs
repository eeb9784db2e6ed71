//! Fabrics on loopback, as it is or behind a link on which everything is late.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::{Fabric, FabricBuilder, Peer, Region, RemoteRegion, Result, TransportConfig};

/// Long enough for anything that must happen at all, on a loaded machine.
pub const LIMIT: Duration = limit::HANG;

/// On a late link, what is posted arrives after this, and up to twice this, in any order.
const LATENCY: Duration = Duration::from_millis(2);

/// What fabrics are opened on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Copies at once, small operations in the calling thread.
    Plain,
    /// Every operation is pending for a while.
    Late,
}

impl Device {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Late];

    /// A fabric of default settings.
    pub fn open(self, seed: u64) -> Result<Fabric> {
        self.builder(seed).open()
    }

    /// A builder of default settings.
    pub fn builder(self, seed: u64) -> FabricBuilder {
        let link = LinkModel { reorder: true, latency: LATENCY, jitter: LATENCY, ..LinkModel::default() };
        let config = match self {
            Self::Plain => LoopbackConfig::default(),
            Self::Late => LoopbackConfig::default().link(link),
        };
        let loopback = Arc::new(Loopback::with(config));
        FabricBuilder::new().transport(TransportConfig::new("loopback", loopback)).seed(seed)
    }
}

/// `future`, which must be over within the limit. It is polled no more often for that.
///
/// # Panics
/// If it is not: something waits for ever, or a wake-up was lost.
pub async fn limited<T>(future: impl Future<Output = T>) -> T {
    let late = async {
        smol::Timer::after(LIMIT).await;
        panic!("not over within {LIMIT:?}")
    };
    // The limit is looked at first, so that its own wake-up cannot stand in for a lost one.
    smol::future::or(late, future).await
}

/// Returns when all that was posted to `peer` before has arrived, if it still may:
/// each of these takes a latency, and nothing takes more than two.
pub async fn outlast(peer: &Peer, from: &Region, probe: &RemoteRegion) -> Result<()> {
    for _ in 0..3 {
        peer.write(from, 0..64, probe, 0)?.await?;
    }
    Ok(())
}
