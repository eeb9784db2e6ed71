//! A rail that fails under way: a backend around a backend, which closes the endpoint of one device at a chosen moment
//! and reports the device as lost.
//!
//! By the contract of `Endpoint`, a device touches no memory of this side once its endpoint is closed. So this works
//! with every backend. What had been posted is lost, or still on its way to the peer: the engine has the peer fence it.

mod backend;
mod domain;
mod endpoint;
mod rail_failure;

use std::sync::Arc;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::{Fabric, TransportInfo};

use crate::Common;
use crate::common::ObserveOptions;
use crate::failure::{CommandFailure, CommandResult};
use backend::FailingBackend;
pub use rail_failure::{FailRail, RailFailure};

/// The devices of loopback: cards of a p5, by the link model, in one rail group.
const LOOPBACK_CARDS: u32 = 4;

/// Opens a fabric with the chosen backends, of which one device will fail.
///
/// loopback's devices copy at once, so that nothing would be outstanding, and each is its own rail group. Here it has
/// modelled cards instead.
pub fn open(
    common: &Common,
    rail: &FailRail,
    observed: &ObserveOptions,
) -> CommandResult<(Fabric, Arc<RailFailure>)> {
    let cards = LoopbackConfig::default().devices(LOOPBACK_CARDS).link(LinkModel::p5());
    let mut registry = common.registry()?.with(Arc::new(Loopback::with(cards)));
    let failure = RailFailure::new(rail.clone());
    let names: Vec<_> = registry.names().collect();
    for name in names {
        let failing = FailingBackend::new(Arc::clone(registry.find(name)?), Arc::clone(&failure));
        registry = registry.with(Arc::new(failing));
    }
    let fabric = common.open_with(&registry, observed)?;
    check(&fabric.transports(), &rail.device).map_err(CommandFailure::Invalid)?;
    Ok((fabric, failure))
}

/// Fails if no transport has the device, or if no transfer could survive its loss.
fn check(transports: &[TransportInfo], device: &str) -> Result<(), String> {
    let of = |transport: &TransportInfo| transport.devices.iter().position(|found| found.name == device);
    let Some((transport, number)) = transports.iter().find_map(|transport| Some((transport, of(transport)?)))
    else {
        let names =
            transports.iter().flat_map(|transport| &transport.devices).map(|found| found.name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        return Err(format!("--fail-rail {device}: no rail has this device; there are {names}"));
    };
    let others =
        transport.groups.iter().find(|group| group.contains(&number)).map_or(0, |group| group.len() - 1);
    match (number, others) {
        (_, 0) => Err(format!(
            "--fail-rail {device}: it is alone in its rail group, and no other rail would take over; use --backend loopback, \
             which has {LOOPBACK_CARDS} modelled cards then, or --backend efa --provider tcp --domains 4"
        )),
        (0, _) => Err(format!(
            "--fail-rail {device}: the first device of a transport carries the messages of the bench; name another one"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use multirail::{FabricBuilder, TransportConfig};

    use super::*;

    #[test]
    fn only_a_rail_with_others_may_fail() {
        let cards = |label, config| TransportConfig::new(label, Arc::new(Loopback::with(config)));
        let fabric = |config| FabricBuilder::new().transport(cards("cards", config)).open().unwrap();
        let one_group = fabric(LoopbackConfig::default().devices(4)).transports();
        assert_eq!(check(&one_group, "lo3"), Ok(()));
        assert!(check(&one_group, "lo0").unwrap_err().contains("carries the messages"));
        assert!(check(&one_group, "lo4").unwrap_err().contains("there are lo0, lo1, lo2, lo3"));
        let alone = fabric(LoopbackConfig::default().devices(2).groups(2)).transports();
        assert!(check(&alone, "lo1").unwrap_err().contains("alone in its rail group"));
    }
}
