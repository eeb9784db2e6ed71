//! Auto mode: fabrics of several backends, as users open them.
//!
//! `loopback-ahead-of-tcp` runs the whole suite between processes over tcp, on fabrics whose first transport is a
//! loopback of two rail groups that reaches nobody, as it is between two hosts. The other subjects run the trials
//! of several transports on each pair of backends, of which the second reaches the peer.

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, Shape, Tag, Variant};
use transport_core::TransportConfig;
use transport_core::spi::Backend;

/// The label of the transport that the suite's peers share.
const SHARED: &str = "under-test";
/// The label by which the suite asks whether there are devices.
const PROBE: &str = "probe";
/// The trials of several transports.
const SEVERAL: [&str; 2] = ["groups::", "routing::"];

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Loopback,
    /// Loopback behind a link model.
    Modelled,
    /// Libfabric over sockets.
    Tcp,
}

struct Auto {
    name: &'static str,
    first: Kind,
    shared: Kind,
    /// The first transport is there in every fabric, and reaches nobody.
    ahead: bool,
}

impl Kind {
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
                let devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
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

    /// A clock that only the trial moves passes deadlines before a socket has carried a byte.
    fn runs_tag(&self, tag: Tag) -> bool {
        tag == Tag::Process || (self.first != Kind::Tcp && self.shared != Kind::Tcp)
    }

    fn runs_trial(&self, trial: &str) -> bool {
        self.ahead || SEVERAL.iter().any(|noun| trial.starts_with(noun))
    }

    /// A pair is as it is.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        if self.ahead { asked.to_vec() } else { vec![Variant::Plain] }
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        (self.shared == Kind::Tcp && trial == "forgery::amid_others")
            .then_some("tcp closes the connection on a wrong key, and what is under way ends with it")
    }

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err(format!("backends that are mixed impersonate no {} device", shape.variant.name()));
        }
        if label == PROBE {
            // Both are needed, and either may be missing here.
            self.first.transport(label, shape.rails)?;
        }
        let kind = if [SHARED, PROBE].contains(&label) || self.ahead { self.shared } else { self.first };
        kind.transport(label, shape.rails)
    }

    fn preceding_transports(&self, label: &str) -> Vec<TransportConfig> {
        // The suite asks for the transport under test as well, which says why it is not there.
        self.ahead.then(|| self.first.transport(label, 2).ok()).flatten().into_iter().collect()
    }
}

fn main() -> ExitCode {
    let pair = |name, first, shared, ahead| {
        Arc::new(Auto { name, first, shared, ahead }) as Arc<dyn BackendUnderTest>
    };
    multirail_conformance::main(vec![
        pair("loopback-ahead-of-tcp", Kind::Loopback, Kind::Tcp, true),
        pair("loopback-and-tcp", Kind::Loopback, Kind::Tcp, false),
        pair("tcp-and-loopback", Kind::Tcp, Kind::Loopback, false),
        pair("tcp-and-tcp", Kind::Tcp, Kind::Tcp, false),
        pair("loopback-and-modelled", Kind::Loopback, Kind::Modelled, false),
        pair("modelled-and-loopback", Kind::Modelled, Kind::Loopback, false),
    ])
}
