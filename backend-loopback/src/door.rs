//! A domain's doorbell, made when somebody first sleeps at it.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

use multirail_spi::{Result, WakeupPipe};

/// A doorbell, once there is need of it: an engine that its caller drives never sleeps.
#[derive(Default)]
pub(crate) struct Door {
    made: OnceLock<WakeupPipe>,
}

impl Door {
    /// Wakes who sleeps, or is about to. Whatever it is to see was stored before: either it
    /// finds that when it looks for the last time, or we find the bell. The fence pairs
    /// with the one in [`Door::bell`].
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if let Some(door) = self.made.get() {
            door.handle().wake();
        }
    }

    /// The doorbell, for whoever wants to sleep, and looks once more before.
    pub(crate) fn bell(&self) -> Result<&WakeupPipe> {
        if let Some(door) = self.made.get() {
            return Ok(door);
        }
        let door = WakeupPipe::new()?;
        let door = self.made.get_or_init(|| door);
        fence(Ordering::SeqCst);
        Ok(door)
    }

    /// Forgets all rings so far.
    pub(crate) fn clear(&self) {
        if let Some(door) = self.made.get() {
            door.clear();
        }
    }
}

#[cfg(all(test, unix, not(miri)))]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn who_sleeps_first_is_woken() {
        for _ in 0..200 {
            let (door, news) = (Door::default(), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let bell = door.bell().unwrap();
                    while !news.load(Ordering::Acquire) {
                        bell.sleep(&[], None);
                        bell.clear();
                    }
                });
                news.store(true, Ordering::Release);
                door.ring();
            });
        }
    }

    #[test]
    fn nobody_sleeps_and_nothing_is_made() {
        let door = Door::default();
        door.ring();
        door.clear();
        assert!(door.made.get().is_none());
    }
}
