//! A fleet of processes that join a directory, are killed and restarted at random, while an elastic group writes to all
//! of them all the time. `member` is one of the processes, `fleet` starts and kills them, `servers` runs the real etcd
//! and Redis.
//!
//! | variable | what | default |
//! |---|---|---|
//! | `FLEET_PROCESSES` | processes | 6 |
//! | `FLEET_KILLS` | kills, restarts and leaves | 12 |
//! | `FLEET_OUTAGE` | seconds for which the server is away | 8 |
//! | `FLEET_ETCD`, `FLEET_REDIS` | the servers' programs; without, their tests do nothing: `ci/discovery` has them | |
//!
//! Every wait is for an event. The bounds on time are those that the protocol promises, longer on a busy machine.
#![cfg(target_os = "linux")]

mod events;
mod fleet;
mod member;
mod servers;
mod stores;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use fleet::Fleet;
use multirail::{FabricBuilder, TransportConfig};

/// The limit of waits that end by an event.
const LIMIT: Duration = limit::HANG;
/// The lease of every member.
const LEASE: Duration = Duration::from_secs(3);
/// The size of the region that each member publishes as [`PAGE`].
const LEN: usize = 64 << 10;
const PAGE: &str = "page";

fn builder() -> FabricBuilder {
    FabricBuilder::new().transport(TransportConfig::new("loopback", Arc::new(Loopback::new())))
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// Kills and restarts at random. Returns the fleet, all of whose members are connected.
fn storm(url: &str) -> Fleet {
    let (processes, kills) = (setting("FLEET_PROCESSES", 6), setting("FLEET_KILLS", 12));
    let mut fleet = Fleet::start(url, processes);
    fleet.storm(kills);
    fleet
}

#[cfg(feature = "file")]
#[test]
fn a_folder() {
    let folder = tempfile::tempdir().unwrap();
    storm(&format!("file://{}/fleet", folder.path().display())).end();
}

#[test]
fn etcd() {
    let Some(mut server) = servers::Server::etcd() else { return };
    let mut fleet = storm(&server.url());
    fleet.outage(&mut server);
    fleet.storm(setting("FLEET_PROCESSES", 6).min(4));
    fleet.end();
}

#[test]
fn redis() {
    let Some(mut server) = servers::Server::redis() else { return };
    let mut fleet = storm(&server.url());
    fleet.outage(&mut server);
    fleet.storm(setting("FLEET_PROCESSES", 6).min(4));
    fleet.end();
}
