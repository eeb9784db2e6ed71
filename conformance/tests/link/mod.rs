//! The link models of loopback's devices in each variant.

use std::time::Duration;

use backend_loopback::LinkModel;
use multirail_conformance::Variant;

pub fn of(variant: Variant) -> LinkModel {
    let link = LinkModel::default();
    match variant {
        Variant::Plain | Variant::Queued => link,
        Variant::SmallQueue => LinkModel { send_depth: Some(Variant::SMALL_DEPTH), ..link },
        Variant::Partial => LinkModel { accept_at_most: Some(3), ..link },
        Variant::Reorder => LinkModel {
            reorder: true,
            latency: Duration::from_micros(10),
            jitter: Duration::from_micros(200),
            ..link
        },
        Variant::Unruly => LinkModel {
            send_depth: Some(2 * Variant::SMALL_DEPTH),
            half_one_in: Some(3),
            burst_one_in: Some(5),
            burst: Duration::from_micros(50),
            reorder: true,
            latency: Duration::from_micros(10),
            jitter: Duration::from_micros(30),
            ..link
        },
        Variant::Slow => LinkModel { latency: Variant::SLOW, ..link },
        Variant::Late => LinkModel { visible_after: Variant::LATE, ..link },
        Variant::Doomed => LinkModel { lose_device_after: Some(Variant::LOST_AFTER), ..link },
        Variant::Faulty => LinkModel { fail_every: Some(Variant::FAULT_EVERY), ..link },
    }
}
