//! The control plane of multirail: finding a peer, agreeing on links, lookups, revocations, liveness.
//!
//! Users depend on `multirail`; this crate is a layer of it. It knows no fabric: the core implements the traits of
//! [`host`] for its own.
//!
//! Everything here runs on one thread per fabric, `multirail-control`, so that a blocked runtime of the user's never looks
//! like a dead peer; or on the user's runtime, if that was asked for. What users await are plain channels, which any
//! executor can poll. In reading order:
//!
//! - `bootstrap`: the traits by which two fabrics exchange bounded frames. `tcp` is the built-in one, on the framing of
//!   [`framing`]; `tls` (feature `tls`) is the same below TLS.
//! - [`frame`]: the frames, and what they say; nothing in them is trusted. `framed_channel` sends and receives them in
//!   both directions at once; `send_queue` is its sending half.
//! - [`handshake`]: from a fresh channel to an admitted peer. `authenticate` is its first part, which
//!   `unauthenticated` clients do not get past, with [`handshake::hello`], [`handshake::token`] and [`handshake::proof`];
//!   [`handshake::limiter`] bounds the handshakes of a fabric, `time_limit` each one's time.
//! - [`session`]: one task per peer from then on, with its `liveness`, its `lookups`, its `relocations` and its `close`.
//! - [`runtime`], `listener`, `connect`: where it all runs, and the ways in. `task_tracker` counts the tasks of a part
//!   that ends by itself.
//!
//! # Threads and cleanup
//!
//! Every handle may be used from any thread. Dropping a [`ControlThread`] says goodbye to all peers and joins the thread.

#![deny(unsafe_code)]

mod bootstrap;
mod connect;
mod errors;
pub mod frame;
mod framed_channel;
pub mod framing;
pub mod handshake;
pub mod host;
mod listener;
pub mod runtime;
mod send_queue;
pub mod session;
mod task_tracker;
mod tcp;
#[cfg(feature = "tls")]
mod tls;

pub use bootstrap::{Acceptor, Bootstrap, Channel, Incoming, MAX_FRAME, RecvHalf, SendHalf};
pub use connect::connect;
pub use frame::{Identity, LinkReport, MAX_NAME, TransportOffer};
pub use handshake::ControlSettings;
pub use handshake::limiter::HandshakeLimiter;
pub use handshake::token::Token;
pub use host::{PeerReservation, SessionHost, SessionPeer};
pub use listener::{Listener, listen};
pub use runtime::{ControlThread, Spawner};
pub use session::SessionHandle;
pub use task_tracker::TaskTracker;
pub use tcp::TcpBootstrap;
#[cfg(feature = "tls")]
pub use tls::TlsBootstrap;
