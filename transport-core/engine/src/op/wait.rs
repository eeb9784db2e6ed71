//! Blocking on a future without an executor: [`wait`], and the function behind every `wait` method.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::EngineHandle;
use crate::adaptive_spin::AdaptiveSpin;
use crate::{Error, ErrorKind, Result};

/// The longest time for which a waiter spins before it sleeps. A sleep and its wake were measured at 16 µs and more,
/// the copy of a megabyte at 40 µs. With a shorter spin most waiters would be asleep when their operation ends.
const SPIN: Duration = Duration::from_micros(60);

/// The number of polls between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// The most pauses between two polls: about half a microsecond, which is short compared with a wait that has already
/// taken several microseconds.
const MAX_PAUSES: u32 = 16;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static SPINS: RefCell<AdaptiveSpin> = const { RefCell::new(AdaptiveSpin::new(SPIN)) };
    static WAKER: RefCell<Waker> = RefCell::new(Waker::from(Arc::new(Unpark(std::thread::current()))));
    /// Inside [`wait`]: the caller-driven engines that the polled futures wait for.
    static DRIVEN: RefCell<Option<Vec<Arc<EngineHandle>>>> = const { RefCell::new(None) };
}

/// Blocks until `future` is ready, at most `limit`. For callers without an executor.
///
/// It takes any future. While it waits, it drives the engines of caller-driven fabrics that futures of this library
/// wait for. Do not call it in a thread of an executor, because it blocks that thread.
///
/// ```
/// # use multirail_engine::wait;
/// # use multirail_spi::ErrorKind;
/// use std::time::Duration;
///
/// assert_eq!(wait(async { 7 }, Duration::from_secs(1)).unwrap(), 7);
/// let never = wait(std::future::pending::<()>(), Duration::from_millis(1));
/// assert_eq!(never.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
/// ```
///
/// # Errors
/// `DeadlineExceeded` if the future was not ready in time. Then the future is dropped, which cancels an operation
/// inside it; pass `&mut future` to keep it. If the future itself returns a result, there are two results, one inside
/// the other: `wait(fabric.connect(address), limit)??`.
pub fn wait<F: Future>(future: F, limit: Duration) -> Result<F::Output> {
    /// Restores the engines of an outer wait, because waits of one thread may be nested.
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
        let why =
            format!("the future was not ready within {limit:?}; wait longer, or find out what it waits for");
        Error::new(ErrorKind::DeadlineExceeded, "wait", why)
    })
}

/// Called by a pending future, to tell the [`wait`] that polls it, if there is one, to drive a caller-driven engine.
#[inline]
pub fn needs_steps(engine: &Arc<EngineHandle>) {
    if engine.is_driven_by_caller() {
        DRIVEN.with_borrow_mut(|driven| match driven {
            Some(driven) if !driven.iter().any(|known| Arc::ptr_eq(known, engine)) => {
                driven.push(Arc::clone(engine));
            }
            _ => {}
        });
    }
}

/// Waits for `future`, at most `limit`. `drive` runs a step of a caller-driven engine, and returns whether there is
/// one. If there is none, this thread spins briefly and then parks. While it spins, it polls the future only if
/// `is_ready` returns true: a poll would write to the cache line that the worker is about to write.
pub fn block_on<F: Future + Unpin>(
    future: &mut F,
    limit: Duration,
    is_ready: impl Fn(&F) -> bool,
    drive: impl Fn() -> bool,
) -> Option<F::Output> {
    let waker = WAKER.with_borrow(Waker::clone);
    let mut context = Context::from_waker(&waker);
    let started = Instant::now();
    let spin = SPINS.with_borrow(AdaptiveSpin::limit);
    let mut rounds = 0_u32;
    loop {
        let driven = drive();
        if is_ready(future)
            && let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut context)
        {
            if rounds >= POLLS_PER_CLOCK_READ {
                SPINS.with_borrow_mut(|spins| spins.note(started.elapsed()));
            }
            return Some(output);
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(POLLS_PER_CLOCK_READ) {
            let elapsed = started.elapsed();
            let left = limit.checked_sub(elapsed).filter(|left| !left.is_zero())?;
            if !driven && elapsed >= spin {
                // This poll registers the waker, or finds that there is no need to sleep.
                if let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut context) {
                    return Some(output);
                }
                std::thread::park_timeout(left);
            }
        }
        if !driven {
            // The pauses get longer, because the worker may share this core.
            (0..(rounds / 8 + 1).min(MAX_PAUSES)).for_each(|_| std::hint::spin_loop());
        }
    }
}
