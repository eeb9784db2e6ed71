//! Finding and opening devices.

use std::sync::Arc;

use crate::{Clock, Domain, Result};

/// One way to carry bytes: a library and the devices it drives.
pub trait Backend: Send + Sync {
    /// The name users type: `loopback`, `efa`, `verbs`.
    fn name(&self) -> &'static str;

    /// The devices that can be opened now, or why there are none.
    ///
    /// Changes nothing, and leaves nothing open.
    fn probe(&self) -> Probe;

    /// Whether this backend drives devices like `card`, judged by the vendor and device numbers alone. Used for a
    /// machine that is only described, or whose devices cannot be probed.
    fn drives(&self, card: &topology::Function) -> bool {
        let _ = card;
        false
    }

    /// Opens one device of the probed ones.
    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>>;
}

/// The outcome of [`Backend::probe`].
pub type Probe = std::result::Result<Vec<DeviceInfo>, Unavailable>;

/// A device that a backend can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The system's name for it, `rdmap79s0` or `lo0`.
    pub name: String,
    /// What a person should know about the device, in a few words.
    pub about: String,
    /// Line rate in bits per second; `None` where there is no line (memory copies).
    pub link_bits_per_s: Option<u64>,
    /// The PCI function, which tells where in the machine the device is; `None` if the device is no PCI function.
    pub address: Option<topology::Address>,
    /// One worker drives all devices of the same number, where their places in the machine are unknown. Each device
    /// without a number forms a rail group of its own.
    pub group: Option<u32>,
}

/// Why a backend has no device, and what would help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The reason, a sentence without a full stop.
    pub reason: String,
    /// What the user can do, a sentence without a full stop.
    pub remedy: String,
}

/// What the fabric decides for a domain.
#[derive(Clone)]
pub struct DomainSetup {
    /// The fabric's clock. A backend never asks the system for the time.
    pub clock: Arc<dyn Clock>,
    /// The seed of every random choice of the backend.
    pub seed: u64,
    /// The number of this fabric, unique over time on this host.
    pub incarnation: u64,
    /// Whether the thread that drives the endpoints sleeps (`Endpoint::arm`), as a worker does. If not, the backend need
    /// not prepare to wake it.
    pub sleeps: bool,
}
