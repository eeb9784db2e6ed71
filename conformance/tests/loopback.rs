//! The suite against loopback: with one, two and four devices, and with one device that always stages peers' memory.

mod link;

use std::process::ExitCode;
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig, StagingPolicy};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant};
use transport_core::TransportConfig;

/// Trials that are skipped where all memory is staged.
const NOT_STAGED: [&str; 3] =
    ["futures::wait_drives", "futures::any_wait_drives", "groups::another_transports_grant_is_not_used"];

const TARGET_IDLE: &str = "the target has to run turns to move staged bytes, and this trial runs none";

struct LoopbackDevices {
    rails: u32,
    /// `None` for the default.
    staging: Option<StagingPolicy>,
    name: String,
}

impl BackendUnderTest for LoopbackDevices {
    fn name(&self) -> &str {
        &self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    fn runs_tag(&self, tag: TrialTag) -> bool {
        // Between processes, four rails behave like two.
        tag == TrialTag::Virtual || self.rails <= 2
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        (self.staging == Some(StagingPolicy::Always) && NOT_STAGED.contains(&trial)).then_some(TARGET_IDLE)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        let config = LoopbackConfig::default().devices(shape.rails);
        let config = self.staging.into_iter().fold(config, LoopbackConfig::staging);
        let config = match shape.variant {
            Variant::Plain => config,
            Variant::Late if self.staging == Some(StagingPolicy::Always) => {
                return Err("the target copies staged bytes, so they are visible at their completion".into());
            }
            variant => config.link(link::of(variant)),
        };
        Ok(TransportConfig::new(label, Arc::new(Loopback::with(config))))
    }
}

fn main() -> ExitCode {
    let under_test = |rails, staging, name: &str| {
        Arc::new(LoopbackDevices { rails, staging, name: name.into() }) as Arc<dyn BackendUnderTest>
    };
    multirail_conformance::main(vec![
        under_test(1, None, "loopback-x1"),
        under_test(2, None, "loopback-x2"),
        under_test(4, None, "loopback-x4"),
        under_test(1, Some(StagingPolicy::Always), "loopback-staged"),
    ])
}
