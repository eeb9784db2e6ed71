//! Finding and opening devices, and the settings of a backend.

use std::str::FromStr;
use std::sync::Arc;

use crate::{Clock, Domain, Error, ErrorKind, Result};

/// One way to carry bytes: a library and the devices it drives.
pub trait Backend: Send + Sync {
    /// The name users type: `loopback`, `efa`, `verbs`.
    fn name(&self) -> &'static str;

    /// The devices that can be opened now, or why there are none.
    ///
    /// Changes nothing, and leaves nothing open.
    fn probe(&self) -> Probe;

    /// Whether this backend drives devices like `card`. It decides by the vendor and device numbers alone. Used for
    /// machines whose devices cannot be probed: for example, machines that a topology file describes.
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
    /// The number of the device's rail group, used if the place of the device in the machine is unknown. Devices with
    /// the same number form one rail group. Each device without a number forms its own.
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
    /// The fabric's clock. A backend asks the system for the time only to limit a call that blocks.
    pub clock: Arc<dyn Clock>,
    /// The seed of every random choice of the backend.
    pub seed: u64,
    /// The number of this fabric. No other fabric of this host ever has the same number.
    pub incarnation: u64,
    /// Whether a worker drives the endpoints, and sleeps when it is idle (`Endpoint::arm`). If not, the backend need
    /// not prepare to wake anybody.
    pub worker_sleeps: bool,
}

/// When bytes may go through staging buffers. The worker of each process then copies the bytes between its own staging
/// buffer and the memory of the transfer. Staging costs a second copy, and the time of these workers.
///
/// Both processes must allow it. `RemoteRegion::path` says which path an import takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StagingPolicy {
    /// Never. Memory that the backend cannot reach is refused, with the reason.
    #[default]
    Never,
    /// For memory that the backend cannot reach. With loopback, this is memory of a process that the kernel does not
    /// let this process access. With NICs, it is GPU memory that the NIC cannot register.
    WhereRefused,
    /// For all memory, even if the backend can reach it: for tests and measurements.
    Always,
}

impl FromStr for StagingPolicy {
    type Err = Error;

    /// Parses a setting. `0` and an empty text mean [`Never`](Self::Never), `1` means
    /// [`WhereRefused`](Self::WhereRefused), and `always` means [`Always`](Self::Always).
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.trim() {
            "" | "0" => Ok(Self::Never),
            "1" => Ok(Self::WhereRefused),
            "always" => Ok(Self::Always),
            other => {
                let context = format!("{other:?} is no setting for staging: give 0, 1 or always");
                Err(Error::new(ErrorKind::InvalidRequest, "configure staging", context))
            }
        }
    }
}

/// Whether small pages of an operation share large work requests, through slots of both sides: they are *coalesced*. The
/// worker of each process then copies the pages between its own slots and the memory of the transfer.
///
/// Pays if a device's rate of requests is the limit, and not its line. Both processes must allow it. Larger pages than
/// [`RemoteMemory::max_coalesced`](crate::RemoteMemory::max_coalesced) never are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CoalescePolicy {
    /// Each page has a work request, or shares one with its neighbours in both memories.
    #[default]
    Never,
    /// The faster way, by a cost model: from the device's line rate and rate of requests, the number and the size of the
    /// pages, and what copies cost. Large pages and few pages go directly.
    Auto,
    /// All pages that are small enough.
    Always,
}

impl CoalescePolicy {
    /// The name, as a command line and a setting spell it: `never`, `auto` or `always`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Auto => "auto",
            Self::Always => "always",
        }
    }
}

impl FromStr for CoalescePolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        [Self::Never, Self::Auto, Self::Always]
            .into_iter()
            .find(|policy| policy.name() == text.trim())
            .ok_or_else(|| {
                let context = format!("{text:?} says nothing about coalescing: give never, auto or always");
                Error::new(ErrorKind::InvalidRequest, "configure coalescing", context)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_setting() {
        assert_eq!("".parse::<StagingPolicy>().unwrap(), StagingPolicy::Never);
        assert_eq!(" 1 ".parse::<StagingPolicy>().unwrap(), StagingPolicy::WhereRefused);
        assert_eq!("always".parse::<StagingPolicy>().unwrap(), StagingPolicy::Always);
        let refused = "yes".parse::<StagingPolicy>().unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidRequest && refused.context().contains("0, 1 or always"));
    }

    #[test]
    fn policies_are_read_as_they_are_written() {
        for policy in [CoalescePolicy::Never, CoalescePolicy::Auto, CoalescePolicy::Always] {
            assert_eq!(policy.name().parse::<CoalescePolicy>().unwrap(), policy);
        }
        assert!("1".parse::<CoalescePolicy>().unwrap_err().context().contains("never, auto or always"));
    }
}
