//! The host, kernel instance and namespaces of this process, and the system's random numbers.

use multirail_spi::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Two processes whose `HostIdentity` is equal can share memory, and can name each other by process id. The default
/// value stands for no host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostIdentity {
    /// The kernel's random boot id. Zero if the system tells none.
    pub(crate) boot: u128,
    /// The pid namespace: a pid has a meaning only in its own one.
    pub(crate) pids: u64,
    /// The network namespace, to which abstract socket names belong.
    pub(crate) network: u64,
    /// The effective user.
    pub(crate) user: u32,
}

impl HostIdentity {
    /// The host of this process.
    pub(crate) fn here() -> Self {
        Self { boot: boot(), pids: namespace("pid"), network: namespace("net"), user: user() }
    }

    /// The reason why a process on `there` cannot share memory with this one, or `None` if it can.
    pub(crate) fn obstacle(&self, there: &Self) -> Option<String> {
        let obstacle = if self.boot == 0 && cfg!(not(target_os = "linux")) {
            "this system tells no boot id (sysctl kern.bootsessionuuid), by which processes of one host know each \
             other: use a network transport"
        } else if self.boot != there.boot {
            "the peer runs on another host, or this one rebooted: use a network transport"
        } else if self.pids != there.pids {
            "the peer is in another pid namespace: share it (docker: --pid=container:... or --pid=host)"
        } else if self.network != there.network {
            "the peer is in another network namespace: share it (docker: --network=container:...)"
        } else if self.user != there.user {
            let (ours, theirs) = (self.user, there.user);
            return Some(format!(
                "the peer runs as another user (user {theirs}, this process is user {ours}): run both processes \
                 as one user, or use a network transport"
            ));
        } else {
            return None;
        };
        Some(obstacle.into())
    }
}

/// Random bytes that no other process can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| {
        Error::new(ErrorKind::Io, "open", "the system has no randomness; check /dev/urandom").with_source(e)
    })?;
    Ok(bytes)
}

fn boot() -> u128 {
    u128::from_str_radix(&boot_id().trim().replace('-', ""), 16).unwrap_or(0)
}

#[cfg(target_os = "linux")]
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// XNU draws it at each boot (bsd/kern/kern_sysctl.c).
#[cfg(target_vendor = "apple")]
fn boot_id() -> String {
    let mut text = [0_u8; 64];
    let mut len = text.len();
    // SAFETY: the kernel writes at most `len` bytes of an array of this function, and then their number to `len`.
    let result = unsafe {
        let into = text.as_mut_ptr().cast();
        libc::sysctlbyname(c"kern.bootsessionuuid".as_ptr(), into, &raw mut len, std::ptr::null_mut(), 0)
    };
    let text = text.get(..len).filter(|_| result == 0).unwrap_or_default();
    String::from_utf8_lossy(text).trim_end_matches('\0').into()
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn boot_id() -> String {
    String::new()
}

/// The inode of this process's namespace of that kind. 0 if there is none.
#[cfg(target_os = "linux")]
pub(crate) fn namespace(kind: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |file| file.ino())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn namespace(_: &str) -> u64 {
    0
}

#[cfg(unix)]
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(not(unix))]
fn user() -> u32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obstacles_are_named() {
        let here = HostIdentity::here();
        assert_eq!(here.obstacle(&HostIdentity::here()), None);
        assert!(here.obstacle(&HostIdentity { boot: !here.boot, ..here }).unwrap().contains("another host"));
        assert!(here.obstacle(&HostIdentity { pids: 1, ..here }).unwrap().contains("pid namespace"));
        assert!(
            here.obstacle(&HostIdentity { user: here.user ^ 1, ..here }).unwrap().contains("another user")
        );
    }
}
