//! The control plane of multirail: it connects two fabrics, agrees on their links, carries lookups and revocations, and
//! detects dead peers.
//!
//! Users depend on `multirail`; this crate is a layer of it. This crate does not know the type of a fabric: the core
//! implements the traits of [`host`] for its own types.
//!
//! The control plane of a fabric runs on a thread of its own, `multirail-control`. A blocked runtime of the user's
//! therefore never looks like a dead peer. If the user asks for it, the control plane runs on the user's runtime
//! instead. The futures that users await wait on plain channels, so any executor can poll them. The modules in reading
//! order:
//!
//! - `bootstrap`: the traits through which two fabrics exchange bounded frames. `tcp` is the built-in implementation
//!   and uses [`framing`]; `tls` (feature `tls`) adds TLS to it.
//! - [`frame`]: the frames and their fields; the receiver trusts none of them. `framed_channel` sends and receives
//!   frames in both directions at once; `frame_queue` is its sending half.
//! - [`handshake`]: the steps from a new channel to an admitted peer. `authenticate` is the first part, with
//!   [`handshake::hello`], [`handshake::token`] and [`handshake::proof`]; `unauthenticated` holds the clients that have
//!   not passed it. [`handshake::limits`] limits the number of handshakes of a fabric, and the time of each.
//! - [`session`]: the task that serves an admitted peer, with its `liveness`, `lookups`, `relocations` and `close`.
//! - [`runtime`]: the thread or runtime that runs all tasks, and the [`TaskTracker`], which counts the tasks of a
//!   branch so that a caller can wait for their end. `listener` and `connect` are the two entry points.
//!
//! # Threads and cleanup
//!
//! Every handle may be used from any thread. Dropping a [`ControlThread`] sends `Goodbye` to all peers and joins the
//! thread.

#![deny(unsafe_code)]

mod bootstrap;
mod connect;
pub mod frame;
mod frame_queue;
mod framed_channel;
pub mod framing;
pub mod handshake;
pub mod host;
mod listener;
pub mod runtime;
pub mod session;
mod tcp;
#[cfg(feature = "tls")]
mod tls;

pub use bootstrap::{Acceptor, Bootstrap, Channel, Incoming, MAX_FRAME, RecvHalf, SendHalf};
pub use connect::connect;
pub use frame::{Identity, LinkReport, MAX_NAME, TransportOffer};
pub use handshake::ControlSettings;
pub use handshake::limits::HandshakeLimiter;
pub use handshake::token::Token;
pub use host::{PeerReservation, SessionHost, SessionPeer};
pub use listener::{Listener, listen};
pub use runtime::{ControlThread, Spawner, TaskTracker};
pub use session::SessionHandle;
pub use tcp::TcpBootstrap;
#[cfg(feature = "tls")]
pub use tls::TlsBootstrap;
