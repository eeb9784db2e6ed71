//! Blocking on a future without an executor: [`wait`], and what every `wait` method uses.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::engine::EngineHandle;
use crate::{Error, ErrorKind, Result};

/// How long a waiter looks before it sleeps: a sleep and its wake were measured at
/// 16 µs and more, a megabyte's copy at 40 µs, so shorter spinning would mostly
/// sleep through the end.
const SPIN: Duration = Duration::from_micros(60);

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// Pauses between two polls at most: about half a microsecond, little beside a wait
/// that has already taken several.
const MAX_PAUSES: u32 = 16;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: RefCell<Waker> = RefCell::new(Waker::from(Arc::new(Unpark(std::thread::current()))));
    /// Inside [`wait`]: the caller-driven engines whose turns the polled futures need.
    static DRIVEN: RefCell<Option<Vec<Arc<EngineHandle>>>> = const { RefCell::new(None) };
}

/// Blocks until `future` is ready, at most `limit`: for callers without an executor.
///
/// It takes any future. Engines of caller-driven fabrics that futures of this library
/// wait for are driven meanwhile. Not for use inside an executor's thread: it blocks it.
///
/// ```
/// use std::time::Duration;
/// use multirail_core::{ErrorKind, wait};
///
/// assert_eq!(wait(async { 7 }, Duration::from_secs(1)).unwrap(), 7);
/// let never = wait(std::future::pending::<()>(), Duration::from_millis(1));
/// assert_eq!(never.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
/// ```
///
/// # Errors
/// `DeadlineExceeded` if it was not ready in time. The future is dropped then, which
/// cancels an operation inside it; pass `&mut future` to go on later. A future with a
/// result of its own gives one inside the other: `wait(fabric.connect(address), limit)??`.
pub fn wait<F: Future>(future: F, limit: Duration) -> Result<F::Output> {
    /// The waits of one thread may lie in each other: the outer's engines come back.
    struct Outer(Option<Vec<Arc<EngineHandle>>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            DRIVEN.set(self.0.take());
        }
    }
    let _outer = Outer(DRIVEN.replace(Some(Vec::new())));
    let drive = || {
        let engines = DRIVEN.with_borrow(Clone::clone).unwrap_or_default();
        engines.iter().filter(|engine| engine.drive()).count() > 0
    };
    block_on(&mut pin!(future), limit, |_| true, drive).ok_or_else(|| {
        let why = format!("not ready within {limit:?}; wait longer, or find out what it waits for");
        Error::new(ErrorKind::DeadlineExceeded, "wait", why)
    })
}

/// A future that is pending tells the [`wait`] that polls it, if one does, that it
/// needs turns of a caller-driven engine.
pub(crate) fn needs_steps(engine: &Arc<EngineHandle>) {
    if engine.is_driven_by_caller() {
        DRIVEN.with_borrow_mut(|driven| match driven {
            Some(driven) if !driven.iter().any(|known| Arc::ptr_eq(known, engine)) => {
                driven.push(Arc::clone(engine));
            }
            _ => {}
        });
    }
}

/// Waits for `future`, at most `limit`. `drive` takes a turn of a caller-driven
/// engine and says whether there is one; without, this thread spins briefly, then
/// parks. While it spins it only looks by `is_ready`: polling would write to the
/// cache line that the worker is about to write.
pub(crate) fn block_on<F: Future + Unpin>(
    future: &mut F,
    limit: Duration,
    is_ready: impl Fn(&F) -> bool,
    drive: impl Fn() -> bool,
) -> Option<F::Output> {
    let waker = WAKER.with_borrow(Waker::clone);
    let mut context = Context::from_waker(&waker);
    let started = Instant::now();
    let mut turns = 0_u32;
    loop {
        let driven = drive();
        if is_ready(future)
            && let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut context)
        {
            return Some(output);
        }
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(POLLS_PER_CLOCK_READ) {
            let elapsed = started.elapsed();
            let left = limit.checked_sub(elapsed).filter(|left| !left.is_zero())?;
            if !driven && elapsed >= SPIN {
                // Leaves the waker behind, or finds that there is no need to sleep.
                if let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut context) {
                    return Some(output);
                }
                std::thread::park_timeout(left);
            }
        }
        if !driven {
            // Ever more slowly: the worker may share this core with us.
            (0..(turns / 8 + 1).min(MAX_PAUSES)).for_each(|_| std::hint::spin_loop());
        }
    }
}
