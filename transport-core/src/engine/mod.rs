//! The engine: splits operations over rails, posts their work requests, and completes them.
//!
//! One thread drives an [`Engine`] by calling [`Engine::step`] in a loop: a worker thread, or the user's thread on a
//! caller-driven fabric. No other thread touches the endpoints. All other threads use the [`EngineHandle`].
//!
//! In reading order:
//!
//! - `handle`, `commands`: how other threads submit operations.
//! - `step`: the [`Engine`], and what it does in each step.
//! - `post`: the engine takes an operation over, splits it over the rails, and posts it.
//! - `complete`: the engine polls the endpoints, and ends operations.
//! - `operation`: what an operation is, and how far it has come.
//! - `memory`: registered memory, and regions of peers.
//! - `rail`: an endpoint, and the requests that are posted to it.
//! - `peer`: what the engine knows of each peer.
//! - `flow_control`: what each receiver grants its senders.
//! - `imm`: the counts of the imms that arrive.
//! - `trace`: flight recorder, dumps, stalls.
//! - `timers`, `waker_set`: how futures wait.
//! - `worker`: the thread that drives engines.

mod commands;
mod complete;
pub(crate) mod flow_control;
mod handle;
pub(crate) mod imm;
pub(crate) mod memory;
mod operation;
pub(crate) mod peer;
#[allow(unsafe_code, reason = "posts requests whose memory `Engine::active` keeps alive")]
mod post;
mod rail;
mod step;
pub(crate) mod timers;
pub(crate) mod trace;
pub(crate) mod waker_set;
#[allow(unsafe_code, reason = "borrows the file descriptors that endpoints keep open")]
pub(crate) mod worker;

pub(crate) use commands::{Control, Submission};
pub(crate) use handle::{EngineHandle, HandleSetup};
pub(crate) use operation::{DrainAnswer, DrainReply, ImmCountdown, Work, drain_answer};
pub(crate) use rail::{Inbox, PoolPart, Rail, RailCounts};
pub use rail::{Message, RailCounters};
pub(crate) use step::Engine;
pub use step::StepReport;
pub(crate) use trace::Snapshot;
