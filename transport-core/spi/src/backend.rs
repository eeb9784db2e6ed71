//! Finding and opening devices.

use std::sync::Arc;

use crate::Domain;
use crate::{Clock, Result};

/// One way to carry bytes: a library and the devices it drives.
pub trait Backend: Send + Sync {
    /// The name users type: `loopback`, `efa`, `verbs`.
    fn name(&self) -> &'static str;

    /// The devices that can be opened now, or why there are none.
    ///
    /// Opens nothing that stays open and changes nothing.
    fn probe(&self) -> Probe;

    /// Whether `card` is of the kind that this backend drives, as far as its numbers tell: for machines
    /// that are described, and those whose devices cannot be probed. Asks nothing of the system.
    fn drives(&self, card: &topology::Function) -> bool {
        let _ = card;
        false
    }

    /// Opens one device of the probed ones.
    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>>;
}

/// The outcome of [`Backend::probe`].
pub type Probe = std::result::Result<Vec<DeviceInfo>, Unavailable>;

/// A device a backend could open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The system's name for it, `rdmap79s0` or `lo0`.
    pub name: String,
    /// What a person should know about it, in a few words.
    pub about: String,
    /// Line rate in bits per second; `None` where it has none (memory copies).
    pub link_bits_per_s: Option<u64>,
    /// Its PCI function, by which its place in the machine is known; `None` for what has none.
    pub address: Option<topology::Address>,
    /// Devices of one number are driven together, where nothing is known of their places. Those
    /// without one form a rail group of their own.
    pub group: Option<u32>,
}

/// Why a backend has no device, and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The reason, a sentence without a full stop.
    pub reason: String,
    /// What would mend it, a sentence without a full stop.
    pub remedy: String,
}

/// What a domain is opened with: everything it may not choose for itself.
#[derive(Clone)]
pub struct DomainSetup {
    /// The fabric's clock; a backend never asks the system for the time.
    pub clock: Arc<dyn Clock>,
    /// Seed of every random choice the backend makes.
    pub seed: u64,
    /// This opening of the fabric, unique over time on this host.
    pub incarnation: u64,
    /// Whether who drives the endpoints sleeps in between (`Endpoint::arm`), as workers do. Where not,
    /// a backend need not pay for being able to wake it.
    pub sleeps: bool,
}
