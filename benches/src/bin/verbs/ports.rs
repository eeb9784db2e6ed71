//! The ports of both sides.

use backend_verbs::{Verbs, VerbsConfig};
use benches::BenchResult;
use benches::ends::{BenchDevices, transport};
use benches::side::ProcessRole;
use transport_core::TransportConfig;

/// A port for each side, as libibverbs calls them.
#[derive(clap::Args, Clone)]
pub struct Ports {
    /// The writer's and the target's.
    #[arg(long, value_delimiter = ',', default_values_t = ["rxe0".to_owned(), "rxe1".to_owned()])]
    pub devices: Vec<String>,
    /// The GID of both, by its index.
    #[arg(long, default_value_t = 1)]
    pub gid: u8,
}

impl Ports {
    /// A side's.
    pub fn of(&self, side: ProcessRole) -> BenchResult<&str> {
        let device = self.devices.get(side as usize).map(String::as_str);
        Ok(device.ok_or("--devices is two names: the writer's and the target's")?)
    }
}

impl BenchDevices for Ports {
    const PINS: bool = false;

    fn transport(&self, side: ProcessRole) -> BenchResult<TransportConfig> {
        let config = VerbsConfig::default().queue_pairs(1).gid_index(self.gid);
        transport(Verbs::with(config), Some(self.of(side)?))
    }

    fn arguments(&self) -> Vec<String> {
        let gid = self.gid.to_string();
        ["--devices", &self.devices.join(","), "--gid", &gid].map(str::to_owned).into()
    }
}
