//! Names of endpoints of libfabric's `shm` provider. Each name is that of a file in /dev/shm.
//!
//! The provider's own names contain the process's number. A killed process leaves its files behind. The next process
//! with the same number could not open its endpoint; in a restarted container that is most often the same program. If
//! containers share /dev/shm, two live processes can have the same number. So the backend chooses the names. Each name
//! has a second file, which the process keeps locked. The next process that opens an endpoint, in any container,
//! removes the files that no process has locked.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Result};

use crate::objects::Fid;
use crate::region::random_number;
use crate::status::call_error;

/// The folder of the provider's files (`SMR_DIR`, include/ofi_shm.h).
const DIR: &str = "/dev/shm";
/// The prefix of the provider's addresses. The name of the file is the rest (`smr_no_prefix`, in the same header).
const SCHEME: &str = "fi_shm://";
/// The prefix of this backend's names. The process's PID namespace, its number, and a random number follow.
const PREFIX: &str = "multirail:";
const LOCK_SUFFIX: &str = ".lock";

/// A name that an endpoint uses. Dropped after the endpoint.
pub(crate) struct LockedName {
    /// The second file. It stays locked as long as it is open.
    _lock: File,
    /// The path of the second file.
    path: PathBuf,
}

impl Drop for LockedName {
    fn drop(&mut self) {
        // An error means that somebody has removed the file by hand.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives a new name to an endpoint that is not enabled yet.
pub(crate) fn give_name(ep: &Fid<sys::fid_ep>) -> Result<LockedName> {
    remove_stale(Path::new(DIR));
    let start = format!("{PREFIX}{}:{}", pid_namespace(), std::process::id());
    let (name, text) = lock_new_name(Path::new(DIR), &start)?;
    let mut address = format!("{SCHEME}{text}\0").into_bytes();
    // SAFETY: the endpoint is open, and copies the address, whose length includes its final zero.
    match unsafe { sys::fi_setname(ep.as_ptr(), address.as_mut_ptr().cast(), address.len()) } {
        0 => Ok(name),
        code => Err(call_error("open", "a name for its endpoint", code)),
    }
}

/// Creates and locks a new name that begins with `start`.
fn lock_new_name(dir: &Path, start: &str) -> Result<(LockedName, String)> {
    let refused = |why| Error::os("open", format!("a lock for an endpoint of shm in {}", dir.display()), why);
    loop {
        let text = format!("{start}:{:016x}", random_number("open")?);
        let path = dir.join(format!("{text}{LOCK_SUFFIX}"));
        let lock = OpenOptions::new().write(true).create_new(true).open(&path).map_err(refused)?;
        // Between creating and locking, another process may have removed the file, because it was not locked.
        match lock.try_lock() {
            Ok(()) if path.exists() => return Ok((LockedName { _lock: lock, path }, text)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(why)) => return Err(refused(why)),
        }
    }
}

/// Removes the files of processes that have ended.
fn remove_stale(dir: &Path) {
    for file in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(name) = file.file_name().into_string() else { continue };
        let Some(left) = name.strip_suffix(LOCK_SUFFIX).filter(|name| name.starts_with(PREFIX)) else {
            continue;
        };
        // Files of other users cannot be opened.
        let Ok(lock) = File::open(file.path()) else { continue };
        if lock.try_lock().is_ok() {
            // An error is harmless: the process ended before the provider made its file, or another process removes it
            // now.
            let removed = [dir.join(left), file.path()].map(std::fs::remove_file);
            tracing::debug!(left, ?removed, "removed files of a process that has ended");
        }
    }
}

/// Refuses the address of a peer in another PID namespace. To copy to or from a peer, the provider uses the number that
/// the peer's process has in the peer's namespace (`smr_cma_check`; 1.17, 2.1). In this namespace, another process may
/// have that number.
pub(crate) fn check_reachable(address: &[u8]) -> Result<()> {
    let text = std::str::from_utf8(address).ok().and_then(|text| text.strip_prefix(SCHEME));
    let theirs = text.and_then(|text| text.strip_prefix(PREFIX)?.split(':').next()?.parse().ok());
    if theirs.is_none_or(|theirs: u64| theirs == pid_namespace()) {
        return Ok(());
    }
    let why = "the peer is in another PID namespace, and libfabric's shm copies by process numbers: share the \
               namespace between the containers (--pid), or use loopback or tcp";
    Err(Error::new(ErrorKind::Unreachable, "connect", why))
}

/// The number of this process's PID namespace; 0 if it is unknown.
fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |link| link.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlocked_files_are_removed() {
        let dir = std::env::temp_dir().join(format!("multirail-shm-names-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (name, text) = lock_new_name(&dir, "multirail:1:2").unwrap();
        let kept = [text.as_str(), &format!("{text}{LOCK_SUFFIX}"), "multirail:1:2:3", "1:2:3", "x.lock"];
        let left = ["multirail:1:2:4", "multirail:1:2:4.lock", "multirail:5:6:7.lock"];
        for file in kept.iter().chain(&left).filter(|file| !dir.join(file).exists()) {
            std::fs::write(dir.join(file), b"").unwrap();
        }
        remove_stale(&dir);
        let is_there = |name: &&str| dir.join(name).exists();
        let (kept, left) = (kept.iter().all(is_there), left.iter().any(is_there));
        drop(name);
        let is_locked = dir.join(format!("{text}{LOCK_SUFFIX}")).exists();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(kept && !left && !is_locked, "kept: {kept}, left: {left}, still locked: {is_locked}");
    }

    #[test]
    fn peers_in_other_pid_namespaces_are_refused() {
        let address = |namespace| format!("{SCHEME}{PREFIX}{namespace}:7:00\0").into_bytes();
        assert!(check_reachable(&address(pid_namespace())).is_ok());
        let refusal = check_reachable(&address(pid_namespace() + 1)).unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Unreachable);
        // The provider has named this endpoint itself.
        assert!(check_reachable(b"fi_shm://7:0:0\0").is_ok());
    }
}
