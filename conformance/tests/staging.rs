//! The suite against devices whose memory is staged, always: loopback's by the trials' own clock, where the link
//! model makes them unruly, and between processes, where nothing but a knock wakes a worker; and libfabric's tcp.

mod link;

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::{Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, Shape, Tag, Variant};
use staging::{Staged, Staging};
use transport_core::TransportConfig;
use transport_core::spi::Backend;

/// What makes no sense here, by trial.
const SKIPPED: [(&str, &str); 12] = [
    ("futures::wait_drives", NOBODY),
    ("futures::any_wait_drives", NOBODY),
    ("groups::another_transports_grant_is_not_used", NOBODY),
    ("cancel::returns_only_when_quiet", THRICE),
    ("drain::returns_only_when_quiet", THRICE),
    ("drain::spares_later_operations", THRICE),
    ("drain::gives_up_and_may_be_repeated", THRICE),
    ("deadline::the_fabrics_default", THRICE),
    ("deadline::of_what_waits_behind", "what is staged is queued here, not at the device"),
    ("window::bounds_the_bytes_under_way", THRICE),
    ("fault::device_lost_before_the_imm", "a staged page is more than one request of the device's"),
    ("forgery::more_bytes", "an import asks nobody: the target checks what comes, against the true length"),
];

const NOBODY: &str = "the target's turns move staged bytes, and here nobody takes them";
const THRICE: &str = "a staged write crosses the line three times: bytes, ask, answer";

struct Devices {
    name: &'static str,
    /// libfabric's; else they are loopback's.
    provider: Option<&'static str>,
    rails: u32,
}

impl BackendUnderTest for Devices {
    fn name(&self) -> &str {
        self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    fn runs_tag(&self, tag: Tag) -> bool {
        match tag {
            Tag::Virtual => self.provider.is_none(),
            _ => self.rails == 1,
        }
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        SKIPPED.iter().find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        let inner: Arc<dyn Backend> = match self.provider {
            None => Arc::new(Loopback::with(
                LoopbackConfig::default().devices(shape.rails).link(link::of(shape.variant)),
            )),
            Some(provider) if shape.variant == Variant::Plain => Arc::new(Efa::with(
                EfaConfig::default().provider(provider).domains(shape.rails).node("127.0.0.1"),
            )),
            Some(_) => return Err(format!("libfabric impersonates no {} device", shape.variant.name())),
        };
        let devices = inner.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
        let backend = Staged::new(inner, Staging::Always);
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

fn main() -> ExitCode {
    let under_test =
        |name, provider, rails| Arc::new(Devices { name, provider, rails }) as Arc<dyn BackendUnderTest>;
    multirail_conformance::main(vec![
        under_test("staged-x1", None, 1),
        under_test("staged-x2", None, 2),
        under_test("staged-tcp", Some("tcp"), 1),
    ])
}
