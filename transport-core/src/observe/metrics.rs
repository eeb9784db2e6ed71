//! Counters through the `metrics` facade.

use metrics::{counter, gauge};

use crate::Fabric;

impl Fabric {
    /// Publishes the counters of all rails to the installed recorder of the `metrics` crate. Call it before each
    /// scrape: the engines do not update metrics by themselves.
    ///
    /// The counters are `multirail_rail_*_total`, with the labels `transport`, `backend`, `rail` and `device`. The
    /// gauge `multirail_peers` is the number of connected peers. If a process has two fabrics, their transports need
    /// different labels.
    pub fn publish_metrics(&self) {
        for rail in self.counters() {
            let labels = [
                ("transport", rail.transport),
                ("backend", rail.backend),
                ("rail", rail.rail.to_string()),
                ("device", rail.device),
            ];
            counter!("multirail_rail_posts_total", &labels).absolute(rail.posts);
            counter!("multirail_rail_doorbells_total", &labels).absolute(rail.doorbells);
            counter!("multirail_rail_bytes_total", &labels).absolute(rail.bytes);
            counter!("multirail_rail_completions_total", &labels).absolute(rail.completions);
            counter!("multirail_rail_errors_total", &labels).absolute(rail.errors);
            counter!("multirail_rail_queue_full_total", &labels).absolute(rail.queue_full);
            counter!("multirail_rail_retries_total", &labels).absolute(rail.retries);
            counter!("multirail_rail_grant_waits_total", &labels).absolute(rail.grant_waits);
            counter!("multirail_rail_direct_total", &labels).absolute(rail.direct);
            counter!("multirail_rail_direct_bytes_total", &labels).absolute(rail.direct_bytes);
        }
        gauge!("multirail_peers").set(self.peer_count() as f64);
    }
}
