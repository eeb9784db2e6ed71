//! How many bytes one run of a server stores.

use std::sync::{Mutex, PoisonError};

use crate::failure::{CommandResult, Failure};
use crate::units::Size;

/// Bytes that are stored or promised, of finished and of partial files.
pub struct Quota {
    most: u64,
    used: Mutex<u64>,
}

impl Quota {
    /// At most `most` bytes; without it, any number.
    pub fn new(most: Option<Size>) -> Self {
        Self { most: most.map_or(u64::MAX, |size| size.0), used: Mutex::new(0) }
    }

    /// Promises room for `bytes`, or says why not.
    pub fn reserve(&self, bytes: u64) -> CommandResult {
        let mut used = self.lock();
        *used = self.with(*used, bytes)?;
        Ok(())
    }

    /// Whether there would be room for `bytes`.
    pub fn check(&self, bytes: u64) -> CommandResult {
        self.with(*self.lock(), bytes).map(drop)
    }

    fn with(&self, used: u64, bytes: u64) -> CommandResult<u64> {
        match used.checked_add(bytes).filter(|&sum| sum <= self.most) {
            Some(sum) => Ok(sum),
            None => Err(Failure::new(format!(
                "{} more are over the server's limit: {} of {} are taken; send less, or start the server with a larger --max-bytes",
                Size(bytes),
                Size(used),
                Size(self.most)
            ))),
        }
    }

    /// Counts bytes that are there already, limit or not.
    pub fn count(&self, bytes: u64) {
        let mut used = self.lock();
        *used = used.saturating_add(bytes);
    }

    /// Takes back a promise, or bytes that are removed.
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
    fn promises_end_at_the_limit() {
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
