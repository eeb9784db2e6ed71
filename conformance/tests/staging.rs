//! The suite against devices that always stage memory, or that coalesce all small pages: loopback on the virtual clock,
//! with a link model, loopback between processes, where only a wakeup imm wakes a worker, and libfabric's tcp.

mod link;

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::{Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant, devices};
use staging::{Staged, StagingPolicy};
use transport_core::spi::Backend;
use transport_core::{CoalescePolicy, TransportConfig};

/// Skipped trials, with the reason.
const SKIPPED: [(&str, &str); 19] = [
    ("futures::wait_drives", TARGET_IDLE),
    ("futures::any_wait_drives", TARGET_IDLE),
    ("groups::another_transports_grant_is_not_used", TARGET_IDLE),
    ("cancel::returns_only_when_quiet", TWO_MESSAGES),
    ("cancel::tears_down_at_the_deadline", ANSWERED),
    ("drain::tears_down_at_the_deadline", ANSWERED),
    ("drain::returns_only_when_quiet", TWO_MESSAGES),
    ("drain::spares_later_operations", TWO_MESSAGES),
    ("drain::gives_up_and_may_be_repeated", TWO_MESSAGES),
    ("deadline::the_fabrics_default", TWO_MESSAGES),
    ("deadline::of_what_waits_behind", "the staging layer queues staged requests, not the device"),
    ("window::bounds_the_bytes_under_way", TWO_MESSAGES),
    ("order::completions_do_overtake", ONE_SLOT),
    ("fault::device_lost", ONE_SLOT),
    ("fault::device_lost_ends_receives", ONE_SLOT),
    ("fault::a_failed_request_fails_its_operation", ONE_SLOT),
    ("fault::no_imm_behind_a_failure", ONE_SLOT),
    ("fault::device_lost_before_the_imm", "a staged page needs more than one device request"),
    (
        "forgery::more_bytes",
        "an import does not ask the target: the target checks arriving bytes against the true length",
    ),
];

/// Trials that are skipped where pages are coalesced instead, with the reason.
const NOT_COALESCED: [(&str, &str); 3] = [
    (
        "receipts::name_the_path",
        "the transport's policy coalesces where the path policy allows it, and does not insist",
    ),
    ("tenant::a_stolen_descriptor", OWN_BUFFER),
    ("tenant::a_stolen_descriptor_over_sockets", OWN_BUFFER),
];

const ONE_SLOT: &str = "the pages share the requests of one slot, and the trial counts requests";
const OWN_BUFFER: &str =
    "the stolen key is a small number in loopback, that of the thief's own staging buffer too";
const TARGET_IDLE: &str = "the target has to run turns to move staged bytes, and this trial runs none";
const TWO_MESSAGES: &str = "a staged write sends two messages: its bytes with the request, and the response";
const ANSWERED: &str = "a cancel is over once the target has answered the slot requests that were sent to it";

struct StagedDevices {
    name: &'static str,
    /// The provider of libfabric, or `None` for loopback.
    provider: Option<&'static str>,
    rails: u32,
    /// Whether the devices register memory and coalesce, instead of staging it.
    coalesces: bool,
}

impl BackendUnderTest for StagedDevices {
    fn name(&self) -> &str {
        self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    fn runs_tag(&self, tag: TrialTag) -> bool {
        match tag {
            TrialTag::Virtual => self.provider.is_none(),
            _ => self.rails == 1,
        }
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        if trial == "forgery::amid_others" && self.coalesces && self.provider.is_some() {
            return Some("large pieces go directly, and tcp closes the connection on a wrong key");
        }
        let more = if self.coalesces { &NOT_COALESCED[..] } else { &[] };
        SKIPPED.iter().chain(more).find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        let inner: Arc<dyn Backend> = match self.provider {
            None => Arc::new(Loopback::with(
                LoopbackConfig::default().devices(shape.rails).link(link::of(shape.variant)),
            )),
            Some(provider) if shape.variant == Variant::Plain => Arc::new(Efa::with(
                EfaConfig::default().provider(provider).domains(shape.rails).node("127.0.0.1"),
            )),
            Some(_) => return Err(format!("libfabric cannot simulate {} devices", shape.variant.name())),
        };
        let devices = devices(&*inner, shape.rails)?;
        let backend = match self.coalesces {
            true => Staged::new(inner, StagingPolicy::Never).coalescing(CoalescePolicy::Always),
            false => Staged::new(inner, StagingPolicy::Always),
        };
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

fn main() -> ExitCode {
    let under_test = |name, provider, rails, coalesces| {
        Arc::new(StagedDevices { name, provider, rails, coalesces }) as Arc<dyn BackendUnderTest>
    };
    multirail_conformance::main(vec![
        under_test("staged-x1", None, 1, false),
        under_test("staged-x2", None, 2, false),
        under_test("staged-tcp", Some("tcp"), 1, false),
        under_test("coalesced-x1", None, 1, true),
        under_test("coalesced-x2", None, 2, true),
        under_test("coalesced-tcp", Some("tcp"), 1, true),
    ])
}
