//! What every asynchronous function returns: a transfer, or anything else that takes time.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use multirail::{Cancel, Error, ErrorKind, Op, Outcome, Peer, Receipt, RemoteRegion, wait};

use crate::abi::*;
use crate::failure::{Answer, Failure};

/// How long a waiting thread looks at a transfer before it registers to be woken. Registering writes memory that the
/// worker is about to write, and most transfers are over before.
const LOOK: Duration = Duration::from_micros(60);

/// The looks between two readings of the clock.
const LOOKS_PER_CLOCK_READ: u32 = 16;

/// The result of an operation that has succeeded.
pub enum Value {
    Outcome(Outcome),
    Peer(NewPeer),
    Remote(RemoteRegion),
    /// No result, or one that was taken.
    Nothing,
}

/// A peer that nobody has taken yet. Nobody can end its connection later, so it ends with this value.
pub struct NewPeer(Option<Peer>);

impl NewPeer {
    pub fn new(peer: Peer) -> Self {
        Self(Some(peer))
    }

    pub fn take(mut self) -> Option<Peer> {
        self.0.take()
    }
}

impl Drop for NewPeer {
    fn drop(&mut self) {
        if let Some(peer) = self.0.take() {
            peer.disconnect();
        }
    }
}

type Task = Pin<Box<dyn Future<Output = Result<Value, Error>> + Send>>;

/// An operation under way, or its end.
pub struct Operation(Mutex<Cell>);

struct Cell {
    state: State,
    /// Wakes the threads that wait; `None` until one waits.
    waiters: Option<Arc<Waiters>>,
}

enum State {
    Transfer(Op),
    Task(Task),
    /// Until no byte can move any more.
    Cancelling(Box<Cancel>),
    Over(Result<Value, Error>, KeptReceipt),
    /// Its handle was released, while another thread used it.
    Released,
}

/// Where the receipt of an operation is.
enum KeptReceipt {
    /// The operation has none, or has failed.
    None,
    /// The calling thread has carried the operation out, so that it holds nothing of the fabric.
    OfCallingThread(Op),
    Taken(Box<Receipt>),
}

/// The threads that wait for one operation.
#[derive(Default)]
struct Waiters(Mutex<Vec<Waker>>);

impl Wake for Waiters {
    fn wake(self: Arc<Self>) {
        let waiting = lock(&self.0).clone();
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Cell {
    /// Looks whether the operation is over. The threads that wait are woken later, if it is not.
    fn poll(&mut self) -> bool {
        let polled = match (&mut self.state, &self.waiters) {
            (State::Over(..) | State::Released, _) => return true,
            (State::Transfer(op), None) => match op.try_result() {
                Some(result) => Poll::Ready(result.map(Value::Outcome)),
                None => Poll::Pending,
            },
            (state, waiters) => {
                let waker = waiters
                    .as_ref()
                    .map_or_else(|| Waker::noop().clone(), |all| Waker::from(Arc::clone(all)));
                state.poll(&mut Context::from_waker(&waker))
            }
        };
        match polled {
            Poll::Ready(result) => self.finish(result),
            Poll::Pending => return false,
        }
        true
    }

    /// The operation is over. Whoever finds it tells all who wait.
    fn finish(&mut self, result: Result<Value, Error>) {
        let over = State::Over(result, KeptReceipt::None);
        if let State::Transfer(op) = mem::replace(&mut self.state, over)
            && let State::Over(Ok(_), receipt) = &mut self.state
        {
            // A transfer of an engine would keep its place in the engine's table.
            *receipt = match op.id() {
                None => KeptReceipt::OfCallingThread(op),
                Some(_) => {
                    op.receipt().map_or(KeptReceipt::None, |receipt| KeptReceipt::Taken(Box::new(receipt)))
                }
            };
        }
        if let Some(waiters) = self.waiters.take() {
            waiters.wake();
        }
    }

    /// Ends the operation here and now, as far as its handle is concerned. Threads that wait for it return.
    fn release(&mut self) -> State {
        let left = mem::replace(&mut self.state, State::Released);
        if let Some(waiters) = self.waiters.take() {
            waiters.wake();
        }
        left
    }

    fn answer(&mut self) -> Answer {
        match self.over()? {
            Some(_) => Ok(MR_OK),
            None => Ok(MR_PENDING),
        }
    }

    /// The value of an operation that has succeeded; `None` if it is not over.
    fn over(&mut self) -> Result<Option<&mut Value>, Failure> {
        if !self.poll() {
            return Ok(None);
        }
        match &mut self.state {
            State::Over(Ok(value), _) => Ok(Some(value)),
            State::Over(Err(error), _) => Err(Failure::from(&*error)),
            State::Released => {
                Err(Failure::new(MR_ERROR_CANCELLED, "another thread has released the operation"))
            }
            _ => Ok(None),
        }
    }
}

impl State {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Value, Error>> {
        match self {
            Self::Transfer(op) => Pin::new(op).poll(context).map(|result| result.map(Value::Outcome)),
            Self::Task(task) => task.as_mut().poll(context),
            Self::Cancelling(cancel) => {
                Pin::new(&mut **cancel).poll(context).map(|result| result.map(Value::Outcome))
            }
            Self::Over(..) | Self::Released => Poll::Ready(Ok(Value::Nothing)),
        }
    }
}

impl Operation {
    fn new(state: State) -> Self {
        Self(Mutex::new(Cell { state, waiters: None }))
    }

    /// A transfer.
    #[inline]
    pub fn of(mut op: Op) -> Self {
        // The usual case of a small transfer: the calling thread has carried it out.
        if op.has_succeeded_at_once()
            && let Some(result) = op.try_result()
        {
            return Self::new(State::Over(result.map(Value::Outcome), KeptReceipt::OfCallingThread(op)));
        }
        Self::new(State::Transfer(op))
    }

    /// Anything else that takes time. It begins now, not when somebody looks.
    pub fn of_task(task: impl Future<Output = Result<Value, Error>> + Send + 'static) -> Self {
        let mut cell = Cell { state: State::Task(Box::pin(task)), waiters: None };
        cell.poll();
        Self(Mutex::new(cell))
    }

    fn lock(&self) -> MutexGuard<'_, Cell> {
        lock(&self.0)
    }

    pub fn test(&self) -> Answer {
        self.lock().answer()
    }

    /// Waits until the operation is over, at most `limit`.
    pub fn wait(&self, limit: Duration) -> Answer {
        match self.look(limit) {
            Ok(MR_PENDING) => {}
            answer => return answer,
        }
        // After the time, the operation goes on, and the last look decides.
        let _ = wait(End { operation: self, waker: None }, limit);
        self.test()
    }

    /// Looks at a transfer for a while.
    fn look(&self, limit: Duration) -> Answer {
        let started = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK_READ {
                let mut cell = self.lock();
                let answer = cell.answer();
                if answer != Ok(MR_PENDING) || !matches!(cell.state, State::Transfer(_)) {
                    return answer;
                }
                drop(cell);
                std::hint::spin_loop();
            }
            if started.elapsed() >= limit.min(LOOK) {
                return Ok(MR_PENDING);
            }
        }
    }

    /// Requests a cancel, if the operation is not over.
    pub fn cancel(&self) {
        let mut cell = self.lock();
        if cell.poll() {
            return;
        }
        let dropped = match mem::replace(&mut cell.state, State::Released) {
            State::Transfer(op) => {
                cell.state = State::Cancelling(Box::new(op.cancel()));
                None
            }
            // Tasks move no bytes.
            State::Task(task) => {
                let why = "the operation was cancelled by its owner";
                cell.finish(Err(Error::new(ErrorKind::Cancelled, "cancel", why)));
                Some(task)
            }
            state => {
                cell.state = state;
                None
            }
        };
        cell.poll();
        drop(cell);
        drop(dropped);
    }

    /// Requests a cancel, for an operation whose handle is released. Threads that wait for it return.
    pub fn abandon(&self) {
        let left = self.lock().release();
        drop(left);
    }

    /// Lets a transfer run to its end. Threads that wait for it return.
    pub fn detach(&self) {
        let left = self.lock().release();
        if let State::Transfer(op) = left {
            op.detach();
        }
    }

    /// Calls `read` with the value of an operation that has succeeded.
    pub fn with_value(&self, read: impl FnOnce(&mut Value) -> Answer) -> Answer {
        match self.lock().over()? {
            Some(value) => read(value),
            None => Ok(MR_PENDING),
        }
    }

    /// Calls `read` with the receipt of an operation that has succeeded.
    pub fn with_receipt(&self, read: impl FnOnce(&Receipt) -> Answer) -> Answer {
        let mut cell = self.lock();
        if cell.over()?.is_none() {
            return Ok(MR_PENDING);
        }
        let State::Over(_, kept) = &cell.state else { return Ok(MR_PENDING) };
        let none = || Failure::new(MR_ERROR_NOT_FOUND, "this kind of operation has no receipt");
        match kept {
            KeptReceipt::Taken(receipt) => read(receipt),
            KeptReceipt::OfCallingThread(op) => read(&op.receipt().ok_or_else(none)?),
            KeptReceipt::None => Err(none()),
        }
    }

    /// The error of an operation that has failed.
    pub fn error(&self) -> Option<String> {
        let mut cell = self.lock();
        cell.poll();
        match &cell.state {
            State::Over(Err(error), _) => Some(error.to_string()),
            _ => None,
        }
    }
}

/// Waits for the end of an operation. It locks the operation only while it polls, so that others may look or cancel.
struct End<'a> {
    operation: &'a Operation,
    /// The waker of this wait, once it is registered.
    waker: Option<Waker>,
}

impl Future for End<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut cell = self.operation.lock();
        if self.waker.is_none() && !matches!(cell.state, State::Over(..) | State::Released) {
            let waiters = cell.waiters.get_or_insert_default();
            lock(&waiters.0).push(context.waker().clone());
            self.waker = Some(context.waker().clone());
        }
        if cell.poll() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let Some(mine) = &self.waker else { return };
        if let Some(waiters) = &self.operation.lock().waiters {
            let mut waiting = lock(&waiters.0);
            if let Some(at) = waiting.iter().position(|waiter| waiter.will_wake(mine)) {
                waiting.swap_remove(at);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is caught at the entry point, and every state is complete between two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// An operation moves into its slot and out of it, so its size is time.
    #[test]
    fn an_operation_is_small() {
        assert!(size_of::<Operation>() <= 128, "{}", size_of::<Operation>());
    }

    /// A task that ends once something is sent.
    fn task() -> (Operation, mpsc::Sender<()>, Arc<Mutex<Option<Waker>>>) {
        let (sender, receiver) = mpsc::channel();
        let waker = Arc::<Mutex<Option<Waker>>>::default();
        let registered = Arc::clone(&waker);
        let receiver = Mutex::new(receiver);
        let task = std::future::poll_fn(move |context| {
            *lock(&registered) = Some(context.waker().clone());
            match lock(&receiver).try_recv() {
                Ok(()) => Poll::Ready(Ok(Value::Nothing)),
                Err(_) => Poll::Pending,
            }
        });
        (Operation::of_task(task), sender, waker)
    }

    #[test]
    fn every_waiting_thread_learns_of_the_end() {
        let (operation, end, waker) = task();
        assert_eq!(operation.test(), Ok(MR_PENDING));
        assert_eq!(operation.wait(Duration::from_millis(1)), Ok(MR_PENDING));
        std::thread::scope(|threads| {
            let waiting = [(); 3].map(|()| threads.spawn(|| operation.wait(Duration::MAX)));
            end.send(()).unwrap();
            // Whatever waker the last poll has left wakes all who wait.
            while operation.test() == Ok(MR_PENDING) {}
            if let Some(waker) = lock(&waker).take() {
                waker.wake();
            }
            assert_eq!(waiting.map(|thread| thread.join().unwrap()), [(); 3].map(|()| Ok(MR_OK)));
        });
        assert_eq!(operation.error(), None);
    }

    #[test]
    fn a_release_ends_the_waits_of_other_threads() {
        let (operation, _end, _waker) = task();
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| operation.wait(Duration::MAX));
            while operation.lock().waiters.is_none() {
                std::thread::yield_now();
            }
            operation.abandon();
            assert_eq!(waiting.join().unwrap().map_err(|why| why.status()), Err(MR_ERROR_CANCELLED));
        });
    }

    #[test]
    fn a_cancelled_task_is_over_at_once() {
        let (operation, end, _waker) = task();
        operation.cancel();
        assert_eq!(operation.test().map_err(|why| why.status()), Err(MR_ERROR_CANCELLED));
        assert!(operation.error().is_some_and(|why| why.contains("cancelled")));
        assert!(end.send(()).is_err(), "the task is dropped");
    }
}
