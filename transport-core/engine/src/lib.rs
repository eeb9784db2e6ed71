//! The engine of multirail: it splits operations over rails, posts their work requests, and completes them.
//!
//! Users depend on `multirail`; this crate is a layer of it. This crate does not know the types of a fabric and of its
//! handles: the core implements [`peer::PeerEvents`] and [`memory::RegionOwner`] for its own types. An engine calls
//! them when something rare happens, never per request.
//!
//! One thread drives an [`Engine`] by calling [`Engine::step`] in a loop: a worker thread, or the user's thread on a
//! caller-driven fabric. All other threads use the [`EngineHandle`]. They touch the endpoints only while the worker
//! sleeps: a thread that submits a small operation then posts it itself.
//!
//! In reading order:
//!
//! - [`handle`], [`commands`]: how other threads submit operations.
//! - [`step`]: the [`Engine`], and what it does in each step.
//! - `post`: the engine activates an operation, splits it over the rails, and posts it.
//! - `complete`: the engine polls the endpoints, and ends operations.
//! - [`op`]: operations from the submitter's side: the table of their states, and the future [`Op`].
//! - [`operation`]: what an operation is, and how far it has come. [`plan`] splits it over rails.
//! - [`rail`]: an endpoint, and the requests that are posted to it.
//! - [`peer`]: what the engine knows of each peer. [`imm`]: the counts of the imms that arrive from it.
//! - [`flow_control`]: what each receiver grants its senders.
//! - [`memory`]: registered memory, and regions of peers.
//! - [`trace`], [`snapshot`]: flight recorder, dumps, stalls.
//! - [`timers`], [`waker_set`]: how futures wait.
//! - [`worker`]: the thread that drives engines.
//!
//! # Contract
//!
//! The caller checks a request before it submits it, or runs it over a [`Link`](peer::Link): ranges lie inside their
//! regions, and the regions belong to the transport of the engine. The engine keeps the memory of a request alive until
//! the device has finished with it. The functions that rest on these checks are not `unsafe`, because they are the
//! core's alone. They and their modules are public, but hidden in the documentation, and may change with any version.
//!
//! # Threads and cleanup
//!
//! Any thread may use an [`EngineHandle`] and all handles of users. [`Engine::close`] ends all operations. Dropping a
//! [`Worker`](worker::Worker) joins its thread, which closes its engines.

#![deny(unsafe_code)]

mod adaptive_spin;
#[doc(hidden)]
pub mod commands;
mod complete;
mod event_hash;
#[doc(hidden)]
pub mod flow_control;
#[doc(hidden)]
pub mod handle;
#[doc(hidden)]
pub mod imm;
#[doc(hidden)]
pub mod index;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod op;
#[doc(hidden)]
pub mod operation;
#[doc(hidden)]
pub mod peer;
mod peer_id;
#[doc(hidden)]
pub mod plan;
#[allow(unsafe_code, reason = "posts requests whose memory `Engine::active` keeps alive")]
mod post;
#[doc(hidden)]
pub mod rail;
mod single_writer;
#[doc(hidden)]
pub mod snapshot;
#[doc(hidden)]
pub mod step;
#[doc(hidden)]
pub mod timers;
#[doc(hidden)]
pub mod trace;
mod trigger;
#[doc(hidden)]
pub mod waker_set;
#[doc(hidden)]
#[allow(unsafe_code, reason = "borrows the file descriptors that endpoints keep open")]
pub mod worker;
mod worker_engines;

#[doc(hidden)]
pub use commands::{Control, Submission};
pub use flow_control::{EvenShares, Grant, GrantPolicy, GrantRequest};
#[doc(hidden)]
pub use handle::{EngineHandle, HandleSetup, Posting};
use multirail_spi as spi;
pub use op::{Cancel, Op, OpId, Outcome, RailReceipt, Receipt, wait};
#[doc(hidden)]
pub use operation::{
    Continuation, DrainAnswer, DrainReply, OnEnd, OperationCounts, SharedState, Work, drain_answer,
};
pub use operation::{ImmMode, OperationCounters, SizeCounters};
pub use peer_id::PeerId;
#[doc(hidden)]
pub use rail::{Inbox, PoolPart, Rail, RailCounts};
pub use rail::{Message, RailCounters};
#[doc(hidden)]
pub use snapshot::Snapshot;
use spi::{
    Access, Clock, Error, ErrorKind, Locality, Memory, MemoryKind, Result, Signal, Time, WakeupHandle,
    WakeupPipe, copy, sync,
};
#[doc(hidden)]
pub use step::Engine;
pub use step::StepReport;
pub use trigger::Trigger;
