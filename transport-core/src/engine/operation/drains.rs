//! `Peer::drain`: waiting until the operations that were submitted to a peer have ended.

use tokio::sync::oneshot;

use super::ActiveOp;
use crate::op::OpId;
use crate::{Error, ErrorKind, Result, Time};

/// All drains that have not ended.
///
/// A drain takes no slot of the op table: dropped operations may have taken all of them.
#[derive(Default)]
pub(in crate::engine) struct Drains(Vec<Drain>);

struct Drain {
    /// The operations that have not ended.
    ops: Vec<OpId>,
    deadline: Time,
    done: oneshot::Sender<Result<()>>,
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
    pub fn add(&mut self, ops: Vec<OpId>, deadline: Time, done: oneshot::Sender<Result<()>>) {
        self.0.push(Drain { ops, deadline, done });
    }

    /// Ends the drains whose operations have all ended, and those whose waiter is gone. Returns their number.
    /// `active` are the engine's operations, by their index in the op table.
    pub fn advance(&mut self, active: &[Option<ActiveOp>]) -> usize {
        let is_over = |drain: &mut Drain| {
            let is_active = |op: &OpId| active[op.index as usize].as_ref().is_some_and(|it| it.id == *op);
            drain.ops.retain(is_active);
            drain.ops.is_empty() || drain.done.is_closed()
        };
        let over: Vec<_> = self.0.extract_if(.., is_over).collect();
        let count = over.len();
        over.into_iter().for_each(|drain| drop(drain.done.send(Ok(()))));
        count
    }

    /// Fails the drains whose deadline has passed; returns their number. Lowers `next` to the earliest deadline of
    /// the others.
    pub fn expire(&mut self, now: Time, next: &mut Time) -> usize {
        let late: Vec<_> = self.0.extract_if(.., |drain| drain.deadline <= now).collect();
        *next = self.0.iter().map(|drain| drain.deadline).fold(*next, Time::min);
        let count = late.len();
        for Drain { ops, done, .. } in late {
            let why =
                format!("{} operations are still under way; call drain() again to keep waiting", ops.len());
            let _ = done.send(Err(Error::new(ErrorKind::DeadlineExceeded, "drain", why)));
        }
        count
    }
}
