//! What an operation waits for before it begins.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Signal;

/// What an operation waits for before it begins: that a word reaches a value.
///
/// "Reaches" wraps around, as `cuStreamWaitValue32` counts with `CU_STREAM_WAIT_VALUE_GEQ`: the
/// word is at most 2^31 - 1 past the value. So one word serves a loop of steps for ever, each of which
/// waits for one more. It must not go back before the operation has begun: of an operation that several
/// rail groups carry each looks for itself.
#[derive(Clone)]
pub struct Trigger(Arc<Inner>);

/// Apart, so that an operation that has no trigger is hardly larger by it.
struct Inner {
    word: Arc<dyn Signal>,
    value: u32,
}

impl Trigger {
    /// Due once `word` has reached `value`.
    pub fn new(word: Arc<dyn Signal>, value: u32) -> Self {
        Self(Arc::new(Inner { word, value }))
    }

    /// Whether it is due. What was written before the word was is seen after this.
    pub fn is_due(&self) -> bool {
        self.now().wrapping_sub(self.0.value) as i32 >= 0
    }

    /// The value that is waited for.
    pub fn value(&self) -> u32 {
        self.0.value
    }

    /// Where the word is.
    pub fn now(&self) -> u32 {
        self.0.word.atomic().load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for Trigger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trigger").field("value", &self.0.value).field("now", &self.now()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn due_as_streams_count() {
        let word = Arc::new(AtomicU32::new(0));
        for (now, value, is_due) in [
            (0, 0, true),
            (0, 1, false),
            (7, 1, true),
            (u32::MAX, 0, false),
            (0, u32::MAX, true),
            (1 << 31, 1, true),
            (1 << 31, 0, false),
            (5, u32::MAX - 5, true),
        ] {
            word.store(now, Ordering::Relaxed);
            assert_eq!(Trigger::new(word.clone(), value).is_due(), is_due, "{now} for {value}");
        }
    }
}
