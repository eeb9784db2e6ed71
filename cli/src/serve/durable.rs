//! Syncs files to disk, and remembers a failed sync.

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};

use super::failed;
use crate::failure::{CommandFailure, CommandResult};

/// Syncs files to disk. After a failed sync, all later syncs fail.
pub struct Durable {
    /// True after a failed sync: it is unknown which bytes are lost, and the next sync would not report it.
    broken: Mutex<bool>,
    /// True if every file is synced separately.
    each: bool,
}

impl Durable {
    /// No sync has failed yet.
    pub fn new() -> Self {
        Self { broken: Mutex::new(false), each: !syncfs_reports_errors() }
    }

    /// Syncs all files with `sync`. The system reports a failure once, to one caller. So callers take turns, and after
    /// the first failure all of them fail.
    pub fn all(&self, sync: impl FnOnce() -> rustix::io::Result<()>) -> CommandResult {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        if *broken {
            return Err(CommandFailure::new(
                "the disk lost written bytes; check the disk and restart the server",
            ));
        }
        sync().map_err(|error| {
            *broken = true;
            let reason = io::Error::from(error);
            CommandFailure::new(format!(
                "the server cannot sync the files: {reason}; check the disk and restart the server"
            ))
        })
    }

    /// Syncs one complete file, where [`Durable::all`] would not report lost bytes.
    pub fn one(&self, file: &File) -> CommandResult {
        if self.each { file.sync_all().map_err(|error| failed("sync the file", error)) } else { Ok(()) }
    }
}

/// Returns true if `syncfs` exists and reports lost bytes: on Linux from 5.8 on.
fn syncfs_reports_errors() -> bool {
    let is_new = |release: &str| {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
        Some((numbers.next()?, numbers.next()?) >= (5, 8))
    };
    cfg!(target_os = "linux")
        && rustix::system::uname().release().to_str().ok().and_then(is_new).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_failed_sync_is_never_forgotten() {
        let durable = Durable::new();
        durable.all(|| Ok(())).unwrap();
        let first = durable.all(|| Err(Errno::IO)).unwrap_err();
        assert!(first.message().contains("check the disk"), "{}", first.message());
        let next = durable.all(|| panic!("the sync would report success")).unwrap_err();
        assert!(next.message().contains("restart the server"), "{}", next.message());
    }
}
