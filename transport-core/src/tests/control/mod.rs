//! The control plane end to end: real sockets, real fabrics, and a backend that moves no bytes.

mod barrier;
#[cfg(feature = "tls")]
mod certificates;
mod crowd;
mod fences;
mod grant;
mod handshake;
mod hostile;
#[allow(unsafe_code, reason = "a backend that moves nothing")]
mod null;
mod raw;
mod relocations;
mod served;
mod session;
mod sleeping_worker;
mod tenant;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod versions;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use limit::{HANG, Limit};

use crate::{ErrorKind, Fabric, FabricBuilder, Listener, Peer, Token, TransportConfig};

const MS: Duration = Duration::from_millis(1);

/// The peer timeout of [`hasty`] fabrics. It is longer on a busy machine, where healthy peers are silent for longer.
/// It stays the same for the whole run, so that tests can say how long nothing may happen.
fn peer_timeout() -> Duration {
    static TIMEOUT: OnceLock<Duration> = OnceLock::new();
    *TIMEOUT.get_or_init(|| limit::stretched(400 * MS).min(2000 * MS))
}

/// The settings of a fabric. No peer is silent for longer than its peer timeout, whatever a busy machine delays: not a
/// healthy one, and not a raw one, which sends no heartbeats.
fn builder(label: &str) -> FabricBuilder {
    let transport = TransportConfig::new(label, Arc::new(null::Null::default()));
    FabricBuilder::new().transport(transport).caller_driven().heartbeat(50 * MS).peer_timeout(10 * HANG)
}

/// The settings of a fabric that soon takes silent peers for dead: for tests of silence alone.
fn hasty(label: &str) -> FabricBuilder {
    builder(label).peer_timeout(peer_timeout())
}

fn fabric() -> Fabric {
    builder("null").open().unwrap()
}

/// A token that is made from `name`.
fn token(name: &str) -> Token {
    Token::new(format!("the token of {name} and of nobody else")).unwrap()
}

/// A fabric that listens, with its listener and address.
fn listening() -> (Fabric, Listener, String) {
    served(builder("null"))
}

/// Opens a fabric that listens, with its listener and address.
fn served(builder: FabricBuilder) -> (Fabric, Listener, String) {
    let fabric = builder.open().unwrap();
    let listener = wait(fabric.listen("0")).unwrap();
    let address = listener.local_addr();
    (fabric, listener, address)
}

/// Two connected fabrics, each with its handle of the other.
fn pair() -> ((Fabric, Peer), (Fabric, Peer)) {
    pair_of(builder)
}

/// As [`pair`], with the settings of `of`.
fn pair_of(of: fn(&str) -> FabricBuilder) -> ((Fabric, Peer), (Fabric, Peer)) {
    let (server, listener, address) = served(of("null"));
    let client = of("null").open().unwrap();
    let there = wait(client.connect(&address)).unwrap();
    let here = wait(listener.accept()).unwrap();
    ((client, there), (server, here))
}

/// Checks that a client can connect and is accepted. Returns both handles.
fn gets_through(client: &Fabric, listener: &Listener) -> (Peer, Peer) {
    let there = wait(client.connect(&listener.local_addr())).unwrap();
    loop {
        // Other clients may have connected before, and may be gone already.
        match wait(listener.accept()) {
            Ok(here) if here.incarnation() == client.incarnation() => {
                assert!(there.is_alive() && here.is_alive());
                return (there, here);
            }
            Ok(_) => {}
            Err(error) => assert_ne!(error.kind(), ErrorKind::Closed, "{error}"),
        }
    }
}

/// Waits without a runtime, and fails the test if the wait takes too long.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let (done, watch) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if Limit::of(HANG).receive(&watch) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a future of the control plane hangs");
            std::process::abort();
        }
    });
    let value = pollster::block_on(future);
    drop(done);
    watchdog.join().unwrap();
    value
}
