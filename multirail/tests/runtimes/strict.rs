//! An executor that does only what an executor must do. Futures that rely on more hang on it.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::LIMIT;

/// The waker of a single poll.
struct SinglePollWaker(Mutex<Sender<()>>);

impl Wake for SinglePollWaker {
    fn wake(self: Arc<Self>) {
        // The executor ignores the waker of an earlier poll.
        let _ = self.0.lock().expect("no holder panics").send(());
    }
}

/// Runs `future`. Each poll has its own waker and its own thread. The next poll starts only after the waker of the
/// previous poll was woken; waking an older waker has no effect.
///
/// # Panics
/// If the last waker is dropped without being woken, or not woken within the limit: a wakeup was lost.
pub fn run<T: Send>(future: impl Future<Output = T> + Send) -> T {
    let mut future = pin!(future);
    loop {
        let (tell, woken) = mpsc::channel();
        let waker = Waker::from(Arc::new(SinglePollWaker(Mutex::new(tell))));
        let polled = std::thread::scope(|scope| {
            let poll = scope.spawn(|| future.as_mut().poll(&mut Context::from_waker(&waker)));
            poll.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        // From here on only the future has the waker.
        drop(waker);
        match (polled, woken.recv_timeout(LIMIT)) {
            (Poll::Ready(output), _) => return output,
            (Poll::Pending, Ok(())) => {}
            (Poll::Pending, Err(RecvTimeoutError::Disconnected)) => {
                panic!("pending, and the last waker was dropped unwoken")
            }
            (Poll::Pending, Err(RecvTimeoutError::Timeout)) => {
                panic!("pending, and the last waker was not woken within {LIMIT:?}")
            }
        }
    }
}

#[test]
#[should_panic = "dropped unwoken"]
fn a_future_that_drops_its_waker_is_found() {
    run(std::future::pending::<()>());
}

#[test]
#[should_panic = "dropped unwoken"]
fn a_future_that_keeps_its_first_waker_is_found() {
    let mut first = None::<Waker>;
    run(std::future::poll_fn(move |context| {
        // Behaves as if the task always had the same waker.
        first.get_or_insert_with(|| context.waker().clone()).wake_by_ref();
        Poll::<()>::Pending
    }));
}
