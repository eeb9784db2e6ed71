//! Soak test: random work between two processes for a long time. It checks every byte and prints RSS and descriptors of
//! both processes.
//!
//! ```console
//! $ cargo test --profile checked -p multirail-conformance --test soak -- --backend efa --provider tcp --minutes 10 --seed 1
//! $ cards=$(ci/test-program soak); ci/efa-sim/run "$cards" --backend efa --provider efa --minutes 10
//! ```
//!
//! Without `--minutes`, as in a run of all tests, the program does nothing.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::{Loopback, LoopbackConfig};
use backend_verbs::Verbs;
use multirail_conformance::{
    BackendUnderTest, SoakConfig, TransportShape, TrialTag, devices, is_helper, soak,
};
use transport_core::TransportConfig;
use transport_core::spi::Backend;

/// `loopback`, `verbs` or `efa/PROVIDER`. A helper process gets this name only.
struct Any(String);

impl BackendUnderTest for Any {
    fn name(&self) -> &str {
        &self.0
    }

    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Process
    }

    fn transport(&self, label: &str, _: TransportShape) -> Result<TransportConfig, String> {
        let backend: Arc<dyn Backend> = match self.0.split_once('/') {
            Some(("efa", provider)) => {
                let config = EfaConfig::default().provider(provider);
                let uses_sockets =
                    ["tcp", "udp", "sockets", "net"].iter().any(|kind| provider.starts_with(kind));
                Arc::new(Efa::with(if uses_sockets { config.node("127.0.0.1") } else { config }))
            }
            None if self.0 == "loopback" => Arc::new(Loopback::with(LoopbackConfig::default())),
            None if self.0 == "verbs" => Arc::new(Verbs::new()),
            _ => return Err(format!("unknown backend {}: use loopback, verbs or efa", self.0)),
        };
        let devices = devices(&*backend, 1)?;
        Ok(TransportConfig::new(label, backend).devices(devices))
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| words.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
    let number = |name: &str, or: f64| value(name).map_or(Some(or), |text| text.parse().ok());
    if is_helper() {
        // The helper uses the backend of its parent.
        let name = std::env::var("MULTIRAIL_HELPER_BACKEND").unwrap_or_default();
        return soak(Arc::new(Any(name)), &SoakConfig { span: Duration::ZERO, seed: 0, without: Vec::new() });
    }
    let (Some(minutes), Some(seed)) = (number("--minutes", 0.0), number("--seed", 1.0)) else {
        eprintln!("soak: --minutes and --seed need a number");
        return ExitCode::from(2);
    };
    if minutes <= 0.0 {
        println!(
            "skipped: soak: no duration given; use --minutes 10 [--backend efa --provider tcp] [--seed 1] [--without revoke,...]"
        );
        return ExitCode::SUCCESS;
    }
    let backend = value("--backend").unwrap_or_else(|| "loopback".into());
    let name = match backend.as_str() {
        "efa" => format!("efa/{}", value("--provider").unwrap_or_else(|| "efa".into())),
        _ => backend,
    };
    let without = value("--without").unwrap_or_default().split(',').map(String::from).collect();
    let config = SoakConfig { span: Duration::from_secs_f64(minutes * 60.0), seed: seed as u64, without };
    soak(Arc::new(Any(name)), &config)
}
