//! Counters through the `metrics` facade: `--features metrics`.

use std::collections::HashMap;
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use multirail::{Access, BackendChoice};

#[test]
fn counters_are_published_with_labels_when_asked() {
    let choice = BackendChoice::Named("loopback".into());
    let open = || multirail::builder(&choice).expect("loopback").open().expect("open");
    let (here, there) = (open(), open());
    let (peer, _origin) = here.connect_local(&there).expect("connect");
    let source = here.alloc(8 << 20, Access::LOCAL).expect("memory");
    let target = there.alloc(8 << 20, Access::REMOTE_WRITE).expect("memory");
    let remote = peer.import(&target.descriptor()).expect("import");
    let write = |len: usize| peer.write(&source, 0..len, &remote, 0).expect("submit");
    write(64).wait(Duration::from_secs(60)).expect("a direct write");
    write(8 << 20).wait(Duration::from_secs(60)).expect("a posted write");

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || here.publish_metrics());
    let mut found = HashMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels: HashMap<_, _> = key.labels().map(|label| (label.key(), label.value())).collect();
        if key.name().starts_with("multirail_rail_") {
            assert_eq!(labels["transport"], "loopback");
            assert_eq!(labels["backend"], "loopback");
            assert_eq!((labels["rail"], labels["device"]), ("0", "lo0"));
        }
        found.insert(key.name().to_owned(), value);
    }
    let rail = &here.counters()[0];
    for (name, value) in [
        ("posts", rail.posts),
        ("doorbells", rail.doorbells),
        ("bytes", rail.bytes),
        ("completions", rail.completions),
        ("errors", rail.errors),
        ("queue_full", rail.queue_full),
        ("retries", rail.retries),
        ("grant_waits", rail.grant_waits),
        ("direct", rail.direct),
        ("direct_bytes", rail.direct_bytes),
    ] {
        assert_eq!(found[&format!("multirail_rail_{name}_total")], DebugValue::Counter(value), "{name}");
    }
    assert_eq!(rail.bytes, 8 << 20);
    assert!(rail.posts > 0 && rail.direct == 1 && rail.completions == rail.posts);
    assert_eq!(found["multirail_peers"], DebugValue::Gauge(1.0.into()));
}
