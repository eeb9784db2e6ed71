//! The operations that an engine has activated.
//!
//! In reading order: [`Work`] (what an operation does), `ActiveOp` (how far it has come), `Revocations` and
//! `Drains` (operations that only wait).

mod active;
mod drains;
mod revocations;
mod work;

pub(super) use active::{ActiveOp, ActiveRail, NextRun, Stage, Unplaced};
pub(super) use drains::Drains;
pub use drains::{DrainAnswer, DrainReply, drain_answer};
pub(super) use revocations::{LocalUse, Revocation, Revocations};
pub use work::{ImmMode, OnEnd, SharedState, Work};
