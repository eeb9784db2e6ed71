//! The control plane end to end: real sockets, real fabrics, a backend that moves nothing.

mod handshake;
#[allow(unsafe_code, reason = "a backend that moves nothing")]
mod null;
mod raw;
mod session;

use std::sync::Arc;
use std::time::Duration;

use crate::{Fabric, FabricBuilder, Listener, Peer, TransportConfig};

const MS: Duration = Duration::from_millis(1);
const PEER_TIMEOUT: Duration = Duration::from_millis(400);

/// A fabric with quick limits, to be opened by the test.
fn builder(label: &str) -> FabricBuilder {
    let transport = TransportConfig::new(label, Arc::new(null::Null));
    FabricBuilder::new().transport(transport).caller_driven().heartbeat(50 * MS).peer_timeout(PEER_TIMEOUT)
}

fn fabric() -> Fabric {
    builder("null").open().unwrap()
}

/// A fabric that listens, and where.
fn listening() -> (Fabric, Listener, String) {
    let fabric = fabric();
    let listener = wait(fabric.listen("0")).unwrap();
    let address = listener.local_addr();
    (fabric, listener, address)
}

/// Two connected fabrics, and how each sees the other.
fn pair() -> ((Fabric, Peer), (Fabric, Peer)) {
    let (server, listener, address) = listening();
    let client = fabric();
    let there = wait(client.connect(&address)).unwrap();
    let here = wait(listener.accept()).unwrap();
    ((client, there), (server, here))
}

/// Waits without any runtime, and not for ever.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let (done, watch) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watch.recv_timeout(Duration::from_secs(20)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a future of the control plane hangs");
            std::process::abort();
        }
    });
    let value = pollster::block_on(future);
    drop(done);
    watchdog.join().unwrap();
    value
}
