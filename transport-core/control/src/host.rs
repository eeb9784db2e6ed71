//! The traits through which the control plane calls the fabric that it serves.
//!
//! The core implements these traits; this crate does not know the core's types.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use multirail_spi::{Error, FenceKind, FenceReply, Result, WireGrant};

use crate::bootstrap::Bootstrap;
use crate::frame::{Identity, LinkReport, TransportOffer};
use crate::handshake::ControlSettings;
use crate::handshake::limits::HandshakeLimiter;
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

    /// The bootstrap that opens channels to peers.
    fn bootstrap(&self) -> Arc<dyn Bootstrap>;

    /// The number of rails of all transports.
    fn rails(&self) -> usize;

    /// The identity that this fabric sends to peers.
    fn identity(&self) -> &Identity;

    /// The token that peers must prove; `None` if this fabric requires no token.
    fn token(&self) -> Option<&Token>;

    /// The fabrics that peers can reach through this fabric's listener, each with its token.
    fn admitting(self: &Arc<Self>) -> Vec<(Arc<Self>, Token)>;

    /// Limits the handshakes of peers that connect to this fabric.
    fn handshakes(&self) -> &HandshakeLimiter;

    /// A spawner for tasks on this fabric's control thread.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed.
    fn spawner(&self) -> Result<Spawner>;

    /// Reserves slots on the rails of every transport. The side that connects passes `None` for `theirs` and gets one
    /// slot per rail. The side that accepts passes the peer's offers and gets one slot per pair of rails. May block.
    ///
    /// # Errors
    /// `Closed`, `Exhausted`, and the errors of the backends.
    fn reserve(self: &Arc<Self>, theirs: Option<&[TransportOffer]>) -> Result<Self::Reservation>;

    /// The descriptor that is published under `name`, as bytes.
    fn published(&self, name: &str) -> Option<Vec<u8>>;
}

/// Slots that are reserved for a peer. Dropping the reservation frees them.
pub trait PeerReservation: Send + 'static {
    /// The peer that is admitted.
    type Peer;

    /// The offers to send to the peer, one per transport.
    fn offers(&self) -> Vec<TransportOffer>;

    /// Brings links up with the peer's offers and returns one report per transport. May block while a backend talks to
    /// the peer's process.
    ///
    /// `reports` holds the peer's reports if the peer connected; otherwise it is empty.
    fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> Vec<LinkReport>;

    /// Admits the peer with the links that both sides have brought up.
    ///
    /// # Errors
    /// `Closed` once the fabric is closed, `Unreachable` where no link is up.
    fn admit(self, theirs: &[LinkReport], identity: Identity, session: SessionHandle) -> Result<Self::Peer>;
}

/// A peer as its session uses it. All clones are handles of the same peer.
pub trait SessionPeer: Clone + Send + Sync + 'static {
    /// Notes that the session begins. `address` is the peer's address, for messages.
    fn connected(&self, address: String);

    /// Notes that a frame of the peer has arrived.
    fn heard(&self, now: Instant);

    /// The grants of this side to the peer, each with the transport's label.
    fn grants(&self) -> Vec<(String, WireGrant)>;

    /// Notes that the peer has granted this side `grant` over the transport `label`.
    ///
    /// # Errors
    /// `Protocol` if no transport has this label, or if the grant is smaller than an earlier one.
    fn note_grant(&self, label: &str, grant: &WireGrant) -> Result<()>;

    /// Notes that the peer has revoked `region`. Has no effect if the peer's fabric has another incarnation.
    fn note_revoked(&self, incarnation: u64, region: u64);

    /// Notes that the peer has reached the barrier `name`.
    ///
    /// # Errors
    /// A description of the peer's protocol violation.
    fn note_barrier(&self, name: &str) -> Result<(), String>;

    /// Connects to the new address of the peer's endpoint of a pair of rails, and returns the answer to the peer's
    /// `offer`. May block.
    ///
    /// # Errors
    /// `Protocol`, and the errors of the backend.
    fn note_relocation(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>>;

    /// Notes that the peer uses the new address of our endpoint of a pair of rails; `answer` is its answer. May block.
    ///
    /// # Errors
    /// `Protocol`, and the errors of the backend.
    fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()>;

    /// Lets nothing arrive any more of what the peer has posted over a pair of rails; or lets requests arrive
    /// again. `reply` gets the answer, from another thread or before the call returns. It is dropped if the peer
    /// is closed.
    ///
    /// # Errors
    /// `Protocol` if there is no such pair.
    fn fence(&self, label: &str, pair: u16, kind: FenceKind, reply: FenceReply) -> Result<()>;

    /// Notes that the peer has posted `count` messages over a pair of rails since it was connected.
    ///
    /// # Errors
    /// `Protocol` if there is no such pair.
    fn note_messages_posted(&self, label: &str, pair: u16, count: u64) -> Result<()>;

    /// Resolves to the close reason when the peer is closed.
    fn closed(&self) -> impl Future<Output = Error> + Send + Unpin;

    /// Marks the peer as closed because of `error`. Only the first call has an effect.
    fn fail(&self, error: Error);

    /// Closes the connection in order.
    fn disconnect(&self);
}
