//! Triggers: an operation may wait for a signal before it begins.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Signal;

/// A signal and a value. An operation with a trigger begins once the signal has reached the value.
///
/// The comparison wraps around, as `cuStreamWaitValue32` does with `CU_STREAM_WAIT_VALUE_GEQ`: the signal has reached
/// the value if it is at most 2^31 - 1 past it. So one signal serves a loop of any number of steps, each of which waits
/// for a value that is one higher. The signal must not go back before the operation has begun: if several rail groups
/// carry the operation, each of them polls the signal for itself.
#[derive(Clone)]
pub struct Trigger(Arc<Inner>);

/// Allocated, so that a trigger adds only one pointer to each operation.
struct Inner {
    /// `None` if no signal starts the operation, but a command to its engine.
    signal: Option<Arc<dyn Signal>>,
    value: u32,
}

impl Trigger {
    /// A trigger that is due once `signal` has reached `value`.
    pub fn new(signal: Arc<dyn Signal>, value: u32) -> Self {
        Self(Arc::new(Inner { signal: Some(signal), value }))
    }

    /// A trigger that is never due by itself: `Control::Start` starts the operation. So nothing is polled.
    #[doc(hidden)]
    pub fn held() -> Self {
        Self(Arc::new(Inner { signal: None, value: 1 }))
    }

    /// Whether the engine has to poll the trigger's signal.
    pub(crate) fn is_polled(&self) -> bool {
        self.0.signal.is_some()
    }

    /// Whether the trigger is due. Acquires: if it is due, the caller sees everything that was written before the
    /// signal.
    pub fn is_due(&self) -> bool {
        self.now().wrapping_sub(self.0.value) as i32 >= 0
    }

    /// The value that the operation waits for.
    pub fn value(&self) -> u32 {
        self.0.value
    }

    /// The current value of the signal.
    pub fn now(&self) -> u32 {
        self.0.signal.as_ref().map_or(0, |signal| signal.atomic().load(Ordering::Acquire))
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
