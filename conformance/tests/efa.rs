//! The suite against providers of libfabric that need no card, between processes, with one domain
//! and with four.

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use multirail_conformance::{BackendUnderTest, Shape, Tag, Variant};
use transport_core::TransportConfig;
use transport_core::spi::Backend;

struct Provider {
    name: String,
    provider: &'static str,
    rails: u32,
}

/// What shm does not do, by trial.
const NOT_ON_SHM: [(&str, &str); 8] = [
    // Of 1.17 and of 2.1: the target's `smr_progress_cmd_rma` leaves without an answer when it
    // does not know the key, and the initiator's later requests wait behind.
    ("tenant::a_stolen_descriptor_over_sockets", NO_ANSWER),
    ("cross_process::revoked_under_fire", NO_ANSWER),
    ("forgery::amid_others", NO_ANSWER),
    // `smr_progress_resp`: the head of the queue of answers is waited for.
    ("frozen::others_go_on", IN_ORDER),
    // Libfabric would crash: the backend refuses it.
    ("cleanup::any_executor_and_thread", ELSEWHERE),
    ("grant::crosses_the_control_connection", ELSEWHERE),
    ("tenant::one_listener_and_no_names_in_common", ELSEWHERE),
    ("close::meanwhile_submitted_ends", ELSEWHERE),
];
/// Of tcp's: `xnet_progress` and `rxm_conn_close` cancel what is under way.
const NOT_ON_TCP: (&str, &str) =
    ("forgery::amid_others", "tcp closes the connection on a wrong key, and what is under way ends with it");
/// Of rxm's.
const NOT_ON_RXM: (&str, &str) = (
    "reconnect::left_unread",
    "2.1 crashes when it is told of another address once the sender of an unread message is gone",
);
const NO_ANSWER: &str = "shm never completes a request with a wrong key";
const IN_ORDER: &str = "shm tells completions in order: others wait behind a peer that stands still";
const ELSEWHERE: &str = "shm reaches other processes only; those of one process have loopback";

impl BackendUnderTest for Provider {
    fn name(&self) -> &str {
        &self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    /// A clock that only the trial moves passes deadlines before a socket has carried a byte.
    fn runs_tag(&self, tag: Tag) -> bool {
        tag == Tag::Process
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        let not_here = match self.provider {
            "shm" => &NOT_ON_SHM[..],
            "tcp" => &[NOT_ON_TCP],
            _ => &[NOT_ON_TCP, NOT_ON_RXM],
        };
        not_here.iter().find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err(format!("libfabric impersonates no {} device", shape.variant.name()));
        }
        let config = EfaConfig::default().provider(self.provider).domains(shape.rails);
        // Sockets stay on this host; shm has no addresses.
        let config = if self.provider == "shm" { config } else { config.node("127.0.0.1") };
        let backend = Efa::with(config);
        let devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

fn main() -> ExitCode {
    let under_test = |provider: &'static str, rails: u32| {
        let name = format!("{provider}-x{rails}");
        Arc::new(Provider { name, provider, rails }) as Arc<dyn BackendUnderTest>
    };
    let backends = ["tcp", "tcp;ofi_rxm", "shm"]
        .into_iter()
        .flat_map(|provider| [under_test(provider, 1), under_test(provider, 4)]);
    multirail_conformance::main(backends.collect())
}
