//! A runtime that is blocked for half a minute loses no peer.
#![cfg(target_os = "linux")]

use std::time::Duration;

use multirail::{Access, WriteOptions};

use crate::child::{self, PeerProcess};
use crate::device::TestDevices;
use crate::page::{PAGE, TestPage};

/// Ten times the default peer timeout.
const BLOCKED: Duration = Duration::from_secs(30);

#[test]
fn for_thirty_seconds() {
    let mut other = PeerProcess::start(1);
    let fabric = TestDevices::Late.open(2).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let peer = fabric.connect(&other.address).await.unwrap();
        let mut end = tokio::spawn(peer.closed());
        other.request("fill 5");
        let remote = peer.region(child::PAGE).await.unwrap();
        let src = TestPage::new(&fabric, Access::LOCAL, 7).unwrap();
        other.send("expect 1 7");

        // The test blocks the runtime, so that none of its tasks is polled.
        std::thread::sleep(BLOCKED);

        assert!(peer.is_alive());
        let options = WriteOptions::new().imm(1);
        let written = peer.write_with(&src.region, 0..PAGE, &remote, 0, &options).unwrap().await.unwrap();
        assert_eq!(written.bytes as usize, PAGE);
        assert_eq!(other.receive(), "done");
        // The task that watches the peer was polled since, and still waits.
        assert!(tokio::time::timeout(Duration::ZERO, &mut end).await.is_err());
        peer.disconnect();
        assert_eq!(end.await.unwrap().kind(), multirail::ErrorKind::Closed);
    });
}
