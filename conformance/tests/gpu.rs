//! The suite against loopback with memory of GPUs: at the source, at the target, at both; and at both, where all is
//! staged through the host's memory. With two GPUs the source is on the first and the target on the second, with one
//! both are on it; without any each subject is skipped, and says so.

use std::process::ExitCode;
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use cuda::{CudaMemory, Device};
use multirail_conformance::{BackendUnderTest, KnownFailure, Shape, Side, Variant};
use staging::{Staged, Staging};
use transport_core::{Memory, TransportConfig};

/// None; an entry whose trial passes fails the suite.
const KNOWN_FAILURES: &[KnownFailure] = &[];

/// Which ends are on a GPU, by the subject's name.
const SUBJECTS: [(&str, &[Side]); 4] = [
    ("gpu-source", &[Side::Source]),
    ("gpu-target", &[Side::Target]),
    ("gpu-both", &[Side::Source, Side::Target]),
    (STAGED, &[Side::Source, Side::Target]),
];

/// The one whose memory is staged.
const STAGED: &str = "gpu-staged";

/// What makes no sense here, by trial.
const SKIPPED: [(&str, &str); 1] =
    [("order::one_seed_one_hash", "when a GPU is done, no clock of a trial decides")];

/// The same where memory is staged, whose own suite has the reasons (`staging.rs`).
const NOT_STAGED: [(&str, &str); 4] = [
    ("futures::wait_drives", "the target's turns move staged bytes, and here nobody takes them"),
    ("futures::any_wait_drives", "the target's turns move staged bytes, and here nobody takes them"),
    (
        "groups::another_transports_grant_is_not_used",
        "the target's turns move staged bytes, and here nobody takes them",
    ),
    ("forgery::more_bytes", "an import asks nobody: the target checks what comes, against the true length"),
];

struct GpuMemory {
    name: &'static str,
    sides: &'static [Side],
    gpus: Vec<Device>,
}

impl BackendUnderTest for GpuMemory {
    fn name(&self) -> &str {
        self.name
    }

    /// The link model is loopback's own suite's: what a GPU adds is the memory alone. A trial that is of
    /// nothing else is shown as skipped.
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

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err("the link model runs on memory of the host, in the suite against loopback".to_owned());
        }
        let backend = Arc::new(Loopback::with(LoopbackConfig::default().devices(shape.rails)));
        Ok(match self.name {
            STAGED => TransportConfig::new(label, Arc::new(Staged::new(backend, Staging::Always))),
            _ => TransportConfig::new(label, backend),
        })
    }

    fn has_gpus(&self) -> bool {
        true
    }

    fn memory(&self, side: Side, len: usize) -> Result<Option<Arc<dyn Memory>>, String> {
        if !self.sides.contains(&side) {
            return Ok(None);
        }
        let number = if side == Side::Source { 0 } else { self.gpus.len() - 1 };
        let memory = CudaMemory::new(&self.gpus[number.min(1)], len).map_err(|why| why.to_string())?;
        Ok(Some(Arc::new(memory)))
    }
}

fn main() -> ExitCode {
    let gpus = match Device::all() {
        Ok(gpus) => gpus,
        Err(why) => {
            let backends = SUBJECTS.map(|(name, _)| (name, (|| ()) as fn()));
            return multirail_conformance::run_or_skip(Some(why.to_string()), &backends);
        }
    };
    for gpu in &gpus {
        // CUDA opens descriptors at its first use, which trials that count them must not see.
        if let Err(why) = CudaMemory::new(gpu, 1).and_then(|memory| memory.copy_in(0, &[1])) {
            eprintln!("GPU {} cannot be used: {why}", gpu.ordinal());
            return ExitCode::FAILURE;
        }
    }
    let under_test =
        |(name, sides)| Arc::new(GpuMemory { name, sides, gpus: gpus.clone() }) as Arc<dyn BackendUnderTest>;
    multirail_conformance::main(SUBJECTS.map(under_test).into())
}
