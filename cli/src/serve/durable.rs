//! Making bytes durable, and remembering that it failed.

use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};

use super::failed;
use crate::failure::{CommandResult, Failure};

/// The disk below the directory, as far as it is to be trusted.
pub struct Durable {
    /// A sync failed: which bytes are lost is not known, and the next sync would not say so.
    broken: Mutex<bool>,
    /// Whether every file is synced by itself.
    each: bool,
}

impl Durable {
    /// Nothing has failed yet.
    pub fn new() -> Self {
        Self { broken: Mutex::new(false), each: !tells_failures() }
    }

    /// Syncs all files by `sync`. The system tells of a failure once and to one caller, so
    /// callers take turns, and after the first failure all of them fail.
    pub fn all(&self, sync: impl FnOnce() -> rustix::io::Result<()>) -> CommandResult {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        if *broken {
            return Err(Failure::new(
                "the disk failed to take what was written; check it and restart the server",
            ));
        }
        sync().map_err(|error| {
            *broken = true;
            let reason = io::Error::from(error);
            Failure::new(format!(
                "the server cannot sync the files: {reason}; check the disk and restart the server"
            ))
        })
    }

    /// Syncs a whole file, where [`Durable::all`] would not tell that its bytes were lost.
    pub fn one(&self, file: &File) -> CommandResult {
        if self.each { file.sync_all().map_err(|error| failed("sync the file", error)) } else { Ok(()) }
    }
}

/// Whether `syncfs` is there and tells that bytes were lost: Linux from 5.8 on.
fn tells_failures() -> bool {
    let tells = |release: &str| {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
        Some((numbers.next()?, numbers.next()?) >= (5, 8))
    };
    cfg!(target_os = "linux")
        && rustix::system::uname().release().to_str().ok().and_then(tells).unwrap_or(false)
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
        let next = durable.all(|| panic!("it would say that all is well")).unwrap_err();
        assert!(next.message().contains("restart the server"), "{}", next.message());
    }
}
