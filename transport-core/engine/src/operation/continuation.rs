//! The rest of an operation, over another rail group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::op::OpId;
use crate::{Control, EngineHandle, Outcome, Receipt, Result};

/// The rest of an operation that no rail of its group can carry any more: an operation of another rail group of the same
/// transport. The first operation ends once the second one has, so no byte moves after its end.
///
/// A continuation is the waker of the second operation: news of it become a [`Control::Continued`] of the first engine.
pub struct Continuation {
    /// The operation that goes on, and its engine.
    first: OpId,
    home: Arc<EngineHandle>,
    /// The operation that carries the rest, and its engine.
    rest: OpId,
    engine: Arc<EngineHandle>,
    state: AtomicU8,
}

/// No thread polls the second operation.
const IDLE: u8 = 0;
/// A thread does.
const POLLING: u8 = 1;
/// A thread does, and there is news since it began.
const POLLING_AGAIN: u8 = 2;
/// The second operation has ended, and its slot is released.
const OVER: u8 = 3;

impl Continuation {
    /// `first` of `home` goes on as `rest` of `engine`. The caller has taken the slot of `rest`.
    pub fn new(home: Arc<EngineHandle>, first: OpId, engine: Arc<EngineHandle>, rest: OpId) -> Self {
        Self { first, home, rest, engine, state: AtomicU8::new(IDLE) }
    }

    /// The operation that goes on.
    pub fn first(&self) -> OpId {
        self.first
    }

    /// The operation that carries the rest.
    pub fn rest(&self) -> OpId {
        self.rest
    }

    /// The engine that carries the rest.
    pub fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Cancels the rest.
    pub fn cancel(&self) {
        self.engine.cancel(self.rest);
    }

    /// The result of the rest and its receipt, once no byte of it can move any more. Returns them once. Until then, the
    /// first engine gets a [`Control::Continued`] when there is news.
    pub fn poll(self: &Arc<Self>) -> Option<(Result<Outcome>, Option<Receipt>)> {
        let begin = |state| match state {
            IDLE => Some(POLLING),
            POLLING => Some(POLLING_AGAIN),
            _ => None,
        };
        // The waker may run in this thread, inside the poll below: then the loop polls again.
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin) != Ok(IDLE) {
            return None;
        }
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let table = &self.engine.table;
        while table.poll_quiesced(self.rest, &mut context).is_pending() {
            match self.state.compare_exchange(POLLING, IDLE, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return None,
                Err(_) => self.state.store(POLLING, Ordering::Release),
            }
        }
        self.state.store(OVER, Ordering::Release);
        let receipt = table.receipt(self.rest, &self.engine);
        let result = match table.poll_result(self.rest, &mut context) {
            Poll::Ready(result) => result,
            // Not reached: an operation has its result before it is quiesced.
            Poll::Pending => Err(EngineHandle::closed_error()),
        };
        table.release(self.rest);
        Some((result, receipt))
    }
}

impl Wake for Continuation {
    fn wake(self: Arc<Self>) {
        Arc::clone(&self.home).control(Control::Continued(self));
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    /// An operation that goes on, over engines that the test stands for.
    fn continued() -> (Arc<Continuation>, Arc<EngineHandle>, Arc<EngineHandle>) {
        let (home, engine) = (EngineHandle::without_engine(), EngineHandle::without_engine());
        let (first, rest) = (home.insert("test").unwrap(), engine.insert("test").unwrap());
        let continuation = Continuation::new(Arc::clone(&home), first, Arc::clone(&engine), rest);
        let continuation = Arc::new(continuation);
        home.add_continuation(Arc::clone(&continuation));
        (continuation, home, engine)
    }

    fn news(home: &EngineHandle) -> usize {
        std::iter::from_fn(|| home.controls.pop())
            .filter(|control| matches!(control, Control::Continued(_)))
            .count()
    }

    #[test]
    fn an_early_result_is_news_and_the_last_byte_ends_it_once() {
        let (continuation, home, engine) = continued();
        assert!(continuation.poll().is_none());
        assert_eq!(news(&home), 0);
        let late = || Error::new(ErrorKind::DeadlineExceeded, "test", "");
        engine.table.complete(continuation.rest(), Err(late()));
        assert_eq!(news(&home), 1);
        assert!(continuation.poll().is_none());
        engine.table.finish(continuation.rest(), Ok(Outcome::default()));
        assert_eq!(news(&home), 1);
        let (result, receipt) = continuation.poll().unwrap();
        assert_eq!((result.unwrap_err().kind(), receipt), (ErrorKind::DeadlineExceeded, None));
        assert!(continuation.poll().is_none());
        assert_eq!(engine.table.in_use(), 0);
    }

    #[test]
    fn a_rest_that_has_ended_before_it_is_polled() {
        let (continuation, _home, engine) = continued();
        engine.table.finish(continuation.rest(), Ok(Outcome::of_bytes(7)));
        assert_eq!(continuation.poll().unwrap().0.unwrap().bytes, 7);
    }

    /// The first engine is closed: the first operation still ends only once its rest has, and by the thread that ends that.
    #[test]
    fn a_closed_engine_ends_the_first_operation_with_the_rest() {
        let (continuation, home, engine) = continued();
        let first = continuation.first();
        home.close();
        home.control(Control::Continued(Arc::clone(&continuation)));
        assert!(!home.table.is_quiesced(first));
        let closed = || Error::new(ErrorKind::Closed, "test", "");
        engine.table.complete(continuation.rest(), Err(closed()));
        assert!(!home.table.is_quiesced(first));
        engine.table.finish(continuation.rest(), Err(closed()));
        assert!(home.table.is_quiesced(first));
        assert!(home.continuations().is_empty());
        assert_eq!(home.table.try_result(first).unwrap().unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(Arc::strong_count(&home), 2, "the continuation alone still has the engine");
    }

    /// The rest ends in another thread while this one polls.
    #[test]
    fn no_news_is_lost_between_threads() {
        for _ in 0..2000 {
            let (continuation, home, engine) = continued();
            let rest = continuation.rest();
            let ends = std::thread::spawn(move || {
                engine.table.complete(rest, Ok(Outcome::default()));
                engine.table.quiesce(rest);
            });
            let mut ended = continuation.poll().is_some();
            while !ended {
                ended = news(&home) > 0 && continuation.poll().is_some();
            }
            ends.join().unwrap();
        }
    }
}
