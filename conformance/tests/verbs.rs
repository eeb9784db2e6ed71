//! The suite against RDMA devices, real ones or the emulated ones of `ci/rdma-vm/run`.
//!
//! It runs between two devices, or one device and itself, with one and with four queue pairs per peer. It runs with two
//! devices as two rails, with three queue pairs on one side and two on the other. And it runs with all memory staged, and
//! with all small pages coalesced.

use std::process::ExitCode;
use std::sync::Arc;

use backend_verbs::{Verbs, VerbsConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant, devices};
use staging::{Staged, StagingPolicy};
use transport_core::spi::Backend;
use transport_core::{CoalescePolicy, TransportConfig};

struct VerbsDevices {
    name: &'static str,
    backend: Arc<dyn Backend>,
    rails: u32,
}

/// CPU time means nothing where every instruction is emulated.
const EMULATED: &str = "ci/rdma-vm emulates the CPU, so CPU time means nothing";

impl BackendUnderTest for VerbsDevices {
    fn name(&self) -> &str {
        self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    /// A virtual clock would pass deadlines before a device has done any work.
    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Process
    }

    /// Devices cannot simulate variants.
    fn variants(&self, _: &[Variant]) -> Vec<Variant> {
        vec![Variant::Plain]
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        let is_emulated = std::env::var_os("RDMA_VM").is_some();
        (is_emulated && trial == "cleanup::idle_costs_nothing").then_some(EMULATED)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        let mut devices = devices(&*self.backend, shape.rails)?;
        // A helper takes the devices that this process leaves.
        if multirail_conformance::is_helper() {
            devices.reverse();
        }
        devices.truncate(shape.rails as usize);
        Ok(TransportConfig::new(label, self.backend.clone()).devices(devices))
    }
}

fn main() -> ExitCode {
    let cards = |here, there| {
        let queue_pairs = if multirail_conformance::is_helper() { there } else { here };
        Arc::new(Verbs::with(VerbsConfig::default().queue_pairs(queue_pairs)))
    };
    let under_test = |name, backend: Arc<dyn Backend>, rails| {
        Arc::new(VerbsDevices { name, backend, rails }) as Arc<dyn BackendUnderTest>
    };
    let backends = match Verbs::new().probe() {
        Ok(_) => {
            vec![
                under_test("verbs-q1", cards(1, 1), 1),
                under_test("verbs-q4", cards(4, 4), 1),
                under_test("verbs-x2", cards(3, 2), 2),
                under_test("verbs-staged", Arc::new(Staged::new(cards(4, 4), StagingPolicy::Always)), 1),
                under_test(
                    "verbs-coalesced",
                    Arc::new(
                        Staged::new(cards(4, 4), StagingPolicy::Never).coalescing(CoalescePolicy::Always),
                    ),
                    1,
                ),
            ]
        }
        // Standard output is for the helpers' responses.
        Err(why) => {
            eprintln!("skipped: verbs: {}; {}", why.reason, why.remedy);
            Vec::new()
        }
    };
    multirail_conformance::main(backends)
}
