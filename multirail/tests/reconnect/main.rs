//! Peers that come back: what a `PeerHandle` gives after its peer was lost.
//!
//! `process` kills and restarts a peer's process, which is `child`. `in_process` closes and opens the peer's fabric in
//! this process, and shows limits, names, lists, and the end of the handle. Every wait is for an event.
#![cfg(target_os = "linux")]

mod child;
mod in_process;
mod process;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use backend_loopback::Loopback;
use limit::Limit;
use multirail::{
    Error, Fabric, FabricBuilder, Peer, PeerHandle, PeerId, ReconnectPolicy, TransportConfig, wait,
};

/// The limit of waits, also on a loaded machine.
const LIMIT: Duration = limit::HANG;

/// The size of a region in bytes.
const LEN: usize = 64 << 10;

/// The names under which a peer publishes a region, and a catalogue of three regions.
const PAGE: &str = "page";
const LAYERS: &str = "layers";

fn builder() -> FabricBuilder {
    FabricBuilder::new().transport(TransportConfig::new("loopback", Arc::new(Loopback::new())))
}

/// Tries often, for as long as a test may take.
fn patient() -> ReconnectPolicy {
    ReconnectPolicy::within(LIMIT)
        .first_delay(Duration::from_millis(5))
        .longest_delay(Duration::from_millis(50))
}

fn connect(fabric: &Fabric, address: &str, policy: ReconnectPolicy) -> PeerHandle {
    wait(PeerHandle::connect(fabric, address, policy), LIMIT).unwrap().unwrap()
}

fn connected(handle: &PeerHandle) -> Result<Peer, Error> {
    wait(handle.connected(), LIMIT).expect("the handle connects or gives up")
}

/// Waits until this side knows that the peer is gone.
fn gone(peer: &Peer) -> Error {
    wait(peer.closed(), LIMIT).expect("the peer is gone")
}

/// The peers that the handle's function was called with. The channel is disconnected once nothing can call it any more.
fn hooked(handle: &PeerHandle) -> Receiver<PeerId> {
    let (sender, calls): (Sender<PeerId>, _) = channel();
    handle.on_reconnect(move |peer| _ = sender.send(peer.id()));
    calls
}

fn next(calls: &Receiver<PeerId>) -> PeerId {
    Limit::of(LIMIT).receive(calls).expect("the function is called")
}

/// `len` bytes that depend on `seed`.
fn content(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect()
}
