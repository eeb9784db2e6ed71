//! Operations from the submitter's side: [`Op`], its outcome, its cancel.

mod cancel;
mod joint;
mod receipt;
#[allow(unsafe_code, reason = "slots with two owners, explored by loom")]
mod table;
mod wait;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

pub use cancel::Cancel;
use joint::Joint;
pub use receipt::{RailReceipt, Receipt};
pub use table::OpId;
pub use table::{MAX_OPERATIONS, OpTable};
pub use wait::wait;
pub use wait::{block_on, needs_steps};

use crate::EngineHandle;
use crate::spi::Paths;
use crate::{Error, ErrorKind, PeerId, Result};

/// The result of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Outcome {
    /// The bytes that were moved; for a receive, the bytes of the message.
    pub bytes: u64,
    /// The number of work requests. 0 for receives, and for operations that ran in the calling thread.
    pub work_requests: u32,
    /// Entries of a list, or pages, that shared a work request with the entry before them: they followed it in the
    /// local and in the remote region. A joint operation counts at most `u32::MAX`, as for `work_requests`.
    pub merged: u32,
    /// The sender of the message (receives only).
    pub peer: Option<PeerId>,
    /// The message's immediate data (receives only).
    pub imm: Option<u32>,
}

impl Outcome {
    /// The outcome of an operation that has moved so many bytes, without work requests.
    #[doc(hidden)]
    pub fn of_bytes(bytes: u64) -> Self {
        Self { bytes, ..Self::default() }
    }
}

/// A submitted operation. It runs even if nobody polls it.
///
/// Dropping it requests a cancel and returns at once. The library keeps the operation's memory until the hardware has
/// finished with it. Until then posted bytes may still land. `Peer::drain` waits until no dropped
/// operation can move bytes; [`Op::cancel`] waits for this operation alone. [`Op::detach`] lets the operation run to
/// its end instead.
#[must_use = "dropping an operation cancels it; await it, or call detach()"]
pub struct Op(State);

enum State {
    /// The operation has succeeded at submission: the calling thread has copied these bytes.
    Ready(u64),
    /// The operation was not over when it was submitted.
    Waiting(Waiting),
    /// As `Ready`, but the result was taken.
    Copied(u64),
    /// The calling thread has let a GPU copy these bytes. Only a part of a joint operation has this state. The joint
    /// operation has the result.
    CopiedByGpu(u64),
    /// The result was taken.
    Taken,
}

/// A type of its own, so that an operation that ran at once is recognized and dropped in as few instructions as without
/// joint operations.
enum Waiting {
    /// An operation that failed at submission: its error waits to be taken.
    Refused(Error),
    /// An operation that an engine has.
    One(Pending),
    /// A joint operation. It is a trait object, so that the code that drops the parts is not in the drop of every `Op`.
    Many(Box<dyn Joint>),
}

struct Pending {
    engine: Arc<EngineHandle>,
    id: OpId,
    state: PendingState,
}

/// The tag of [`State`] lies in this field. If the field were a byte, the tag would be written as a byte and then be
/// moved as a part of a word. This costs a write of 8 bytes a quarter of its time on Zen 3, since the processor must
/// wait for the byte (`multirail bench --op write --size 8 --pages 1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum PendingState {
    /// Dropping the operation cancels it.
    Held,
    /// The operation runs to its end without a waiter.
    Detached,
    /// The result was taken.
    Completed,
}

impl Op {
    /// An operation that ended at submission. If it has succeeded, the calling thread has copied its bytes, without a
    /// work request.
    #[doc(hidden)]
    #[inline]
    pub fn ready(result: Result<Outcome>) -> Self {
        Self(match result {
            Ok(outcome) => State::Ready(outcome.bytes),
            Err(error) => State::Waiting(Waiting::Refused(error)),
        })
    }

    /// An operation that an engine has under this id.
    #[doc(hidden)]
    #[inline]
    pub fn pending(engine: Arc<EngineHandle>, id: OpId) -> Self {
        Self(State::Waiting(Waiting::One(Pending { engine, id, state: PendingState::Held })))
    }

    /// The operation's id in dumps, traces and logs; `None` if it ran in the calling thread. A joint operation has the
    /// id of its first part with an id.
    #[inline]
    pub fn id(&self) -> Option<OpId> {
        match &self.0 {
            State::Waiting(Waiting::One(pending)) => Some(pending.id),
            State::Waiting(Waiting::Many(many)) => many.id(),
            _ => None,
        }
    }

    /// Lets the operation run to its end without a waiter.
    pub fn detach(mut self) {
        match &mut self.0 {
            State::Waiting(Waiting::One(pending)) => pending.state = PendingState::Detached,
            State::Waiting(Waiting::Many(many)) => many.detach(),
            _ => {}
        }
    }

    /// Takes the result if there is one. Returns `None` before there is a result, and after it was taken.
    #[inline]
    pub fn try_result(&mut self) -> Option<Result<Outcome>> {
        self.take_ready().or_else(|| self.try_pending())
    }

    /// Blocks until there is a result, at most `limit`. Then it returns `DeadlineExceeded`, the operation continues,
    /// and `wait` may be called again.
    ///
    /// On a caller-driven fabric the call drives the engine.
    #[inline]
    pub fn wait(&mut self, limit: Duration) -> Result<Outcome> {
        match self.take_ready() {
            Some(result) => result,
            None => self.wait_pending(limit),
        }
    }

    #[inline]
    fn take_ready(&mut self) -> Option<Result<Outcome>> {
        let State::Ready(bytes) = self.0 else { return self.take_refusal() };
        self.0 = State::Copied(bytes);
        Some(Ok(Outcome::of_bytes(bytes)))
    }

    #[inline]
    fn take_refusal(&mut self) -> Option<Result<Outcome>> {
        if !matches!(self.0, State::Waiting(Waiting::Refused(_))) {
            return None;
        }
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Waiting(Waiting::Refused(error)) => Some(Err(error)),
            _ => None,
        }
    }

    /// Whether the operation had succeeded when it was submitted, and its result was not taken.
    #[doc(hidden)]
    pub fn has_succeeded_at_once(&self) -> bool {
        match &self.0 {
            State::Ready(_) => true,
            State::Waiting(Waiting::Many(many)) => many.has_succeeded(),
            _ => false,
        }
    }

    /// How the operation went: its times, and what each rail carried by which path. Returns `None` before it
    /// has succeeded. Receives, revocations and notifications alone have no receipt.
    ///
    /// Await `&mut op` to keep the operation for this call:
    ///
    /// ```
    /// # async fn receipt(mut op: multirail_engine::Op) -> multirail_spi::Result<()> {
    /// (&mut op).await?;
    /// for rail in op.receipt().iter().flat_map(|receipt| &receipt.rails) {
    ///     println!("{}: {} bytes by {}", rail.device, rail.bytes, rail.path);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn receipt(&self) -> Option<Receipt> {
        match &self.0 {
            State::Ready(bytes) | State::Copied(bytes) => {
                Some(Receipt::of_calling_thread(*bytes, Paths::MEMORY_COPY))
            }
            State::CopiedByGpu(bytes) => Some(Receipt::of_calling_thread(*bytes, Paths::GPU_COPY)),
            State::Waiting(Waiting::Refused(_)) | State::Taken => None,
            State::Waiting(Waiting::One(pending)) => {
                pending.engine.table.receipt(pending.id, &pending.engine)
            }
            State::Waiting(Waiting::Many(many)) => many.receipt(),
        }
    }

    fn try_pending(&mut self) -> Option<Result<Outcome>> {
        let pending = match &mut self.0 {
            State::Waiting(Waiting::One(pending)) if pending.state != PendingState::Completed => pending,
            State::Waiting(Waiting::Many(many)) => return many.try_result(),
            _ => return None,
        };
        let result = pending.engine.table.try_result(pending.id);
        if result.is_some() {
            pending.state = PendingState::Completed;
        }
        result
    }

    #[cold]
    fn wait_pending(&mut self, limit: Duration) -> Result<Outcome> {
        if let Some(result) = self.try_pending() {
            return result;
        }
        let result = match &self.0 {
            State::Waiting(Waiting::One(pending)) => {
                let (engine, id) = (Arc::clone(&pending.engine), pending.id);
                let is_ready = |_: &Self| engine.table.is_completed(id);
                block_on(&mut *self, limit, is_ready, || engine.drive())
            }
            State::Waiting(Waiting::Many(many)) => {
                let engines = many.engines();
                let drive = || engines.iter().filter(|engine| engine.drive()).count() > 0;
                block_on(&mut *self, limit, Self::has_news, drive)
            }
            _ => return Err(taken()),
        };
        result.unwrap_or_else(|| {
            let why = format!("there is no result after {limit:?}; the operation goes on, wait again");
            Err(Error::new(ErrorKind::DeadlineExceeded, "wait", why))
        })
    }

    /// Whether a poll would find something new. Writes no memory.
    fn has_news(&self) -> bool {
        match &self.0 {
            State::Waiting(Waiting::One(pending)) => {
                pending.state == PendingState::Completed || pending.engine.table.is_completed(pending.id)
            }
            State::Waiting(Waiting::Many(many)) => many.has_news(),
            _ => true,
        }
    }

    /// Requests a cancel. The future resolves once no byte can move any more: to the error `Cancelled`, or to the
    /// operation's result if the operation ended before the cancel.
    ///
    /// Posted work cannot be recalled, so the cancel waits for its completions. At the operation's deadline the engine
    /// tears down the backend's abort scope.
    pub fn cancel(mut self) -> Cancel {
        let early = self.try_result();
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Waiting(Waiting::One(pending)) => Cancel::of(early, pending),
            State::Waiting(Waiting::Many(many)) => many.cancel(early),
            _ => Cancel::over(early),
        }
    }
}

impl Future for Op {
    type Output = Result<Outcome>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::Waiting(Waiting::One(pending)) = &mut self.0 {
            if pending.state == PendingState::Completed {
                return Poll::Ready(Err(taken()));
            }
            let polled = pending.engine.table.poll_result(pending.id, context);
            if polled.is_ready() {
                pending.state = PendingState::Completed;
            } else {
                needs_steps(&pending.engine);
            }
            return polled;
        }
        if let State::Waiting(Waiting::Many(many)) = &mut self.0 {
            return many.poll(context);
        }
        Poll::Ready(self.try_result().unwrap_or_else(|| Err(taken())))
    }
}

impl Drop for Pending {
    #[cold]
    fn drop(&mut self) {
        if self.state == PendingState::Held && !self.engine.table.is_completed(self.id) {
            self.engine.cancel(self.id);
        }
        self.engine.table.release(self.id);
    }
}

#[cold]
fn taken() -> Error {
    Error::new(ErrorKind::Closed, "poll", "the operation's result was already taken")
}
