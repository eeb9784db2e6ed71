//! The wakeup of a domain's endpoint.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

use multirail_spi::{Result, WakeupPipe};

/// A wakeup pipe that is made before the endpoint first sleeps. The endpoint of an engine that its caller drives
/// never sleeps.
#[derive(Default)]
pub(crate) struct Wakeup {
    pipe: OnceLock<WakeupPipe>,
}

impl Wakeup {
    /// Wakes the endpoint if it sleeps or is about to. The caller has stored its news before: either the endpoint
    /// finds the news when it checks for the last time, or this call finds the pipe. The fence pairs with the one in
    /// [`Wakeup::pipe`].
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if let Some(pipe) = self.pipe.get() {
            pipe.handle().wake();
        }
    }

    /// The pipe, for the endpoint that wants to sleep. The endpoint must check for news once more before it sleeps.
    pub(crate) fn pipe(&self) -> Result<&WakeupPipe> {
        if let Some(pipe) = self.pipe.get() {
            return Ok(pipe);
        }
        let pipe = WakeupPipe::new()?;
        let pipe = self.pipe.get_or_init(|| pipe);
        fence(Ordering::SeqCst);
        Ok(pipe)
    }

    /// Forgets all wakeups so far.
    pub(crate) fn clear(&self) {
        if let Some(pipe) = self.pipe.get() {
            pipe.clear();
        }
    }
}

#[cfg(all(test, unix, not(miri)))]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn the_first_sleeper_is_woken() {
        for _ in 0..200 {
            let (wakeup, news) = (Wakeup::default(), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let pipe = wakeup.pipe().unwrap();
                    while !news.load(Ordering::Acquire) {
                        pipe.sleep(&[], None);
                        pipe.clear();
                    }
                });
                news.store(true, Ordering::Release);
                wakeup.wake();
            });
        }
    }

    #[test]
    fn without_a_sleeper_no_pipe_is_made() {
        let wakeup = Wakeup::default();
        wakeup.wake();
        wakeup.clear();
        assert!(wakeup.pipe.get().is_none());
    }
}
