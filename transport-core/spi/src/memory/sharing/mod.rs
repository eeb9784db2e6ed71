//! How this process shares memory with other processes of its host.
//!
//! There are two ways, one module each. They are not compatible: both processes must use the same one.

#[cfg(target_os = "linux")]
mod linux;
mod portable;

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use crate::{Error, ErrorKind, Result};

/// The variable that chooses the portable path on Linux.
const VARIABLE: &str = "MULTIRAIL_LOOPBACK_PORTABLE";

/// The calls by which processes of one host share memory and watch each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostSharing {
    /// Linux's own: memfd, seals, pidfd, `process_vm_writev`. The default on Linux.
    #[cfg(target_os = "linux")]
    Linux,
    /// The portable path: POSIX shared memory and Unix sockets, which macOS has too. On Linux it serves tests, and is
    /// chosen by `MULTIRAIL_LOOPBACK_PORTABLE=1`.
    Portable,
}

impl HostSharing {
    /// The way of this process. The first call reads the environment, and later calls return the same.
    ///
    /// # Errors
    /// `InvalidRequest` if `MULTIRAIL_LOOPBACK_PORTABLE` has a value that is neither 0 nor 1, or if it is 0 on a system
    /// that has only the portable path.
    pub fn of_this_process() -> Result<Self> {
        static CHOICE: OnceLock<std::result::Result<HostSharing, String>> = OnceLock::new();
        let choice = CHOICE.get_or_init(|| {
            let given = std::env::var_os(VARIABLE).unwrap_or_default();
            Self::from_setting(&given.to_string_lossy())
        });
        choice.clone().map_err(|why| Error::new(ErrorKind::InvalidRequest, "read the environment", why))
    }

    /// The way that a value of the variable means.
    fn from_setting(given: &str) -> std::result::Result<Self, String> {
        match given.trim() {
            "1" => Ok(Self::Portable),
            #[cfg(target_os = "linux")]
            "" | "0" => Ok(Self::Linux),
            #[cfg(not(target_os = "linux"))]
            "" => Ok(Self::Portable),
            wrong => {
                let allowed =
                    if cfg!(target_os = "linux") { "0 or 1" } else { "1: this system has no other path" };
                Err(format!("{VARIABLE} is {wrong:?}; give {allowed}"))
            }
        }
    }

    /// Returns true for [`HostSharing::Portable`].
    pub fn is_portable(self) -> bool {
        self == Self::Portable
    }

    /// Makes a zeroed file of `len` bytes in memory, which other processes can map and which has no name. `Linux` seals
    /// it against resizing.
    pub(crate) fn create_file(self, len: usize) -> std::io::Result<OwnedFd> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Linux => linux::create_file(len),
            Self::Portable => portable::create_file(len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_is_an_error() {
        assert_eq!(HostSharing::from_setting(" 1 "), Ok(HostSharing::Portable));
        assert_eq!(HostSharing::from_setting("").unwrap().is_portable(), !cfg!(target_os = "linux"));
        assert_eq!(HostSharing::from_setting("0").is_ok(), cfg!(target_os = "linux"));
        for wrong in ["yes", "2", "-"] {
            assert!(HostSharing::from_setting(wrong).unwrap_err().contains(VARIABLE));
        }
    }
}
