//! libfabric's provider.

use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use benches::Done;
use benches::ends::{Place, transport};
use benches::side::Side;
use staging::{Staged, StagingPolicy};
use transport_core::TransportConfig;

/// Where both sides are: one provider's first device.
#[derive(clap::Args, Clone)]
pub struct Provider {
    /// tcp, shm, ...
    #[arg(long, default_value = "tcp")]
    pub provider: String,
    /// All memory is staged, as a GPU's is where a card refuses it.
    #[arg(long)]
    pub staged: bool,
}

impl Provider {
    /// By its name.
    pub fn of(name: &str) -> Self {
        Self { provider: name.to_owned(), staged: false }
    }

    /// The local address: sockets stay on this host; shm and cards have none.
    pub fn node(&self) -> Option<&'static str> {
        let has_none = matches!(self.provider.as_str(), "shm" | "efa" | "efa-direct");
        (!has_none).then_some("127.0.0.1")
    }
}

impl Place for Provider {
    const PINS: bool = true;

    fn transport(&self, _: Side) -> Done<TransportConfig> {
        let config = EfaConfig::default().provider(&self.provider);
        let inner = Efa::with(self.node().into_iter().fold(config, EfaConfig::node));
        if self.staged {
            return transport(Staged::new(Arc::new(inner), StagingPolicy::Always), None);
        }
        transport(inner, None)
    }

    fn arguments(&self) -> Vec<String> {
        let mut all = vec!["--provider".to_owned(), self.provider.clone()];
        all.extend(self.staged.then(|| "--staged".to_owned()));
        all
    }
}
