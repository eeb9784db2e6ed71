//! Recordings of this process's fabrics, and malformed recordings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_loopback::{Loopback, LoopbackConfig};
use multirail::{Access, Fabric, FabricBuilder, Peer, Region, TransportConfig};
use proptest::prelude::*;
use serde_json::Value;

use super::*;

/// A fabric that has written `len` bytes to itself, with its peer and its source.
fn written(loopback: Loopback, len: usize) -> (Fabric, Peer, Region) {
    let loopback = TransportConfig::new("loopback", Arc::new(loopback));
    let fabric = FabricBuilder::new().transport(loopback).open().unwrap();
    let (peer, _) = fabric.connect_local(&fabric).unwrap();
    let source = fabric.alloc(len, Access::LOCAL).unwrap();
    let target = fabric.alloc(len, Access::REMOTE_WRITE).unwrap();
    let remote = peer.import(&target.descriptor()).unwrap();
    peer.write(&source, 0..len, &remote, 0).unwrap().wait(Duration::from_secs(60)).unwrap();
    (fabric, peer, source)
}

/// A recording with a completed operation and a waiting one.
fn recorded() -> Vec<u8> {
    let (fabric, peer, source) = written(Loopback::new(), 4 << 20);
    let mut bytes = Recording::header().to_vec();
    bytes.extend(fabric.dump().to_bytes().unwrap());
    // More messages than a ring holds, and no receive is posted.
    let sends: Vec<_> = (0..200).map(|_| peer.send(&source, 0..1000).unwrap()).collect();
    let until = Instant::now() + Duration::from_secs(60);
    let dump = loop {
        let dump = fabric.dump();
        if dump.operations().any(|operation| !operation.waits.is_empty()) {
            break dump;
        }
        assert!(Instant::now() < until, "no send waits: {dump}");
    };
    bytes.extend(dump.to_bytes().unwrap());
    drop(sends);
    bytes
}

fn balanced(trace: &Value) -> usize {
    let mut open = BTreeMap::new();
    let mut spans = 0;
    for event in trace["traceEvents"].as_array().unwrap() {
        let id = event["id"].as_str().unwrap_or("").to_owned();
        match event["ph"].as_str().unwrap() {
            "b" => assert_eq!(open.insert(id, ()), None, "begun twice: {event}"),
            "e" => {
                spans += 1;
                assert!(open.remove(&id).is_some(), "never begun: {event}");
            }
            "n" => assert!(open.contains_key(&id), "outside its span: {event}"),
            "X" => assert!(event["dur"].as_f64().unwrap() >= 0.0),
            "i" | "M" => {}
            other => panic!("{other}"),
        }
        assert!(event["ph"] == "M" || event["ts"].as_f64().is_some_and(f64::is_finite));
    }
    assert!(open.is_empty(), "never ended: {open:?}");
    spans
}

#[test]
fn a_recording_becomes_a_timeline_and_balanced_spans() {
    let recording = Recording::from_bytes(&recorded()).unwrap();
    let text = serde_json::to_string(&chrome::trace(&recording)).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert!(balanced(&trace) >= 2, "{text}");
    let named =
        |name: &str| trace["traceEvents"].as_array().unwrap().iter().any(|e| e["args"]["name"] == name);
    assert!(named("rail 0 (lo0)") && named("worker"));
    assert!(text.contains("write of 4194304 bytes"), "{text}");

    let timeline = timeline(&recording);
    let count = |word: &str| timeline.lines().filter(|line| line.contains(word)).count();
    assert_eq!((count("process "), count("dump taken")), (1, 2));
    // Dumps overlap, but every record is shown once.
    assert_eq!(count("started: write of 4194304 bytes"), 1, "{timeline}");
    assert!(count("rail 0: posted") > 0 && count("waits for") > 0, "{timeline}");
}

#[test]
fn rails_of_several_groups_keep_their_numbers() {
    let config = LoopbackConfig::default().devices(2).groups(2);
    let (fabric, _peer, _source) = written(Loopback::with(config), 8 << 20);
    let mut bytes = Recording::header().to_vec();
    bytes.extend(fabric.dump().to_bytes().unwrap());
    let recording = Recording::from_bytes(&bytes).unwrap();
    let timeline = timeline(&recording);
    for posted in ["loopback/0: rail 0: posted", "loopback/1: rail 1: posted"] {
        assert!(timeline.contains(posted), "{timeline}");
    }
    let trace = chrome::trace(&recording).to_string();
    assert!(trace.contains("rail 0 (lo0)") && trace.contains("rail 1 (lo1)"), "{trace}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn changed_recordings_are_refused_or_converted(changes in prop::collection::vec((any::<u32>(), any::<u8>()), 1..8)) {
        static RECORDED: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let mut bytes = RECORDED.get_or_init(recorded).clone();
        for (at, value) in changes {
            let at = at as usize % bytes.len();
            bytes[at] = value;
        }
        if let Ok(recording) = Recording::from_bytes(&bytes) {
            balanced(&chrome::trace(&recording));
            timeline(&recording);
        }
    }
}
