//! The control plane: finding a peer, agreeing on links, lookups, revocations, liveness.
//!
//! Everything here runs on one thread per fabric, `multirail-control`, so that a
//! blocked user runtime never looks like a dead peer. What users await are plain
//! channels, which any executor can poll. In reading order:
//!
//! - [`bootstrap`]: the traits by which two fabrics exchange bounded frames;
//!   [`tcp`] is the one that is built in, on the framing of [`stream`].
//! - [`hello`] and [`frame`]: what the frames say; nothing in them is trusted.
//! - [`wire`]: frames in both directions at once; [`outbox`] is its sending half.
//! - [`handshake`]: from a fresh channel to an admitted [`Peer`](crate::Peer).
//! - [`session`]: one task per peer from then on, with its [`liveness`], its
//!   [`lookups`] and its [`ending`].
//! - [`thread`], [`listener`], [`connect`](mod@connect): where it all runs, and the ways in.

mod bootstrap;
mod connect;
mod ending;
mod frame;
mod handshake;
mod hello;
mod listener;
mod liveness;
mod lookups;
mod outbox;
mod session;
mod stream;
mod tcp;
#[cfg(test)]
mod tests;
mod thread;
mod wire;

#[cfg(fuzzing)]
pub(crate) use {frame::Frame, hello::Hello, stream::StreamReceiver};

pub use bootstrap::{Acceptor, Bootstrap, Channel, MAX_FRAME, RecvHalf, SendHalf};
pub(crate) use connect::connect;
pub(crate) use frame::{Identity, LinkReport, MAX_NAME, TransportOffer};
pub(crate) use handshake::ControlSettings;
pub use listener::Listener;
pub(crate) use listener::listen;
pub(crate) use session::SessionHandle;
pub use tcp::TcpBootstrap;
pub(crate) use thread::ControlThread;
