//! The memory per peer, with thousands of peers of one rail group.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Null;
use multirail::{Access, Clock, Fabric, FabricBuilder, TransportConfig, VirtualClock};
use serde::Serialize;

use super::profile::Profile;
use crate::Common;
use crate::failure::{CommandFailure, CommandResult};
use crate::output;

/// The maximum number of peers.
const MAX: u32 = 1 << 20;
/// The bytes written to each peer.
const PAGE: usize = 64 << 10;
/// The longest jump of the virtual clock, so that a write that makes no progress reaches its deadline.
const MAX_JUMP: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
struct PeerMemoryRow {
    model: &'static str,
    peers: u32,
    rails: u32,
    /// The memory of one side.
    bytes_per_peer: u64,
    bytes_per_rail_pair: u64,
}

/// Connects `peers` peers over the first group's cards and writes to each once.
pub fn run(common: &Common, profile: &Profile, peers: u32) -> CommandResult {
    if peers == 0 || peers > MAX {
        return Err(CommandFailure::new(format!("--peers is between 1 and {MAX}")));
    }
    let clock = VirtualClock::default();
    let rails = profile.cards_of(0);
    let open = || -> CommandResult<Fabric> {
        let cards = Null::new(rails).link(profile.card.clone());
        Ok(FabricBuilder::new()
            .transport(TransportConfig::new("cards", Arc::new(cards)))
            .clock(Arc::new(clock.clone()))
            .seed(profile.seed)
            .caller_driven()
            .open()?)
    };
    let (fabric, target) = (open()?, open()?);
    let source = fabric.alloc(PAGE, Access::LOCAL)?;
    let landing = target.alloc(PAGE, Access::REMOTE_WRITE)?.descriptor();
    let before = resident()?;
    let mut connected = Vec::with_capacity(peers as usize);
    for _ in 0..peers {
        let pair = fabric.connect_local(&target)?;
        let landing = pair.0.import(&landing)?;
        let mut op = pair.0.write(&source, 0..PAGE, &landing, 0)?;
        let written = loop {
            if let Some(written) = op.try_result() {
                break written;
            }
            if fabric.step().events == 0 {
                let due = fabric.due().since(clock.now());
                clock.advance(due.clamp(Duration::from_nanos(1), MAX_JUMP));
            }
            target.step();
        };
        written?;
        connected.push((pair, landing));
    }
    // This process has both sides of every connection.
    let each = resident()?.saturating_sub(before) / u64::from(peers) / 2;
    let row = PeerMemoryRow {
        model: "simulation, not a measurement",
        peers,
        rails,
        bytes_per_peer: each,
        bytes_per_rail_pair: each / u64::from(rails),
    };
    if common.json {
        return output::json(&row);
    }
    output::print_text(&format!(
        "{peers} peers connected and written to once; {each} bytes of memory per peer, {} per rail pair ({rails} rails)",
        row.bytes_per_rail_pair
    ))
}

/// The resident memory of this process in bytes, without shared memory.
fn resident() -> CommandResult<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")
        .map_err(|error| CommandFailure::new(format!("--peers needs /proc/self/statm: {error}")))?;
    let mut pages = text.split_ascii_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (resident, shared) = (pages.nth(1), pages.next());
    match (resident, shared) {
        (Some(resident), Some(shared)) => {
            Ok(resident.saturating_sub(shared) * rustix::param::page_size() as u64)
        }
        _ => Err(CommandFailure::new("cannot parse /proc/self/statm")),
    }
}
