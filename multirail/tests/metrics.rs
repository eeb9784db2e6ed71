//! Counters through the `metrics` facade, with `--features metrics`.

use std::collections::HashMap;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use multirail::{Access, BackendChoice, RailCounters};

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
    write(64).wait(limit::HANG).expect("a direct write");
    write(8 << 20).wait(limit::HANG).expect("a posted write");

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || here.publish_metrics());
    let (mut found, mut sizes) = (HashMap::new(), 0);
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels: HashMap<_, _> = key.labels().map(|label| (label.key(), label.value())).collect();
        if key.name().starts_with("multirail_rail_") {
            assert_eq!(labels["transport"], "loopback");
            assert_eq!(labels["backend"], "loopback");
            assert_eq!(format!("lo{}", labels["rail"]), labels["device"]);
        }
        if key.name() == "multirail_operations_total" {
            assert_eq!((labels["transport"], labels.len()), ("loopback", 2));
            let counters = here.operation_counters();
            let size = counters[0].sizes.iter().find(|size| size.name() == labels["size"]).expect("a class");
            assert_eq!(value, DebugValue::Counter(size.count()), "{labels:?}");
            sizes += 1;
        }
        found.insert((key.name().to_owned(), labels.get("rail").copied().unwrap_or("").to_owned()), value);
    }
    assert_eq!(sizes, 5);
    // The thread that submits the small write carries it out itself.
    let counters = here.operation_counters();
    let counts: Vec<_> = counters[0].sizes.iter().map(|size| size.count()).collect();
    assert!(counts[..2] == [0, 0] && counts.iter().sum::<u64>() > 0, "{counts:?}");
    let rails = here.counters();
    assert!(!rails.is_empty());
    for rail in &rails {
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
            ("taken_over", rail.taken_over),
            ("replayed", rail.replayed),
            ("replayed_bytes", rail.replayed_bytes),
            ("paths_broken", rail.paths_broken),
            ("paths_mended", rail.paths_mended),
        ] {
            let key = (format!("multirail_rail_{name}_total"), rail.rail.to_string());
            assert_eq!(found[&key], DebugValue::Counter(value), "{key:?}");
        }
    }
    let sum = |count: fn(&RailCounters) -> u64| rails.iter().map(count).sum::<u64>();
    assert_eq!(sum(|rail| rail.bytes), 8 << 20);
    assert_eq!(sum(|rail| rail.direct), 1);
    assert!(sum(|rail| rail.posts) > 0 && sum(|rail| rail.completions) == sum(|rail| rail.posts));
    let peers = ("multirail_peers".to_owned(), String::new());
    assert_eq!(found[&peers], DebugValue::Gauge(1.0.into()));
}
