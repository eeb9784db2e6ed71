//! Auto mode: fabrics with several backends, as users open them.
//!
//! `loopback-ahead-of-tcp` runs the whole suite between processes over tcp. The first transport of its fabrics is a
//! loopback with two rail groups that reaches no peer, as between two hosts. The other pairs run the trials of several
//! transports on two backends, of which the second reaches the peer.

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant, devices};
use transport_core::TransportConfig;

/// The label of the transport that the suite's peers share.
const SHARED: &str = "under-test";
/// The label with which the suite probes for devices.
const PROBE: &str = "probe";
/// The prefixes of trials with several transports.
const SEVERAL: [&str; 2] = ["groups::", "routing::"];

#[derive(Clone, Copy, PartialEq)]
enum TransportKind {
    Loopback,
    /// Loopback with a link model.
    Modelled,
    /// Libfabric's tcp provider.
    Tcp,
}

struct Auto {
    name: &'static str,
    first: TransportKind,
    shared: TransportKind,
    /// True if the first transport is in every fabric and reaches no peer.
    first_is_unreachable: bool,
}

impl TransportKind {
    fn transport(self, label: &str, rails: u32) -> Result<TransportConfig, String> {
        let config = LoopbackConfig::default().devices(rails).groups(rails);
        match self {
            Self::Loopback => Ok(TransportConfig::new(label, Arc::new(Loopback::with(config)))),
            Self::Modelled => {
                let config = config.link(LinkModel::default());
                Ok(TransportConfig::new(label, Arc::new(Loopback::with(config))))
            }
            Self::Tcp => {
                let backend =
                    Efa::with(EfaConfig::default().provider("tcp").domains(rails).node("127.0.0.1"));
                let devices = devices(&backend, rails)?;
                Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
            }
        }
    }
}

impl BackendUnderTest for Auto {
    fn name(&self) -> &str {
        self.name
    }

    fn rails(&self) -> u32 {
        2
    }

    /// A virtual clock would pass deadlines before a socket has carried a byte.
    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Process || (self.first != TransportKind::Tcp && self.shared != TransportKind::Tcp)
    }

    fn runs_trial(&self, trial: &str) -> bool {
        self.first_is_unreachable || SEVERAL.iter().any(|noun| trial.starts_with(noun))
    }

    /// A pair of backends cannot simulate variants.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        if self.first_is_unreachable { asked.to_vec() } else { vec![Variant::Plain] }
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        (self.shared == TransportKind::Tcp && trial == "forgery::amid_others")
            .then_some("tcp closes the connection on a wrong key, and all outstanding operations fail")
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err(format!("a pair of backends cannot simulate {} devices", shape.variant.name()));
        }
        if label == PROBE {
            // The trials need both backends, and either may be missing on this machine.
            self.first.transport(label, shape.rails)?;
        }
        let kind = if [SHARED, PROBE].contains(&label) || self.first_is_unreachable {
            self.shared
        } else {
            self.first
        };
        kind.transport(label, shape.rails)
    }

    fn preceding_transports(&self, label: &str) -> Vec<TransportConfig> {
        // The suite opens the transport under test too, which returns the reason if it is missing.
        self.first_is_unreachable.then(|| self.first.transport(label, 2).ok()).flatten().into_iter().collect()
    }
}

fn main() -> ExitCode {
    let pair = |name, first, shared, first_is_unreachable| {
        Arc::new(Auto { name, first, shared, first_is_unreachable }) as Arc<dyn BackendUnderTest>
    };
    multirail_conformance::main(vec![
        pair("loopback-ahead-of-tcp", TransportKind::Loopback, TransportKind::Tcp, true),
        pair("loopback-and-tcp", TransportKind::Loopback, TransportKind::Tcp, false),
        pair("tcp-and-loopback", TransportKind::Tcp, TransportKind::Loopback, false),
        pair("tcp-and-tcp", TransportKind::Tcp, TransportKind::Tcp, false),
        pair("loopback-and-modelled", TransportKind::Loopback, TransportKind::Modelled, false),
        pair("modelled-and-loopback", TransportKind::Modelled, TransportKind::Loopback, false),
    ])
}
