//! The operations that an engine has activated.
//!
//! In reading order: [`Work`] (what an operation does), `ActiveOp` (how far it has come), [`Continuation`] (its rest over
//! another rail group), `Revocations` and `Drains` (operations that only wait), [`OperationCounts`] (how they ended).

mod active;
mod continuation;
mod counts;
mod drains;
mod revocations;
mod work;

pub(super) use active::{ActiveOp, ActiveRail, NextRun, Stage, Unplaced};
pub use continuation::Continuation;
pub use counts::{OperationCounters, OperationCounts, SizeCounters};
pub(super) use drains::Drains;
pub use drains::{DrainAnswer, DrainReply, drain_answer};
pub(super) use revocations::{LocalUse, Revocation, Revocations};
pub use work::{ImmMode, OnEnd, SharedState, Work};
