//! An executor that does no more than it must: whatever relies on more hangs here.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::device::LIMIT;

/// The waker of one poll.
struct OfOnePoll(Mutex<Sender<()>>);

impl Wake for OfOnePoll {
    fn wake(self: Arc<Self>) {
        // Nobody listens to the waker of an earlier poll.
        let _ = self.0.lock().expect("no holder panics").send(());
    }
}

/// Runs `future`. Each poll has its own waker and its own thread, and comes only after
/// the waker of the poll before was woken: a wake of an older one counts for nothing.
///
/// # Panics
/// If that waker is dropped unwoken, or not woken within the limit: a lost wake-up.
pub fn run<T: Send>(future: impl Future<Output = T> + Send) -> T {
    let mut future = pin!(future);
    loop {
        let (tell, woken) = mpsc::channel();
        let waker = Waker::from(Arc::new(OfOnePoll(Mutex::new(tell))));
        let polled = std::thread::scope(|scope| {
            let poll = scope.spawn(|| future.as_mut().poll(&mut Context::from_waker(&waker)));
            poll.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        // From here on only the future has it.
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
fn a_future_that_forgets_its_waker_is_found() {
    run(std::future::pending::<()>());
}

#[test]
#[should_panic = "dropped unwoken"]
fn a_future_that_keeps_its_first_waker_is_found() {
    let mut first = None::<Waker>;
    run(std::future::poll_fn(move |context| {
        // As if the task had not moved since.
        first.get_or_insert_with(|| context.waker().clone()).wake_by_ref();
        Poll::<()>::Pending
    }));
}
