//! The virtual trials on a simulated p5 under bad conditions: 32 devices with small queues that accept batches in part,
//! accept nothing for a while, and complete in any order. Each seed has other conditions.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail_conformance::{BackendUnderTest, TransportShape, TrialTag, Variant};
use transport_core::TransportConfig;
use transport_core::spi::{Backend, DeviceInfo};

/// The number of EFA devices of a p5.48xlarge.
const DEVICES: u32 = 32;

struct P5;

impl BackendUnderTest for P5 {
    fn name(&self) -> &str {
        "p5"
    }

    fn rails(&self) -> u32 {
        DEVICES
    }

    fn runs_tag(&self, tag: TrialTag) -> bool {
        tag == TrialTag::Virtual
    }

    /// A few seeds by default; `ci/p5-seeds` runs many.
    fn seeds(&self) -> u64 {
        6
    }

    /// One variant stands for all data paths, unless a trial needs queues that do not fill up.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        let special = [Variant::Slow, Variant::Late, Variant::Doomed, Variant::Faulty];
        let mut variants: Vec<_> =
            asked.iter().copied().filter(|variant| special.contains(variant)).collect();
        let small = asked == [Variant::Plain]
            || asked.iter().any(|variant| [Variant::SmallQueue, Variant::Partial].contains(variant));
        if small {
            variants.push(Variant::Unruly);
        } else if variants.len() < asked.len() {
            variants.push(Variant::Reorder);
        }
        variants
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        let backend = Loopback::with(
            LoopbackConfig::default()
                .devices(shape.rails)
                .groups(if shape.rails == 32 && shape.seed.is_multiple_of(8) { 8 } else { 1 })
                .link(link_model(shape)),
        );
        let devices = devices(&backend)?;
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

/// The devices that a fabric opens. A p5 has a rail group of four devices next to each of its eight GPUs.
fn devices(backend: &Loopback) -> Result<Vec<DeviceInfo>, String> {
    backend.probe().map_err(|why| why.reason)
}

/// The link model of a device, with bad conditions that the seed chooses.
fn link_model(shape: TransportShape) -> LinkModel {
    let mut random = fastrand::Rng::with_seed(shape.seed);
    let link = LinkModel {
        send_depth: Some(random.u32(2..=32)),
        half_one_in: Some(random.u32(2..=6)),
        burst_one_in: Some(random.u32(4..=16)),
        burst: Duration::from_micros(random.u64(1..=100)),
        jitter: Duration::from_micros(random.u64(2..=50)),
        ..LinkModel::p5()
    };
    match shape.variant {
        Variant::Slow => LinkModel { latency: Variant::SLOW, ..link },
        Variant::Late => LinkModel { visible_after: Variant::LATE, ..LinkModel::p5() },
        Variant::Doomed => LinkModel { lose_device_after: Some(Variant::LOST_AFTER), ..link },
        Variant::Faulty => LinkModel { fail_every: Some(Variant::FAULT_EVERY), ..link },
        Variant::Reorder => LinkModel { jitter: link.jitter, ..LinkModel::p5() },
        _ => link,
    }
}

fn main() -> ExitCode {
    multirail_conformance::main(vec![Arc::new(P5)])
}
