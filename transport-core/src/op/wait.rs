//! Blocking on a future without an executor.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long a waiter looks before it sleeps: a sleep and its wake were measured at
/// 16 µs and more, a megabyte's copy at 40 µs, so shorter spinning would mostly
/// sleep through the end.
const SPIN: Duration = Duration::from_micros(60);

/// Polls between two looks at the clock.
const TURNS_PER_LOOK: u32 = 16;

/// Pauses between two polls at most: about half a microsecond, little beside a wait
/// that has already taken several.
const MOST_PAUSES: u32 = 16;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: RefCell<Waker> = RefCell::new(Waker::from(Arc::new(Unpark(std::thread::current()))));
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
        if turns.is_multiple_of(TURNS_PER_LOOK) {
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
            (0..(turns / 8 + 1).min(MOST_PAUSES)).for_each(|_| std::hint::spin_loop());
        }
    }
}
