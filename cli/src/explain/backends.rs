//! The backend that carries a write, and the number of its requests.

use std::ops::Range;

use multirail::{BackendChoice, GroupLocation, TransportInfo};

use super::super::Common;
use super::super::failure::CommandResult;
use super::super::units::Size;
use super::{Choice, GroupDescription};

const BACKEND: &str = "backend";
const REQUESTS: &str = "requests";

/// The backends of this host.
#[derive(Default)]
pub struct AvailableBackends {
    /// Each backend, and the reason why it would be used or not.
    rows: Vec<(String, Result<String, String>)>,
    /// The rail groups of the first backend with cards, after it was opened.
    pub groups: Vec<GroupDescription>,
    /// The backend with cards, its bytes of a piece, and its largest request.
    pieces: Option<(String, u64, u64)>,
}

/// Probes every backend, and opens the first one with cards.
pub fn found(common: &Common) -> CommandResult<AvailableBackends> {
    let (registry, choice) = (common.registry()?, common.choice()?);
    common.require_requested(&registry)?;
    let mut found = AvailableBackends::default();
    for row in registry.rows() {
        let name = row.name.to_owned();
        if let BackendChoice::Named(asked) = &choice
            && *asked != name
        {
            found.rows.push((name, Err(format!("--backend is {asked}"))));
            continue;
        }
        match row.probe {
            Ok(devices) => {
                let cards = devices.iter().filter(|device| device.address.is_some()).count();
                found
                    .rows
                    .push((name.clone(), Ok(format!("{} devices, {cards} of them cards", devices.len()))));
                if cards == 0 || found.pieces.is_some() {
                    continue;
                }
                let fabric = registry.builder(&BackendChoice::Named(name.clone()))?.open()?;
                if let Some(transport) = fabric.transports().first() {
                    let (chunk, most) = (transport.capabilities.chunk, transport.capabilities.max_write);
                    found.pieces = Some((name, chunk, most));
                    found.groups = groups(transport);
                }
                fabric.close();
            }
            Err(why) => found.rows.push((name, Err(format!("{}; {}", why.reason, why.remedy)))),
        }
    }
    Ok(found)
}

fn groups(transport: &TransportInfo) -> Vec<GroupDescription> {
    let group = |(rails, location): (&Range<usize>, &GroupLocation)| {
        let devices = &transport.devices[rails.clone()];
        GroupDescription {
            rails: devices.iter().map(|device| device.name.clone()).collect(),
            gpus: location.gpus.clone(),
            cards: devices.iter().filter_map(|device| device.address).collect(),
            node: location.node,
            distance: location.distance,
            cores: location.cores.clone(),
            core: location.core,
        }
    };
    transport.groups.iter().zip(&transport.locations).map(group).collect()
}

/// The decisions about backends, and how a write of `size` uses this many rails.
pub fn choices(found: &AvailableBackends, is_here: bool, size: Size, rails: usize) -> Vec<Choice> {
    if !is_here {
        let why = "a description does not list libraries and devices: run the command on that machine";
        return vec![Choice::left(BACKEND, "any", why)];
    }
    let backend = |(name, why): &(String, Result<String, String>)| match why {
        Ok(why) => Choice::taken(BACKEND, name, why),
        Err(why) => Choice::left(BACKEND, name, why),
    };
    let mut choices: Vec<Choice> = found.rows.iter().map(backend).collect();
    if let Some((name, chunk, most)) = &found.pieces {
        choices.push(requests(name, size.0, *chunk, *most, rails as u64));
    }
    choices
}

fn requests(backend: &str, size: u64, chunk: u64, most: u64, rails: u64) -> Choice {
    if size <= chunk || rails <= 1 {
        let requests = size.div_ceil(most).max(1);
        let why = format!(
            "a write of at most {} uses one rail, and the next write uses the next rail",
            Size(chunk)
        );
        return Choice::taken(REQUESTS, format!("{requests} over one rail of {backend}"), why);
    }
    let pieces = size.div_ceil(chunk).max(1);
    let used = pieces.min(rails);
    let why = format!(
        "the write is cut into pieces of at most {}, which are striped over the {rails} rails",
        Size(chunk)
    );
    Choice::taken(REQUESTS, format!("{pieces} over {used} rails of {backend}"), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_pieces() {
        let choice = |size, rails| requests("efa", size, 512 << 10, 1 << 30, rails).choice;
        assert_eq!(choice(64 << 10, 4), "1 over one rail of efa");
        assert_eq!(choice(1 << 20, 4), "2 over 2 rails of efa");
        assert_eq!(choice(16 << 20, 4), "32 over 4 rails of efa");
        assert_eq!(choice(4 << 30, 1), "4 over one rail of efa");
    }
}
