//! `Peer::drain`: waiting until the operations that were submitted to a peer have ended.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::ActiveOp;
use crate::op::OpId;
use crate::{Error, ErrorKind, Result, Time};

/// All drains that have not ended.
///
/// A drain takes no slot of the op table: dropped operations may have taken all of them.
#[derive(Default)]
pub(crate) struct Drains(Vec<Drain>);

struct Drain {
    /// The operations that have not ended.
    ops: Vec<OpId>,
    deadline: Time,
    done: DrainReply,
}

impl Drains {
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a drain that ends once all of `ops` have ended.
    pub fn add(&mut self, ops: Vec<OpId>, deadline: Time, done: DrainReply) {
        self.0.push(Drain { ops, deadline, done });
    }

    /// Ends the drains whose operations have all ended, and those whose waiter is gone. Returns their number.
    /// `active` are the engine's operations, by their index in the op table.
    pub fn advance(&mut self, active: &[Option<ActiveOp>]) -> usize {
        let is_over = |drain: &mut Drain| {
            let is_active = |op: &OpId| active[op.index as usize].as_ref().is_some_and(|it| it.id == *op);
            drain.ops.retain(is_active);
            drain.ops.is_empty() || drain.done.is_abandoned()
        };
        let over: Vec<_> = self.0.extract_if(.., is_over).collect();
        let count = over.len();
        over.into_iter().for_each(|drain| drain.done.send(Ok(())));
        count
    }

    /// Fails the drains whose deadline has passed; returns their number. Lowers `next` to the earliest deadline of
    /// the others.
    pub fn expire(&mut self, now: Time, next: &mut Time) -> usize {
        let late: Vec<_> = self.0.extract_if(.., |drain| drain.deadline <= now).collect();
        *next = self.0.iter().map(|drain| drain.deadline).fold(*next, Time::min);
        let count = late.len();
        for Drain { ops, done, .. } in late {
            let why = format!("{} operations are still under way; ask again to keep waiting", ops.len());
            done.send(Err(Error::new(ErrorKind::DeadlineExceeded, "drain", why)));
        }
        count
    }
}

/// Sends the result of a drain to its [`DrainAnswer`]. Dropping it without a result sends `Closed`.
pub struct DrainReply(Arc<Mutex<Answer>>);

/// The result of a drain in one engine, as a future.
#[must_use = "futures do nothing unless awaited"]
pub struct DrainAnswer(Arc<Mutex<Answer>>);

#[derive(Default)]
struct Answer {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

/// The two ends of the wait for a drain.
pub fn drain_answer() -> (DrainReply, DrainAnswer) {
    let answer = Arc::<Mutex<Answer>>::default();
    (DrainReply(Arc::clone(&answer)), DrainAnswer(answer))
}

impl DrainReply {
    /// Sends the result.
    pub fn send(self, result: Result<()>) {
        self.set(result);
    }

    /// Whether the answer was dropped, so that nobody waits for the result.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Sets the result and wakes the waiter, unless there is a result already.
    fn set(&self, result: Result<()>) {
        let mut answer = lock(&self.0);
        if answer.result.is_none() {
            answer.result = Some(result);
            let waker = answer.waker.take();
            drop(answer);
            // The lock is open again, because a waker may run any code.
            waker.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for DrainReply {
    fn drop(&mut self) {
        self.set(Err(Error::new(ErrorKind::Closed, "drain", "the fabric is closed")));
    }
}

impl Future for DrainAnswer {
    type Output = Result<()>;

    /// Must not be polled again after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut answer = lock(&self.0);
        if let Some(result) = &answer.result {
            return Poll::Ready(result.clone());
        }
        let old = match &answer.waker {
            Some(waker) if waker.will_wake(context.waker()) => None,
            _ => answer.waker.replace(context.waker().clone()),
        };
        drop(answer);
        drop(old);
        Poll::Pending
    }
}

fn lock(answer: &Mutex<Answer>) -> MutexGuard<'_, Answer> {
    // No holder panics half way through a change, so a poisoned lock still guards a valid answer.
    answer.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_answer_comes_once_and_wakes_the_last_waker() {
        let (first, second) = (Arc::<Woken>::default(), Arc::<Woken>::default());
        let poll = |answer: &mut DrainAnswer, woken: &Arc<Woken>| {
            let waker = Waker::from(Arc::clone(woken));
            Pin::new(answer).poll(&mut Context::from_waker(&waker))
        };
        let (reply, mut answer) = drain_answer();
        assert!(poll(&mut answer, &first).is_pending() && poll(&mut answer, &second).is_pending());
        reply.send(Ok(()));
        assert_eq!((first.0.load(Ordering::Relaxed), second.0.load(Ordering::Relaxed)), (0, 1));
        assert!(matches!(poll(&mut answer, &second), Poll::Ready(Ok(()))));
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
    }

    #[test]
    fn an_end_without_an_answer_is_an_error_and_an_abandoned_answer_is_noticed() {
        let (reply, answer) = drain_answer();
        assert!(!reply.is_abandoned());
        drop(reply);
        let mut answer = answer;
        let polled = Pin::new(&mut answer).poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Err(error)) if error.kind() == ErrorKind::Closed));
        let (reply, answer) = drain_answer();
        drop(answer);
        assert!(reply.is_abandoned());
    }
}
