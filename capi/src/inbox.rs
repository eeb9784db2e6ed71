//! The notifications that a program takes.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use multirail::{ErrorKind, Fabric, Notification, Notifications, Result};

/// The notifications of a fabric, and those that did not fit into the program's buffer.
pub struct Inbox {
    returned: Mutex<VecDeque<Notification>>,
    /// For looks without waiting. It is `None` if the fabric was opened without notifications.
    stream: Option<Mutex<Notifications>>,
}

impl Inbox {
    pub fn new(fabric: &Fabric) -> Self {
        Self { returned: Mutex::default(), stream: fabric.notifications().ok().map(Mutex::new) }
    }

    /// The next notification; `None` if none comes within `limit`.
    pub fn next(&self, fabric: &Fabric, limit: Duration) -> Result<Option<Notification>> {
        if let Some(returned) = lock(&self.returned).pop_front() {
            return Ok(Some(returned));
        }
        match &self.stream {
            Some(stream) if limit.is_zero() => lock(stream).try_next().transpose(),
            // A wait has a stream of its own: each knows one waker.
            _ => match fabric.notifications()?.next().wait(limit) {
                Ok(next) => Ok(Some(next)),
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => Ok(None),
                Err(error) => Err(error),
            },
        }
    }

    /// Takes a notification back: the next call returns it.
    pub fn put_back(&self, notification: Notification) {
        lock(&self.returned).push_front(notification);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
