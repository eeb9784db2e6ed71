//! The suite against EFA devices, real ones or the simulated ones of `ci/efa-sim/run`: with 1, 4 and 32 rails, as far
//! as the machine has so many devices. And with one rail and all small pages coalesced.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use backend_efa::{Efa, EfaConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant, devices};
use staging::{Staged, StagingPolicy};
use transport_core::spi::{Backend, Operations};
use transport_core::{CoalescePolicy, FabricBuilder, TransportConfig, TransportInfo};

/// The numbers of rails to run with.
const RAILS: [u32; 3] = [1, 4, 32];

struct SimulatedEfa {
    name: String,
    backend: Arc<dyn Backend>,
    rails: u32,
    /// True if the provider emulates writes. The first trial that depends on it opens a device to find out; all numbers
    /// of rails share the answer.
    emulates_writes: Arc<OnceLock<bool>>,
}

/// Skipped trials, with the reason.
const NOT_ON_CARDS: [(&str, &str); 6] = [
    // `efa_domain.c`: the domains of a process take the device's one ibv_pd.
    ("tenant::a_stolen_descriptor_over_sockets", ONE_PD),
    ("cleanup::any_executor_and_thread", SAME_PROCESS),
    ("grant::crosses_the_control_connection", SAME_PROCESS),
    ("tenant::one_listener_and_no_names_in_common", SAME_PROCESS),
    ("close::meanwhile_submitted_ends", SAME_PROCESS),
    ("reconnect::left_unread", BY_ADDRESS),
];
/// The trial that efa-direct (2.1, `efa_base_ep.c`) cannot run.
const NOT_ON_DIRECT: (&str, &str) = (
    "revoke::takes_a_receive_back",
    "efa-direct cannot cancel a posted receive, and a device has one registration for both sides",
);
const BY_ADDRESS: &str = "the provider knows a sender by its address, and a new connection has the same address; an unread message may crash 1.17";
const ONE_PD: &str =
    "the provider has one protection domain per device, so tenants of one process share its keys";
/// Skipped trials on a provider that emulates writes, with the reason.
const NOT_EMULATED: [(&str, &str); 7] = [
    // libfabric 1.17 (`rxr_pkt_type_req.c`): the target drops packets with a wrong key, sends no answer, and crashes
    // when more packets of the same write arrive.
    ("cross_process::revoked_under_fire", NO_REFUSAL),
    ("forgery::amid_others", NO_REFUSAL),
    ("cleanup::dropped_memory_is_released", NO_REFUSAL),
    (
        "reconnect::at_once",
        "libfabric 1.17 crashes or hangs if an address is removed while a write from it is half received",
    ),
    ("cleanup::closing_drains", NO_CLOSE),
    ("cleanup::dropping_drains", NO_CLOSE),
    (
        "frozen::others_go_on",
        "libfabric 1.17 waits for a peer's answer to an emulated write even if the peer is dead",
    ),
];
const NO_REFUSAL: &str = "libfabric 1.17 emulates writes and cannot refuse a wrong key";
const NO_CLOSE: &str = "libfabric 1.17 cannot close an endpoint whose emulated writes do not end: the endpoint stays open, \
                            and bytes that the target has received land later";
const SAME_PROCESS: &str = "EFA devices do not reach themselves; peers in one process use loopback";

impl BackendUnderTest for SimulatedEfa {
    fn name(&self) -> &str {
        &self.name
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
        if let Some((_, why)) = NOT_EMULATED.iter().find(|(name, _)| *name == trial)
            && *self.emulates_writes.get_or_init(|| emulates_writes(&self.backend))
        {
            return Some(why);
        }
        if trial == NOT_ON_DIRECT.0 && self.name.starts_with("efa-direct") {
            return Some(NOT_ON_DIRECT.1);
        }
        NOT_ON_CARDS.iter().find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        let mut devices = devices(&*self.backend, shape.rails)?;
        devices.truncate(shape.rails as usize);
        Ok(TransportConfig::new(label, self.backend.clone()).devices(devices))
    }
}

/// Opens a device to find out whether the provider emulates writes.
fn emulates_writes(backend: &Arc<dyn Backend>) -> bool {
    let devices: Vec<_> = backend.probe().into_iter().flatten().take(1).collect();
    let transport = TransportConfig::new("probe", backend.clone()).devices(devices);
    let writes = |info: &TransportInfo| info.capabilities.emulated.contains(Operations::WRITE);
    let opened = FabricBuilder::new().transport(transport).caller_driven().open();
    opened.is_ok_and(|fabric| fabric.transports().iter().any(writes))
}

fn main() -> ExitCode {
    let mut backends: Vec<Arc<dyn BackendUnderTest>> = Vec::new();
    for provider in ["efa", "efa-direct"] {
        let backend: Arc<dyn Backend> = Arc::new(Efa::with(EfaConfig::default().provider(provider)));
        match backend.probe() {
            // Standard output is for the helpers' responses.
            Err(why) => eprintln!("skipped: {provider}: {}", why.reason),
            Ok(devices) => {
                let emulates_writes = Arc::<OnceLock<bool>>::default();
                for rails in RAILS.into_iter().filter(|rails| *rails as usize <= devices.len()) {
                    let name = format!("{provider}-x{rails}");
                    let (backend, emulates_writes) = (backend.clone(), emulates_writes.clone());
                    backends.push(Arc::new(SimulatedEfa { name, backend, rails, emulates_writes }));
                }
                let name = format!("{provider}-coalesced");
                let backend = Staged::new(backend, StagingPolicy::Never).coalescing(CoalescePolicy::Always);
                let backend = Arc::new(backend);
                backends.push(Arc::new(SimulatedEfa { name, backend, rails: 1, emulates_writes }));
            }
        }
    }
    multirail_conformance::main(backends)
}
