//! Opens directories beneath a root directory, and never outside it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

/// Opens the directory `path` beneath `root`, through real directories of the same file system only.
///
/// `path` has names separated by slashes, none of them `..`. An empty path is `root` itself.
pub fn open(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    #[cfg(target_os = "linux")]
    match at_once(root, path) {
        // Kernels before 5.6 and some sandboxes do not have this call.
        Err(Errno::NOSYS | Errno::PERM) => {}
        opened => return opened,
    }
    by_name(root, path)
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

#[cfg(target_os = "linux")]
fn at_once(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    use rustix::fs::ResolveFlags;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let path = if path.is_empty() { b"." } else { path };
    loop {
        match rustix::fs::openat2(root, OsStr::from_bytes(path), DIRECTORY, Mode::empty(), resolve) {
            // A rename elsewhere in the system raced with the call.
            Err(Errno::AGAIN) => {}
            opened => return opened,
        }
    }
}

/// Opens the directories one by one.
fn by_name(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    let device = rustix::fs::fstat(root)?.st_dev;
    let flags = DIRECTORY | OFlags::NOFOLLOW;
    let mut directory = rustix::fs::openat(root, ".", flags, Mode::empty())?;
    for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
        if name == b".." {
            return Err(Errno::XDEV);
        }
        directory = rustix::fs::openat(directory.as_fd(), OsStr::from_bytes(name), flags, Mode::empty())?;
        if rustix::fs::fstat(&directory)?.st_dev != device {
            return Err(Errno::XDEV);
        }
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_is_opened() {
        let outside = tempfile::TempDir::new().unwrap();
        let root = outside.path().join("root");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::create_dir(outside.path().join("secret")).unwrap();
        std::os::unix::fs::symlink("..", root.join("up")).unwrap();
        std::os::unix::fs::symlink(outside.path(), root.join("a/away")).unwrap();
        std::os::unix::fs::symlink("a", root.join("alias")).unwrap();
        let root = OwnedFd::from(std::fs::File::open(root).unwrap());
        for path in ["", "a", "a/b"] {
            assert!(open(&root, path.as_bytes()).is_ok(), "{path}");
            assert!(by_name(&root, path.as_bytes()).is_ok(), "{path}");
        }
        for path in ["up", "up/secret", "a/away/secret", "alias/b", "..", "a/../..", "missing"] {
            assert!(open(&root, path.as_bytes()).is_err(), "{path}");
            assert!(by_name(&root, path.as_bytes()).is_err(), "{path}");
        }
    }
}
