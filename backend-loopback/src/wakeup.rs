//! The wakeup of a domain's endpoint, and how the endpoint learns which peers have written.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

use multirail_spi::{Result, WakeupPipe};

use crate::segment::Segment;
use crate::segment::ready_set::ReadySet;

/// A wakeup pipe that is made before the endpoint first sleeps. The endpoint of an engine that its caller drives
/// never sleeps.
#[derive(Default)]
pub(crate) struct Wakeup {
    pipe: OnceLock<WakeupPipe>,
    /// Marked by peers in this process.
    ready: ReadySet,
    /// Marked by peers in other processes. Made for the first of them.
    shared_ready: OnceLock<Segment<ReadySet>>,
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

    /// Tells the endpoint that the peer in `slot`, which is in this process, has written into an armed ring.
    pub(crate) fn mark_ready(&self, slot: u32) {
        self.ready.mark(slot);
        self.wake();
    }

    /// The ready set for peers in other processes. The first call makes it.
    pub(crate) fn shared_ready(&self) -> Result<&Segment<ReadySet>> {
        if let Some(ready) = self.shared_ready.get() {
            return Ok(ready);
        }
        let ready = Segment::create()?;
        Ok(self.shared_ready.get_or_init(|| ready))
    }

    /// Returns true if other processes may mark slots, and clear marks.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.shared_ready.get().is_some()
    }

    /// Returns true if a peer may have marked its slot.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        self.ready.has_news() || self.shared_ready.get().is_some_and(|ready| ready.content().has_news())
    }

    /// Takes the slots that peers have marked.
    pub(crate) fn take_ready(&self, mut ready: impl FnMut(u32)) {
        self.ready.take(&mut ready);
        if let Some(shared) = self.shared_ready.get() {
            shared.content().take(ready);
        }
    }

    /// Forgets all wakeups so far.
    pub(crate) fn clear(&self) {
        self.pipe.get().inspect(|pipe| pipe.clear());
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
