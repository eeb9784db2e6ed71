//! The suite against EFA cards, real ones or those of `ci/efa-sim/run`: with one, with four and
//! with 32 rails, as far as there are so many.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use backend_efa::{Efa, EfaConfig};
use conformance::{Shape, Subject, Tag, Variant};
use transport_core::spi::{Backend, Operations};
use transport_core::{FabricBuilder, TransportConfig, TransportInfo};

/// Rails to run with.
const RAILS: [u32; 3] = [1, 4, 32];

struct Cards {
    name: String,
    backend: Arc<Efa>,
    rails: u32,
    /// Known once a trial depends on it, of all numbers of rails.
    emulates_writes: Arc<OnceLock<bool>>,
}

/// What the provider does not do, by trial.
const NOT_ON_CARDS: [(&str, &str); 6] = [
    // `efa_domain.c`: the domains of a process take the device's one ibv_pd.
    ("tenant::a_stolen_descriptor_over_sockets", ONE_PD),
    ("cleanup::any_executor_and_thread", ELSEWHERE),
    ("grant::crosses_the_control_connection", ELSEWHERE),
    ("tenant::one_listener_and_no_names_in_common", ELSEWHERE),
    ("close::meanwhile_submitted_ends", ELSEWHERE),
    ("again::left_unread", BY_ADDRESS),
];
/// Of efa-direct's (2.1, `efa_base_ep.c`).
const NOT_ON_DIRECT: (&str, &str) = (
    "revoke::takes_a_receive_back",
    "efa-direct gives no receive back, and a card has one registration for both sides",
);
const BY_ADDRESS: &str =
    "who sent something is known by its address, at which it is back; an unread message may crash 1.17";
const ONE_PD: &str = "the provider has one protection domain per card: tenants of a process share its keys";
/// What it does not where it emulates writes.
const NOT_EMULATED: [(&str, &str); 7] = [
    // Of 1.17 (`rxr_pkt_type_req.c`): the target drops what has a wrong key, answers nothing, and
    // crashes when more of the same write comes.
    ("crossing::revoked_under_fire", NO_REFUSAL),
    ("forgery::amid_others", NO_REFUSAL),
    ("cleanup::dropped_memory_is_released", NO_REFUSAL),
    (
        "again::at_once",
        "libfabric 1.17 crashes, or stands still, when an address goes while a write from there is half received",
    ),
    ("cleanup::closing_drains", NO_LAST_WORD),
    ("cleanup::dropping_drains", NO_LAST_WORD),
    ("frozen::others_go_on", "libfabric 1.17 waits for a peer's answer to an emulated write, dead or alive"),
];
const NO_REFUSAL: &str = "libfabric 1.17 emulates writes, and cannot refuse a wrong key";
const NO_LAST_WORD: &str = "libfabric 1.17 cannot close an endpoint whose emulated writes do not end: it is left open, and \
                            what their target has received lands later";
const ELSEWHERE: &str = "EFA cards do not reach themselves; peers of one process have loopback";

impl Subject for Cards {
    fn name(&self) -> &str {
        &self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    /// A clock that only the trial moves passes deadlines before a card has done anything.
    fn takes(&self, tag: Tag) -> bool {
        tag == Tag::Process
    }

    /// Cards are as they are.
    fn variants(&self, _: &[Variant]) -> Vec<Variant> {
        vec![Variant::Plain]
    }

    fn beside_the_point(&self, trial: &str) -> Option<&str> {
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

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        let mut devices = self.backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
        if devices.len() < shape.rails as usize {
            return Err(format!("there are {} cards, and {} are needed", devices.len(), shape.rails));
        }
        devices.truncate(shape.rails as usize);
        Ok(TransportConfig::new(label, self.backend.clone()).devices(devices))
    }
}

/// What is known of a card once it is open.
fn emulates_writes(backend: &Arc<Efa>) -> bool {
    let devices: Vec<_> = backend.probe().into_iter().flatten().take(1).collect();
    let transport = TransportConfig::new("probe", backend.clone()).devices(devices);
    let writes = |info: &TransportInfo| info.capabilities.emulated.contains(Operations::WRITE);
    let opened = FabricBuilder::new().transport(transport).caller_driven().open();
    opened.is_ok_and(|fabric| fabric.transports().iter().any(writes))
}

fn main() -> ExitCode {
    let mut subjects: Vec<Arc<dyn Subject>> = Vec::new();
    for provider in ["efa", "efa-direct"] {
        let backend = Arc::new(Efa::with(EfaConfig::default().provider(provider)));
        match backend.probe() {
            // Standard output is the helpers' way to answer.
            Err(why) => eprintln!("skipped: {provider}: {}", why.reason),
            Ok(devices) => {
                let emulates_writes = Arc::<OnceLock<bool>>::default();
                for rails in RAILS.into_iter().filter(|rails| *rails as usize <= devices.len()) {
                    let name = format!("{provider}-x{rails}");
                    let (backend, emulates_writes) = (backend.clone(), emulates_writes.clone());
                    subjects.push(Arc::new(Cards { name, backend, rails, emulates_writes }));
                }
            }
        }
    }
    conformance::main(subjects)
}
