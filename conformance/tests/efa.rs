//! The suite against libfabric's providers that need no device, between processes, with one and with four domains.

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant, devices};
use transport_core::TransportConfig;

struct EfaProvider {
    name: String,
    provider: &'static str,
    rails: u32,
}

/// Trials that shm cannot run, with the reason.
const NOT_ON_SHM: [(&str, &str); 9] = [
    // libfabric 1.17 and 2.1: the target's `smr_progress_cmd_rma` returns without an answer if it does not know the
    // key, and the initiator's later requests wait behind this one.
    ("tenant::a_stolen_descriptor_over_sockets", NO_ANSWER),
    ("cross_process::revoked_under_fire", NO_ANSWER),
    ("forgery::amid_others", NO_ANSWER),
    // `smr_progress_resp` waits for the head of the queue of answers.
    ("frozen::others_go_on", IN_ORDER),
    // libfabric would crash, so the backend refuses this.
    ("cleanup::any_executor_and_thread", SAME_PROCESS),
    ("grant::crosses_the_control_connection", SAME_PROCESS),
    ("tenant::one_listener_and_no_names_in_common", SAME_PROCESS),
    ("close::meanwhile_submitted_ends", SAME_PROCESS),
    ("peers::pages_over_two_connections", SAME_PROCESS),
];
/// The trial that tcp cannot run: `xnet_progress` and `rxm_conn_close` cancel outstanding operations.
const NOT_ON_TCP: (&str, &str) =
    ("forgery::amid_others", "tcp closes the connection on a wrong key, and all outstanding operations fail");
/// The trial that rxm cannot run.
const NOT_ON_RXM: (&str, &str) = (
    "reconnect::left_unread",
    "2.1 crashes if an address is added after the sender of an unread message is gone",
);
const NO_ANSWER: &str = "shm never completes a request with a wrong key";
const IN_ORDER: &str =
    "shm reports completions in order: other peers' completions wait behind those of a stopped peer";
const SAME_PROCESS: &str = "shm reaches other processes only; peers in one process use loopback";

impl BackendUnderTest for EfaProvider {
    fn name(&self) -> &str {
        &self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    /// A virtual clock would pass deadlines before a socket has carried a byte.
    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Process
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        let skipped = match self.provider {
            "shm" => &NOT_ON_SHM[..],
            "tcp" => &[NOT_ON_TCP],
            _ => &[NOT_ON_TCP, NOT_ON_RXM],
        };
        skipped.iter().find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err(format!("libfabric cannot simulate {} devices", shape.variant.name()));
        }
        let config = EfaConfig::default().provider(self.provider).domains(shape.rails);
        // Sockets stay on this host. shm takes no addresses.
        let config = if self.provider == "shm" { config } else { config.node("127.0.0.1") };
        let backend = Efa::with(config);
        let devices = devices(&backend, shape.rails)?;
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

fn main() -> ExitCode {
    let under_test = |provider: &'static str, rails: u32| {
        let name = format!("{provider}-x{rails}");
        Arc::new(EfaProvider { name, provider, rails }) as Arc<dyn BackendUnderTest>
    };
    let backends = ["tcp", "tcp;ofi_rxm", "shm"]
        .into_iter()
        .flat_map(|provider| [under_test(provider, 1), under_test(provider, 4)]);
    multirail_conformance::main(backends.collect())
}
