//! One file of the staging directory, until it has its final name.

use crate::files::TreePath;

use super::reservation;
use super::staging_directory::StagingDirectory;

/// A file or link in the staging directory. Dropped without its final name, a
/// temporary one is removed; a partial one stays if any piece of it is stored.
pub struct StagedFile<'a> {
    staging: &'a StagingDirectory,
    name: String,
    slot: bool,
    /// Bytes counted against the quota.
    bytes: u64,
    /// Bytes that it takes without any piece.
    empty: u64,
    named: bool,
    abandoned: bool,
}

impl<'a> StagedFile<'a> {
    /// A whole one.
    pub(super) fn temporary(staging: &'a StagingDirectory, name: String) -> Self {
        Self { staging, name, slot: false, bytes: 0, empty: 0, named: false, abandoned: false }
    }

    /// A partial one, whose slot the caller has made busy.
    pub(super) fn slot(staging: &'a StagingDirectory, name: String, path: &TreePath, bytes: u64) -> Self {
        Self {
            staging,
            name,
            slot: true,
            bytes,
            empty: reservation::partial(path),
            named: false,
            abandoned: false,
        }
    }

    /// Its name in the staging directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts bytes against the quota that its room was promised.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// What a partial one takes without any piece.
    pub fn empty(&self) -> u64 {
        self.empty
    }

    /// Takes `bytes` of them back, which are the caller's again.
    pub fn take(&mut self, bytes: u64) -> u64 {
        self.shrink(self.bytes.saturating_sub(bytes))
    }

    /// Sets the bytes to fewer: the rest is the caller's again.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let fewer = bytes.min(self.bytes);
        std::mem::replace(&mut self.bytes, fewer) - fewer
    }

    /// It is not wanted, whatever is stored in it: removed, and no longer counted.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    /// It has its final name: only its journal is left to remove.
    pub fn named(mut self) {
        self.named = true;
        if self.slot {
            self.staging.remove(&format!("{}.journal", self.name));
        }
    }
}

impl Drop for StagedFile<'_> {
    fn drop(&mut self) {
        if self.slot && !self.named && !self.abandoned && self.bytes > self.empty {
            if let Some(slot) = self.staging.lock().get_mut(&self.name) {
                (slot.busy, slot.bytes) = (false, self.bytes);
            }
            return;
        }
        if !self.named {
            self.staging.remove(&self.name);
            self.staging.quota.release(self.bytes);
            if self.slot {
                self.staging.remove(&format!("{}.journal", self.name));
            }
        }
        if self.slot {
            self.staging.lock().remove(&self.name);
        }
    }
}
