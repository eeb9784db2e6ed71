//! The classes that describe an operation that has succeeded.

use multirail::{Outcome as CoreOutcome, PeerId, Receipt as CoreReceipt};
use pyo3::prelude::*;

/// The result of a transfer.
#[pyclass(frozen, module = "multirail", from_py_object)]
#[derive(Clone)]
pub struct Outcome(CoreOutcome);

impl Outcome {
    pub fn new(outcome: CoreOutcome) -> Self {
        Self(outcome)
    }
}

#[pymethods]
impl Outcome {
    /// The bytes that were moved; for a receive, the bytes of the message.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The number of work requests. 0 for receives, and for operations that ran in the calling thread.
    #[getter]
    fn work_requests(&self) -> u32 {
        self.0.work_requests
    }

    /// Pages, or entries of a list, that shared a work request with the one before them.
    #[getter]
    fn merged(&self) -> u32 {
        self.0.merged
    }

    /// The number of the peer that has sent the message (receives only).
    #[getter]
    fn peer(&self) -> Option<u64> {
        self.0.peer.map(PeerId::number)
    }

    /// The message's immediate data (receives only).
    #[getter]
    fn imm(&self) -> Option<u32> {
        self.0.imm
    }

    fn __repr__(&self) -> String {
        let CoreOutcome { bytes, work_requests, merged, .. } = self.0;
        format!("Outcome(bytes={bytes}, work_requests={work_requests}, merged={merged})")
    }
}

/// How an operation went: its times in seconds, and what each rail carried.
#[pyclass(frozen, module = "multirail")]
pub struct Receipt(CoreReceipt);

impl Receipt {
    pub fn new(receipt: CoreReceipt) -> Self {
        Self(receipt)
    }
}

#[pymethods]
impl Receipt {
    /// The bytes that were moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// As in `Outcome`.
    #[getter]
    fn work_requests(&self) -> u32 {
        self.0.work_requests
    }

    /// As in `Outcome`.
    #[getter]
    fn merged(&self) -> u32 {
        self.0.merged
    }

    /// Seconds from the submission until the devices had accepted the last work request.
    #[getter]
    fn post(&self) -> f64 {
        self.0.post.as_secs_f64()
    }

    /// Seconds from the submission until all bytes were delivered.
    #[getter]
    fn transfer(&self) -> f64 {
        self.0.transfer.as_secs_f64()
    }

    /// What each rail carried. The bytes of all rails add up to `bytes`.
    #[getter]
    fn rails(&self) -> Vec<RailReceipt> {
        let rail = |rail: &multirail::RailReceipt| RailReceipt {
            transport: rail.transport.clone(),
            rail: rail.rail,
            device: rail.device.clone(),
            bytes: rail.bytes,
            path: rail.path.to_string(),
        };
        self.0.rails.iter().map(rail).collect()
    }

    fn __repr__(&self) -> String {
        let rail =
            |rail: &multirail::RailReceipt| format!("{}: {} bytes by {}", rail.device, rail.bytes, rail.path);
        let rails: Vec<_> = self.0.rails.iter().map(rail).collect();
        format!("<Receipt {} bytes in {:?}; {}>", self.0.bytes, self.0.transfer, rails.join(", "))
    }
}

/// What one rail carried of an operation.
#[pyclass(frozen, get_all, module = "multirail")]
pub struct RailReceipt {
    /// The label of the transport; `None` if the calling thread moved the bytes itself.
    transport: Option<String>,
    /// The rail's position in its transport.
    rail: u32,
    /// The name of the rail's device.
    device: String,
    /// The bytes that the rail carried.
    bytes: u64,
    /// The paths that these bytes took, with commas between them.
    path: String,
}
