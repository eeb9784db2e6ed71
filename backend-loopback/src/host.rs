//! The host, kernel instance and namespaces of this process, and the system's random numbers.

use multirail_spi::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Two processes whose `HostIdentity` is equal can share memory, and can name each other by process id. The default
/// value stands for no host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostIdentity {
    /// The kernel's random boot id. Zero if the system has none.
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
        let obstacle = if self.boot != there.boot {
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

#[cfg(target_os = "linux")]
fn boot() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}

/// The inode of this process's namespace of that kind. 0 if there is none.
#[cfg(target_os = "linux")]
pub(crate) fn namespace(kind: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |file| file.ino())
}

#[cfg(not(target_os = "linux"))]
fn boot() -> u128 {
    0
}

#[cfg(not(target_os = "linux"))]
fn namespace(_: &str) -> u64 {
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
