//! A pair of processes that have met.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Child, live};
use crate::check::{Verdict, within};
use crate::end::End;
use crate::subject::Variant;
use crate::trial::Context;

/// A fabric here, one in a helper process, and our view of that.
pub(crate) struct Meeting {
    pub fabric: End,
    pub peer: transport_core::Peer,
    pub child: Child,
}

impl Meeting {
    /// The helper listens, we connect.
    #[track_caller]
    pub(crate) fn new(context: &Context) -> Verdict<Self> {
        let fabric = live(context)?;
        let (child, peer) = Child::met(context, &fabric)?;
        Ok(Self { fabric, peer, child })
    }

    /// Waits for the peer's end.
    #[track_caller]
    pub(crate) fn end(&self, limit: Duration) -> Verdict<transport_core::Error> {
        within(limit, "the end of the peer", self.peer.closed())
    }

    /// The pair that the trial before has left, or a new one.
    #[track_caller]
    pub(crate) fn left(context: &Context) -> Verdict<Self> {
        let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner).take();
        match left.filter(|(kind, pair)| *kind == Kind::of(context) && pair.peer.is_alive()) {
            Some((_, pair)) => Ok(pair),
            None => Self::new(context),
        }
    }

    /// Leaves it to the next trial, as well as it was: to open 32 cards on two sides may take longer
    /// than what is tried on them.
    pub(crate) fn leave(self, context: &Context) {
        *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = Some((Kind::of(context), self));
    }
}

/// What trials must agree in to use one pair.
#[derive(PartialEq)]
struct Kind {
    subject: String,
    variant: Variant,
    seed: u64,
}

impl Kind {
    fn of(context: &Context) -> Self {
        Self { subject: context.subject.name().into(), variant: context.variant, seed: context.seed }
    }
}

static LEFT: Mutex<Option<(Kind, Meeting)>> = Mutex::new(None);

/// Ends the pair that a trial has left.
pub(crate) fn part() {
    let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(left);
}
