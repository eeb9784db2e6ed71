//! The control plane: finding a peer, agreeing on links, lookups, revocations, liveness.
//!
//! Everything here runs on one thread per fabric, `multirail-control`, so that a
//! blocked user runtime never looks like a dead peer; or on the user's runtime, if that
//! was asked for. What users await are plain channels, which any executor can poll. In
//! reading order:
//!
//! - [`bootstrap`]: the traits by which two fabrics exchange bounded frames;
//!   [`tcp`] is the one that is built in, on the framing of [`stream`];
//!   `tls` (feature `tls`) is the same below TLS.
//! - [`hello`] and [`frame`]: what the frames say; nothing in them is trusted.
//! - [`token`] and [`proof`]: the secret that peers share, and how they show it.
//! - [`wire`]: frames in both directions at once; [`outbox`] is its sending half.
//! - [`greeting`]: from a fresh channel to a peer that may come in; [`strangers`] are
//!   those that have not got so far. [`handshake`]: from there to an admitted
//!   [`Peer`](crate::Peer); [`room`]: how many of a fabric's at once; [`limit`]: how long each may take.
//! - [`session`]: one task per peer from then on, with its [`liveness`], its
//!   [`lookups`], its [`moves`] and its [`ending`].
//! - [`thread`], [`listener`], [`connect`](mod@connect): where it all runs, and the ways in;
//!   [`branch`]: a part of it, which ends by itself.

mod bootstrap;
mod branch;
mod connect;
mod ending;
mod frame;
mod greeting;
mod handshake;
mod hello;
mod limit;
mod listener;
mod liveness;
mod lookups;
mod moves;
mod outbox;
mod proof;
mod room;
mod session;
mod strangers;
mod stream;
mod tcp;
#[cfg(test)]
mod tests;
mod thread;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod wire;

#[cfg(fuzzing)]
pub(crate) use {frame::Frame, hello::Hello, stream::StreamReceiver};

pub use bootstrap::{Acceptor, Bootstrap, Channel, Incoming, MAX_FRAME, RecvHalf, SendHalf};
pub(crate) use branch::Tasks;
pub(crate) use connect::connect;
pub(crate) use frame::{Identity, LinkReport, MAX_NAME, TransportOffer};
pub(crate) use handshake::ControlSettings;
pub use listener::Listener;
pub(crate) use listener::listen;
pub(crate) use room::Room;
pub(crate) use session::SessionHandle;
pub use tcp::TcpBootstrap;
pub(crate) use thread::ControlThread;
#[cfg(feature = "tls")]
pub use tls::TlsBootstrap;
pub use token::Token;
