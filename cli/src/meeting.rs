//! Options by which two sides without a common transport would meet.

use std::error::Error as _;
use std::iter::successors;

use multirail::spi::Backend;
use multirail::{Efa, NoCommonTransport};

use crate::LIBFABRIC;
use crate::failure::Failure;

/// The provider of libfabric that runs between any two hosts.
const ANYWHERE: &str = "tcp";

/// A failure to connect; where the two sides have no transport in common, with the options that would give one.
pub fn failure(error: multirail::Error) -> Failure {
    let chain = successors(error.source(), |error| (*error).source());
    let offers = chain.filter_map(|error| error.downcast_ref::<NoCommonTransport>()).next();
    match offers {
        Some(offers) => Failure::new(format!("{error}; {}", advice(offers))),
        None => error.into(),
    }
}

fn advice(offers: &NoCommonTransport) -> String {
    let registry = multirail::Registry::standard();
    let is_ours = |backend: &str| offers.ours.iter().any(|ours| ours.backend == backend);
    let opens = |backend: &str| registry.find(backend).is_ok_and(|backend| backend.probe().is_ok());
    let mut further =
        offers.theirs.iter().map(|theirs| theirs.backend.as_str()).filter(|backend| !is_ours(backend));
    if let Some(backend) = further.find(|backend| *backend != "loopback" && opens(backend)) {
        return format!("start both with --backend {backend}");
    }
    let meet = format!("start both with --backend {LIBFABRIC} --provider {ANYWHERE}");
    let config = multirail::efa_config().unwrap_or_default().provider(ANYWHERE);
    match Efa::with(config).probe() {
        Ok(_) => meet,
        Err(why) => format!("{meet}, once it is available here: {}; {}", why.reason, why.remedy),
    }
}
