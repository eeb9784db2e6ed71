//! The file of an admin socket: only its owner may connect, and it is removed at the end.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen};

use crate::{Error, ErrorKind, Result};

/// The connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// How long to wait for another process that opens a socket in the same folder.
const LOCK_LIMIT: Duration = Duration::from_secs(2);
/// The pause between two tries to lock the folder.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// A socket's file. Dropping it removes the file, unless another one has its place by now.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// The device and the inode number.
    identity: (u64, u64),
    /// As long as the socket is open, no other process replaces the file, and the system does not use the inode again.
    _listener: UnixListener,
}

impl SocketFile {
    /// Listens at `path`. Replaces a socket there on which nobody listens.
    ///
    /// # Errors
    /// `Busy` if somebody listens there, or if other processes keep the folder locked. `InvalidRequest` if there is
    /// another kind of file, or if the path is too long for a socket. `Permission` or `Io` if the system refuses.
    pub fn listen(path: &Path) -> Result<(Self, UnixListener)> {
        let address = SocketAddrUnix::new(path).map_err(|_| {
            let why = format!("the path {} is empty, or too long for a Unix socket", path.display());
            Error::new(ErrorKind::InvalidRequest, "open the admin socket", why)
        })?;
        let _lock = lock_folder(path)?;
        remove_stale(path)?;
        let refuse = |error: Errno| failed(path, "open", error.into());
        let socket = stream_socket().map_err(refuse)?;
        bind(&socket, &address).map_err(refuse)?;
        let listener = UnixListener::from(socket);
        let system = |error| failed(path, "open", error);
        let (metadata, second) =
            (fs::symlink_metadata(path).map_err(system)?, listener.try_clone().map_err(system)?);
        // Removes the file if what follows fails.
        let file = Self { path: path.to_owned(), identity: identity(&metadata), _listener: second };
        // Clients can connect only after `listen`, when the mode is set.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(system)?;
        listen(&listener, BACKLOG).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(system)?;
        Ok((file, listener))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours =
            |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| identity(&found) == self.identity);
        if is_ours(&self.path)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the admin socket's file cannot be removed");
        }
    }
}

/// A socket that programs started by this process do not inherit.
#[cfg(not(target_vendor = "apple"))]
fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// As above. The flag has to be set afterwards here.
#[cfg(target_vendor = "apple")]
fn stream_socket() -> Result<OwnedFd, Errno> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::ioctl_fioclex(&socket)?;
    Ok(socket)
}

/// Locks the folder of `path` among the processes that open sockets there. Otherwise one of them could remove the
/// socket that another one has just made.
fn lock_folder(path: &Path) -> Result<File> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let locked = File::open(folder).map_err(|error| failed(path, "open the folder of", error))?;
    let until = Instant::now() + LOCK_LIMIT;
    loop {
        match flock(&locked, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(locked),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => std::thread::sleep(RETRY_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let why = format!("another process keeps {} locked; try again", folder.display());
                return Err(Error::new(ErrorKind::Busy, "open the admin socket", why));
            }
            Err(error) => return Err(failed(path, "lock the folder of", error.into())),
        }
    }
}

/// Removes the socket at `path` if nobody listens there.
fn remove_stale(path: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(path, "look at", error)),
    };
    let refuse =
        |kind, why: &str| Err(Error::new(kind, "open the admin socket", format!("{} {why}", path.display())));
    if !found.file_type().is_socket() {
        return refuse(ErrorKind::InvalidRequest, "exists and is no socket; choose another path");
    }
    match UnixStream::connect(path) {
        Ok(_) => refuse(ErrorKind::Busy, "is the socket of a running process; choose another path"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|error| failed(path, "replace", error))
        }
        // Its backlog may be full, for example.
        Err(error) => Err(failed(path, "look for a listener at", error)),
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

#[cold]
fn failed(path: &Path, what: &str, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    let why = format!("cannot {what} {}: {error}", path.display());
    Error::new(kind, "open the admin socket", why).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin");
        let kind = |path: &Path| SocketFile::listen(path).err().expect("a refusal").kind();
        let (file, listener) = SocketFile::listen(&path).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(kind(&path), ErrorKind::Busy);
        drop(listener);
        assert_eq!(kind(&path), ErrorKind::Busy);
        // Another one in its place stays.
        fs::remove_file(&path).unwrap();
        let stale = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
        // As after a crash.
        drop(stale);
        drop(SocketFile::listen(&path).unwrap());
        assert!(!path.exists());
        fs::write(&path, "kept").unwrap();
        assert_eq!(kind(&path), ErrorKind::InvalidRequest);
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
        assert_eq!(kind(&folder.path().join("no/folder")), ErrorKind::Io);
        assert_eq!(kind(&folder.path().join("long".repeat(40))), ErrorKind::InvalidRequest);
    }
}
