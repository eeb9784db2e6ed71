//! The lines of a `PeerHandle` in the log: one for each change.
//!
//! It is a test program of its own: `tracing` may miss events of one thread's subscriber while other threads have
//! none.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::{ErrorKind, Fabric, FabricBuilder, Listener, PeerHandle, ReconnectPolicy, TransportConfig};
use tokio::runtime::{Builder, Runtime};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn open(runtime: &Runtime) -> Fabric {
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    FabricBuilder::new().transport(loopback).control_on(runtime.handle().clone()).open().unwrap()
}

/// Accepts peers for as long as it is polled.
async fn accept(listener: Listener) {
    let mut peers = Vec::new();
    loop {
        peers.push(listener.accept().await.unwrap());
    }
}

/// Two handles of a peer that closes. One gives up before the peer is back.
async fn lose_and_find(runtime: &Runtime) {
    let (fabric, server) = (open(runtime), open(runtime));
    let listener = server.listen(&limit::own_address()).await.unwrap();
    let address = listener.local_addr();
    let policy = ReconnectPolicy::within(limit::HANG).first_delay(Duration::from_millis(5));
    let [patient, brief] = [policy, ReconnectPolicy::attempts(1).first_delay(Duration::from_millis(1))]
        .map(|policy| PeerHandle::connect(&fabric, &address, policy));
    let connecting = async { (patient.await.unwrap(), brief.await.unwrap()) };
    let (patient, brief) = tokio::select! {
        handles = connecting => handles,
        () = accept(listener) => unreachable!("it accepts for ever"),
    };
    server.close_and_wait().await;
    assert_eq!(brief.connected().await.err().unwrap().kind(), ErrorKind::PeerDied);
    let server = open(runtime);
    let listener = server.listen(&address).await.unwrap();
    tokio::select! {
        peer = patient.connected() => assert!(peer.unwrap().is_alive()),
        () = accept(listener) => unreachable!("it accepts for ever"),
    }
    drop(patient);
    fabric.close_and_wait().await;
    server.close_and_wait().await;
}

#[test]
fn each_change_is_one_line() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    // The control plane runs in this thread, and so with this subscriber.
    tracing::subscriber::with_default(subscriber, || runtime.block_on(lose_and_find(&runtime)));
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let count =
        |words: [&str; 2]| text.lines().filter(|line| words.iter().all(|word| line.contains(word))).count();
    assert_eq!(count([" WARN ", "the connection to a peer is lost"]), 2, "{text}");
    assert_eq!(count([" WARN ", "does not connect again"]), 1, "{text}");
    assert_eq!(count([" INFO ", "connected again to a peer"]), 1, "{text}");
    assert_eq!(text.lines().filter(|line| line.contains("peer_handle")).count(), 4, "{text}");
}
