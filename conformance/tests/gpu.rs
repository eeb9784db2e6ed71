//! The suite against loopback with GPU memory: on the source side, on the target side, and on both sides. A fourth run
//! has GPU memory on both sides and stages all bytes through host memory.
//!
//! With two GPUs the source is on the first and the target on the second. With one GPU both are on it. Without a GPU
//! all runs are skipped.

use std::process::ExitCode;
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use cuda::{CudaMemory, Device};
use multirail_conformance::{BackendUnderTest, KnownFailure, TransferSide, TransportShape, Variant};
use staging::{Staged, StagingPolicy};
use transport_core::{Memory, TransportConfig};

/// No trial fails. An entry whose trial passes fails the suite.
const KNOWN_FAILURES: &[KnownFailure] = &[];

/// The sides with GPU memory, by the name of the backend under test.
const BACKENDS: [(&str, &[TransferSide]); 4] = [
    ("gpu-source", &[TransferSide::Source]),
    ("gpu-target", &[TransferSide::Target]),
    ("gpu-both", &[TransferSide::Source, TransferSide::Target]),
    (STAGED, &[TransferSide::Source, TransferSide::Target]),
];

/// The backend whose memory is staged.
const STAGED: &str = "gpu-staged";

/// Skipped trials, with the reason.
const SKIPPED: [(&str, &str); 1] =
    [("order::one_seed_one_hash", "the virtual clock does not control when a GPU completes its work")];

/// Skipped trials where memory is staged; `staging.rs` has the full list.
const NOT_STAGED: [(&str, &str); 4] = [
    ("futures::wait_drives", "the target has to run turns to move staged bytes, and this trial runs none"),
    (
        "futures::any_wait_drives",
        "the target has to run turns to move staged bytes, and this trial runs none",
    ),
    (
        "groups::another_transports_grant_is_not_used",
        "the target has to run turns to move staged bytes, and this trial runs none",
    ),
    (
        "forgery::more_bytes",
        "an import does not ask the target: the target checks arriving bytes against the true length",
    ),
];

struct GpuMemory {
    name: &'static str,
    sides: &'static [TransferSide],
    gpus: Vec<Device>,
}

impl BackendUnderTest for GpuMemory {
    fn name(&self) -> &str {
        self.name
    }

    /// Only `Plain`: a GPU changes only the memory, and the suite against loopback covers the link model. A trial
    /// without `Plain` is shown as skipped.
    fn variants(&self, asked: &[Variant]) -> Vec<Variant> {
        if asked.contains(&Variant::Plain) { vec![Variant::Plain] } else { asked[..1].to_vec() }
    }

    fn known_failures(&self) -> &[KnownFailure] {
        KNOWN_FAILURES
    }

    fn skip_reason(&self, trial: &str) -> Option<&str> {
        let not_staged = if self.name == STAGED { &NOT_STAGED[..] } else { &[] };
        SKIPPED.iter().chain(not_staged).find(|(name, _)| *name == trial).map(|(_, why)| *why)
    }

    fn transport(&self, label: &str, shape: TransportShape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err("the link model needs host memory; the suite against loopback covers it".to_owned());
        }
        let backend = Arc::new(Loopback::with(LoopbackConfig::default().devices(shape.rails)));
        Ok(match self.name {
            STAGED => TransportConfig::new(label, Arc::new(Staged::new(backend, StagingPolicy::Always))),
            _ => TransportConfig::new(label, backend),
        })
    }

    fn has_gpus(&self) -> bool {
        true
    }

    fn memory(&self, side: TransferSide, len: usize) -> Result<Option<Arc<dyn Memory>>, String> {
        if !self.sides.contains(&side) {
            return Ok(None);
        }
        let number = if side == TransferSide::Source { 0 } else { self.gpus.len() - 1 };
        let memory = CudaMemory::new(&self.gpus[number.min(1)], len).map_err(|why| why.to_string())?;
        Ok(Some(Arc::new(memory)))
    }
}

fn main() -> ExitCode {
    let gpus = match Device::all() {
        Ok(gpus) => gpus,
        Err(why) => {
            let backends = BACKENDS.map(|(name, _)| (name, (|| ()) as fn()));
            return multirail_conformance::run_or_skip(Some(why.to_string()), &backends);
        }
    };
    for gpu in &gpus {
        // CUDA opens descriptors at its first use. They must be open before trials count descriptors.
        if let Err(why) = CudaMemory::new(gpu, 1).and_then(|memory| memory.copy_in(0, &[1])) {
            eprintln!("GPU {} cannot be used: {why}", gpu.ordinal());
            return ExitCode::FAILURE;
        }
    }
    let under_test =
        |(name, sides)| Arc::new(GpuMemory { name, sides, gpus: gpus.clone() }) as Arc<dyn BackendUnderTest>;
    multirail_conformance::main(BACKENDS.map(under_test).into())
}
