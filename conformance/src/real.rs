//! Real time, for what no virtual clock moves: a GPU at work.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// In which what a GPU does, and its opening, is over: until then virtual time does not leap.
const ENOUGH: Duration = Duration::from_millis(200);
/// Between two looks at a GPU, which wakes nobody.
const NAP: Duration = Duration::from_micros(20);

/// How long nothing has happened.
#[derive(Default)]
pub(crate) struct Silence(Cell<Option<Instant>>);

impl Silence {
    /// Something happened.
    pub(crate) fn end(&self) {
        self.0.set(None);
    }

    /// Nothing did, once more. Whether a GPU may still be at work.
    pub(crate) fn may_be_work(&self) -> bool {
        let since = self.0.get().unwrap_or_else(Instant::now);
        self.0.set(Some(since));
        std::thread::sleep(NAP);
        since.elapsed() < ENOUGH
    }
}
