//! What the control plane asks of the fabric that it serves.
//!
//! The core implements these traits; nothing here knows its types.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use multirail_spi::{Allowance, Error, Result};

use crate::bootstrap::Bootstrap;
use crate::frame::{Identity, LinkReport, TransportOffer};
use crate::handshake::ControlSettings;
use crate::handshake::limiter::HandshakeLimiter;
use crate::handshake::token::Token;
use crate::runtime::Spawner;
use crate::session::SessionHandle;

/// A fabric, or a tenant of one.
pub trait SessionHost: Send + Sync + 'static {
    /// A peer that both sides have admitted.
    type Peer: SessionPeer;
    /// Slots that are reserved for a peer during its handshake.
    type Reservation: PeerReservation<Peer = Self::Peer>;

    /// The limits of handshakes and sessions.
    fn control_settings(&self) -> ControlSettings;

    /// Opens the channels to peers.
    fn bootstrap(&self) -> Arc<dyn Bootstrap>;

    /// The number of rails of all transports.
    fn rails(&self) -> usize;

    /// The identity that peers are told.
    fn identity(&self) -> &Identity;

    /// The token that peers have to prove, if one is asked for.
    fn token(&self) -> Option<&Token>;

    /// The fabrics behind this one's listener, each with the token that leads to it.
    fn admitting(self: &Arc<Self>) -> Vec<(Arc<Self>, Token)>;

    /// Bounds the handshakes of peers that come to this fabric.
    fn handshakes(&self) -> &HandshakeLimiter;

    /// Starts tasks on this fabric's control thread.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed.
    fn spawner(&self) -> Result<Spawner>;

    /// Reserves slots on the rails of every transport: one per rail where `theirs` is none, as for the side that
    /// connects, else one per pair of rails. May block.
    ///
    /// # Errors
    /// `Closed`, `Exhausted`, and the errors of the backends.
    fn reserve(self: &Arc<Self>, theirs: Option<&[TransportOffer]>) -> Result<Self::Reservation>;

    /// The descriptor that is published under that name, as bytes.
    fn published(&self, name: &str) -> Option<Vec<u8>>;
}

/// Slots that are reserved for a peer. Dropping it gives them back.
pub trait PeerReservation: Send + 'static {
    /// The peer that is admitted.
    type Peer;

    /// The offers that the peer is sent, one per transport.
    fn offers(&self) -> Vec<TransportOffer>;

    /// Brings links up with the peer's offers; reports on each transport. May block while a backend talks to the peer's
    /// process.
    ///
    /// `reports` are the peer's reports where the peer connected, else empty.
    fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> Vec<LinkReport>;

    /// Admits the peer, with the links that both sides have brought up.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed, `Unreachable` where no link is up.
    fn admit(self, theirs: &[LinkReport], identity: Identity, session: SessionHandle) -> Result<Self::Peer>;
}

/// A peer, as its session sees it. Clones are the same peer.
pub trait SessionPeer: Clone + Send + Sync + 'static {
    /// The session begins; `address` is where the connection leads to, for messages.
    fn connected(&self, address: String);

    /// A frame of the peer arrived.
    fn heard(&self, now: Instant);

    /// What this side lets the peer send, by the transport's label.
    fn grants(&self) -> Vec<(String, Allowance)>;

    /// The peer lets this side send more over the transport of that label.
    ///
    /// # Errors
    /// `Protocol` where there is no such transport, or the grant takes something back.
    fn note_grant(&self, label: &str, allowance: &Allowance) -> Result<()>;

    /// The peer has revoked a region, if the peer's fabric is still the one of that incarnation.
    fn note_revoked(&self, incarnation: u64, region: u64);

    /// The peer has reached the barrier of that name.
    ///
    /// # Errors
    /// How the peer broke the protocol.
    fn note_barrier(&self, name: &str) -> Result<(), String>;

    /// The peer's end of a pair of rails has a new address: returns the answer to its `offer`. May block.
    ///
    /// # Errors
    /// `Protocol`, and the errors of the backend.
    fn note_relocation(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>>;

    /// The peer has taken our new address of a pair of rails, and answers. May block.
    ///
    /// # Errors
    /// `Protocol`, and the errors of the backend.
    fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()>;

    /// Resolves when the peer is gone, to the reason.
    fn closed(&self) -> impl Future<Output = Error> + Send + Unpin;

    /// Marks the peer as gone for that reason; the first reason stays.
    fn fail(&self, error: Error);

    /// Ends the connection in order.
    fn disconnect(&self);
}
