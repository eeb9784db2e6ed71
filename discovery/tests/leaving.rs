//! The end of a process: this test has its process, and the thread of the directories, for itself.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::{FabricBuilder, TransportConfig, wait};
use multirail_discovery::{ElasticGroup, ElasticOptions, Member, open};

/// The last user of the thread waits until the entry is removed, also if that is a group.
#[test]
fn the_last_drop_waits_for_the_entry() {
    let folder = tempfile::tempdir().unwrap();
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    let fabric = FabricBuilder::new().transport(loopback).open().unwrap();
    for _ in 0..10 {
        let directory = open(&format!("file://{}", folder.path().display())).unwrap();
        let group = ElasticGroup::follow(&fabric, &*directory, ElasticOptions::new()).unwrap();
        let member = Member::new("a", 1).address("127.0.0.1:1");
        let membership = wait(directory.join(member, Duration::from_secs(5)), limit::HANG).unwrap().unwrap();
        assert!(folder.path().join("a.member").exists());
        drop(directory);
        drop(membership);
        drop(group);
        assert!(!folder.path().join("a.member").exists());
    }
}
