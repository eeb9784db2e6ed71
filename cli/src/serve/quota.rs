//! The limit of bytes that a server stores.

use std::sync::{Mutex, PoisonError};

use crate::failure::{CommandFailure, CommandResult};
use crate::units::Size;

/// The stored and reserved bytes of complete and partial files.
pub struct Quota {
    most: u64,
    used: Mutex<u64>,
}

impl Quota {
    /// A quota of `most` bytes, or without limit.
    pub fn new(most: Option<Size>) -> Self {
        Self { most: most.map_or(u64::MAX, |size| size.0), used: Mutex::new(0) }
    }

    /// Reserves `bytes`, or fails if they exceed the limit.
    pub fn reserve(&self, bytes: u64) -> CommandResult {
        let mut used = self.lock();
        *used = self.with(*used, bytes)?;
        Ok(())
    }

    /// Fails if `bytes` would exceed the limit.
    pub fn check(&self, bytes: u64) -> CommandResult {
        self.with(*self.lock(), bytes).map(drop)
    }

    fn with(&self, used: u64, bytes: u64) -> CommandResult<u64> {
        match used.checked_add(bytes).filter(|&sum| sum <= self.most) {
            Some(sum) => Ok(sum),
            None => Err(CommandFailure::new(format!(
                "{} more exceed the server's limit: {} of {} are used; send less, or start the server with a larger --max-bytes",
                Size(bytes),
                Size(used),
                Size(self.most)
            ))),
        }
    }

    /// Counts bytes that exist already, even beyond the limit.
    pub fn count(&self, bytes: u64) {
        let mut used = self.lock();
        *used = used.saturating_add(bytes);
    }

    /// Releases reserved or removed bytes.
    pub fn release(&self, bytes: u64) {
        let mut used = self.lock();
        *used = used.saturating_sub(bytes);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_end_at_the_limit() {
        let quota = Quota::new(Some(Size(100)));
        quota.reserve(60).unwrap();
        assert!(quota.check(41).is_err() && quota.check(40).is_ok());
        assert!(quota.reserve(41).unwrap_err().message().contains("--max-bytes"));
        quota.release(30);
        quota.reserve(70).unwrap();
        quota.count(10);
        assert!(quota.reserve(0).is_err() && quota.check(u64::MAX).is_err());
        Quota::new(None).reserve(u64::MAX).unwrap();
    }
}
