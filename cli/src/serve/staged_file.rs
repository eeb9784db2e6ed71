//! One file of the staging directory, until it has its final name.

use crate::files::TreePath;

use super::reservation;
use super::staging_directory::StagingDirectory;

/// A file or link in the staging directory. Dropping it without its final name removes a temporary file. A partial file
/// stays if it has a piece.
pub struct StagedFile<'a> {
    staging: &'a StagingDirectory,
    name: String,
    slot: bool,
    /// The bytes counted against the quota.
    bytes: u64,
    /// The bytes that the file needs without any piece.
    empty: u64,
    is_named: bool,
    abandoned: bool,
}

impl<'a> StagedFile<'a> {
    /// A complete file.
    pub(super) fn temporary(staging: &'a StagingDirectory, name: String) -> Self {
        Self { staging, name, slot: false, bytes: 0, empty: 0, is_named: false, abandoned: false }
    }

    /// A partial file, whose slot the caller has marked as busy.
    pub(super) fn slot(staging: &'a StagingDirectory, name: String, path: &TreePath, bytes: u64) -> Self {
        Self {
            staging,
            name,
            slot: true,
            bytes,
            empty: reservation::partial(path),
            is_named: false,
            abandoned: false,
        }
    }

    /// The name in the staging directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds bytes that were reserved before.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The bytes that a partial file needs without any piece.
    pub fn empty(&self) -> u64 {
        self.empty
    }

    /// Removes `bytes` from the count. Returns the number of removed bytes.
    pub fn take(&mut self, bytes: u64) -> u64 {
        self.shrink(self.bytes.saturating_sub(bytes))
    }

    /// Lowers the count to `bytes`. Returns the number of removed bytes.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let fewer = bytes.min(self.bytes);
        std::mem::replace(&mut self.bytes, fewer) - fewer
    }

    /// Removes the file, even if it has pieces, and releases its bytes.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    /// Marks the file as renamed to its final name, and removes its journal.
    pub fn set_named(mut self) {
        self.is_named = true;
        if self.slot {
            self.staging.remove(&format!("{}.journal", self.name));
        }
    }
}

impl Drop for StagedFile<'_> {
    fn drop(&mut self) {
        if self.slot && !self.is_named && !self.abandoned && self.bytes > self.empty {
            if let Some(slot) = self.staging.lock().get_mut(&self.name) {
                (slot.busy, slot.bytes) = (false, self.bytes);
            }
            return;
        }
        if !self.is_named {
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
