//! The page that a scrape gets.

use std::cmp::Reverse;
use std::time::Duration;

use metrics::{describe_counter, describe_gauge};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use transport_core::{Fabric, OperationCounters, PeerCounters, WeakFabric};

/// Each counter of a rail, with its help text.
const COUNTERS: [(&str, &str); 15] = [
    ("multirail_rail_posts_total", "Work requests posted by the worker"),
    ("multirail_rail_doorbells_total", "Batches of work requests posted"),
    ("multirail_rail_bytes_total", "Payload bytes of the work requests posted by the worker"),
    ("multirail_rail_completions_total", "Work requests that succeeded"),
    ("multirail_rail_errors_total", "Work requests that failed, and refused posts"),
    ("multirail_rail_queue_full_total", "Batches of which the endpoint did not accept all requests"),
    ("multirail_rail_retries_total", "Work requests that the endpoint did not accept at first"),
    (
        "multirail_rail_grant_waits_total",
        "Times an operation left its rail's queue until its peer grants more",
    ),
    ("multirail_rail_direct_total", "Work requests that ran in the submitting thread"),
    (
        "multirail_rail_direct_bytes_total",
        "Payload bytes of the work requests that ran in the submitting thread",
    ),
    ("multirail_rail_taken_over_total", "Work requests taken over from a rail far behind or out of service"),
    ("multirail_rail_replayed_total", "Work requests of a lost device that other rails posted again"),
    ("multirail_rail_replayed_bytes_total", "Payload bytes of the replayed work requests"),
    ("multirail_rail_paths_broken_total", "Times the path to a peer over this rail broke"),
    ("multirail_rail_paths_mended_total", "Times a broken path to a peer over this rail was used again"),
];

/// Renders the metrics of one fabric. It has a recorder of its own, so it neither needs nor changes the recorder that
/// the program has installed.
pub struct MetricsPage {
    fabric: WeakFabric,
    recorder: PrometheusRecorder,
    /// The most peers with metrics of their own.
    most_peers: usize,
}

impl MetricsPage {
    /// The page of `fabric`, which it does not keep open.
    pub fn new(fabric: &Fabric, most_peers: usize) -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            COUNTERS.iter().for_each(|(name, help)| describe_counter!(*name, *help));
            describe_counter!("multirail_operations_total", "Operations that the worker ended with success");
            describe_counter!(
                "multirail_operation_errors_total",
                "Operations that failed, by the kind of their error"
            );
            describe_gauge!("multirail_peers", "Connected peers of the fabric");
            describe_gauge!(
                "multirail_rail_in_service",
                "1, or 0 for a rail whose device is lost or taken out"
            );
            describe_gauge!("multirail_rail_outstanding", "Work requests that are posted and have not ended");
            describe_counter!("multirail_registrations_total", "Regions that were registered");
            describe_counter!(
                "multirail_registered_bytes_total",
                "Bytes of the regions that were registered"
            );
            describe_counter!("multirail_staged_bytes_total", "Bytes that went through staging buffers");
            describe_counter!("multirail_coalesced_bytes_total", "Bytes of pages that shared work requests");
        });
        Self { fabric: fabric.downgrade(), recorder, most_peers }
    }

    /// The metrics of now in Prometheus's text format, or `None` if the fabric is gone.
    pub fn render(&self) -> Option<String> {
        let fabric = self.fabric.upgrade()?;
        metrics::with_local_recorder(&self.recorder, || fabric.publish_metrics());
        let mut page = self.recorder.handle().render();
        add_latencies(&mut page, &fabric.operation_counters());
        add_registration_time(&mut page, fabric.registration_counters().time);
        if self.most_peers > 0 {
            add_peers(&mut page, fabric.peer_counters(), self.most_peers);
        }
        Some(page)
    }
}

/// Adds the latencies as histograms. They are counted in buckets already, which a recorder does not take.
fn add_latencies(page: &mut String, transports: &[OperationCounters]) {
    const NAME: &str = "multirail_operation_latency_seconds";
    page.push_str(&format!(
        "# HELP {NAME} From the submission of an operation that succeeded to its end\n# TYPE {NAME} histogram\n"
    ));
    for OperationCounters { transport, sizes, .. } in transports {
        for size in sizes {
            let labels = format!("transport=\"{}\",size=\"{}\"", escaped(transport), size.name());
            let mut count = 0;
            for (longest, operations) in &size.latencies {
                count += operations;
                let end = match *longest {
                    Duration::MAX => "+Inf".to_owned(),
                    longest => longest.as_secs_f64().to_string(),
                };
                page.push_str(&format!("{NAME}_bucket{{{labels},le=\"{end}\"}} {count}\n"));
            }
            let seconds = size.time.as_secs_f64();
            page.push_str(&format!("{NAME}_sum{{{labels}}} {seconds}\n{NAME}_count{{{labels}}} {count}\n"));
        }
    }
}

/// Adds the time of registrations, which is no whole number, as a recorder's counters are.
fn add_registration_time(page: &mut String, time: Duration) {
    const NAME: &str = "multirail_registration_seconds_total";
    page.push_str(&format!("# HELP {NAME} The time that registrations took\n# TYPE {NAME} counter\n"));
    page.push_str(&format!("{NAME} {}\n", time.as_secs_f64()));
}

/// Adds the metrics of each peer, of those with the most bytes. They are no metrics of the recorder, which would keep those
/// of peers that are gone.
fn add_peers(page: &mut String, mut peers: Vec<PeerCounters>, most: usize) {
    type Metric = (&'static str, &'static str, fn(&PeerCounters) -> u64);
    const METRICS: [Metric; 3] = [
        ("multirail_peer_operations_total", "Operations with the peer that succeeded", |peer| {
            peer.operations
        }),
        ("multirail_peer_bytes_total", "Bytes of the operations with the peer that succeeded", |peer| {
            peer.bytes
        }),
        ("multirail_peer_errors_total", "Operations with the peer that failed", |peer| peer.errors),
    ];
    peers.sort_by_key(|peer| Reverse(peer.bytes));
    peers.truncate(most);
    for (name, help, value) in METRICS {
        page.push_str(&format!("# HELP {name} {help}\n# TYPE {name} counter\n"));
        for peer in &peers {
            let (number, host) = (peer.peer, escaped(&peer.host));
            let address = escaped(peer.address.as_deref().unwrap_or_default());
            let labels = format!("peer=\"{number}\",host=\"{host}\",address=\"{address}\"");
            page.push_str(&format!("{name}{{{labels}}} {}\n", value(peer)));
        }
    }
}

/// A label's value as Prometheus's text format writes it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
