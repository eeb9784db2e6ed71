//! Names of endpoints of libfabric's `shm`, which are files of /dev/shm.
//!
//! The provider makes them of the process's number. A killed process leaves its files behind, and who is
//! given the number next (in a container that starts anew, most often the same one) could not open its
//! endpoint; where containers share /dev/shm, two that live have one number. So names are chosen here. Beside
//! each lies a file that its process keeps locked: what nobody holds is removed by the next one that opens an
//! endpoint, whatever container it is in.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use libfabric_sys as sys;
use multirail_spi::{Error, ErrorKind, Result};

use crate::objects::Fid;
use crate::region::random;
use crate::status::refused;

/// Where the provider's files are (`SMR_DIR`, include/ofi_shm.h).
const DIR: &str = "/dev/shm";
/// What the provider's addresses begin with; the file has the rest (`smr_no_prefix`, there).
const SCHEME: &str = "fi_shm://";
/// What names begin with; then come the namespace and number of the process, and what makes it the only one.
const OURS: &str = "multirail:";
const LOCK: &str = ".lock";

/// A name in use. Dropped after the endpoint that has it.
pub(crate) struct Name {
    /// Locked as long as it is open.
    _lock: File,
    path: PathBuf,
}

impl Drop for Name {
    fn drop(&mut self) {
        // Another may have removed it by hand.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives an endpoint that is not enabled yet a name that nobody has.
pub(crate) fn give_name(ep: &Fid<sys::fid_ep>) -> Result<Name> {
    sweep(Path::new(DIR));
    let start = format!("{OURS}{}:{}", namespace(), std::process::id());
    let (name, text) = hold(Path::new(DIR), &start)?;
    let mut address = format!("{SCHEME}{text}\0").into_bytes();
    // SAFETY: the endpoint is open, and copies the name, whose length counts its zero.
    match unsafe { sys::fi_setname(ep.as_ptr(), address.as_mut_ptr().cast(), address.len()) } {
        0 => Ok(name),
        code => Err(refused("open", "a name for its endpoint", code)),
    }
}

/// Locks a new name that begins with `start`.
fn hold(dir: &Path, start: &str) -> Result<(Name, String)> {
    let refused = |why| Error::os("open", format!("a lock for an endpoint of shm in {}", dir.display()), why);
    loop {
        let text = format!("{start}:{:016x}", random("open")?);
        let path = dir.join(format!("{text}{LOCK}"));
        let lock = OpenOptions::new().write(true).create_new(true).open(&path).map_err(refused)?;
        // Between the two another may have taken it for one that nobody holds.
        match lock.try_lock() {
            Ok(()) if path.exists() => return Ok((Name { _lock: lock, path }, text)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(why)) => return Err(refused(why)),
        }
    }
}

/// Removes what processes that have ended left.
fn sweep(dir: &Path) {
    for file in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(name) = file.file_name().into_string() else { continue };
        let Some(left) = name.strip_suffix(LOCK).filter(|name| name.starts_with(OURS)) else { continue };
        // Other users' cannot be opened.
        let Ok(lock) = File::open(file.path()) else { continue };
        if lock.try_lock().is_ok() {
            // The provider has made none yet if it ended early; another may remove them at the same time.
            let removed = [dir.join(left), file.path()].map(std::fs::remove_file);
            tracing::debug!(left, ?removed, "left by a process that has ended");
        }
    }
}

/// Refuses the address of a peer that is in another namespace of processes: the provider copies by the
/// number that a process has in its own (`smr_cma_check`; 1.17, 2.1), and would reach another one.
pub(crate) fn check_reachable(address: &[u8]) -> Result<()> {
    let text = std::str::from_utf8(address).ok().and_then(|text| text.strip_prefix(SCHEME));
    let theirs = text.and_then(|text| text.strip_prefix(OURS)?.split(':').next()?.parse().ok());
    if theirs.is_none_or(|theirs: u64| theirs == namespace()) {
        return Ok(());
    }
    let why = "the peer is in another namespace of processes, and libfabric's shm copies by their numbers: \
               share it between the containers (--pid), or use loopback or tcp";
    Err(Error::new(ErrorKind::Unreachable, "connect", why))
}

/// The namespace that numbers of processes are of; 0 where it is not told.
fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |link| link.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_holds_goes() {
        let dir = std::env::temp_dir().join(format!("multirail-shm-names-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (held, text) = hold(&dir, "multirail:1:2").unwrap();
        let kept = [text.as_str(), &format!("{text}{LOCK}"), "multirail:1:2:3", "1:2:3", "x.lock"];
        let left = ["multirail:1:2:4", "multirail:1:2:4.lock", "multirail:5:6:7.lock"];
        for name in kept.iter().chain(&left).filter(|name| !dir.join(name).exists()) {
            std::fs::write(dir.join(name), b"").unwrap();
        }
        sweep(&dir);
        let is_there = |name: &&str| dir.join(name).exists();
        let (kept, left) = (kept.iter().all(is_there), left.iter().any(is_there));
        drop(held);
        let is_locked = dir.join(format!("{text}{LOCK}")).exists();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(kept && !left && !is_locked, "kept: {kept}, left: {left}, still locked: {is_locked}");
    }

    #[test]
    fn other_namespaces_are_not_reached() {
        let address = |namespace| format!("{SCHEME}{OURS}{namespace}:7:00\0").into_bytes();
        assert!(check_reachable(&address(namespace())).is_ok());
        let refusal = check_reachable(&address(namespace() + 1)).unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Unreachable);
        // Named by the provider itself.
        assert!(check_reachable(b"fi_shm://7:0:0\0").is_ok());
    }
}
