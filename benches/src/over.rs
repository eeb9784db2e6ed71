//! What carries the bytes between two processes of this host.

use backend_efa::{Efa, EfaConfig};
use backend_loopback::Loopback;
use transport_core::TransportConfig;

use crate::BenchResult;
use crate::processes::transport;

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Over {
    /// Shared memory.
    Loopback,
    /// Libfabric's provider `tcp`, on 127.0.0.1.
    Tcp,
}

impl Over {
    /// A transport over all its devices.
    pub fn transport(self) -> BenchResult<TransportConfig> {
        match self {
            Self::Loopback => transport(Loopback::new(), None),
            Self::Tcp => transport(Efa::with(EfaConfig::default().provider("tcp").node("127.0.0.1")), None),
        }
    }
}
