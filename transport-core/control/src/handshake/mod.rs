//! The handshake: the steps from a new channel to a peer that both sides have admitted.
//!
//! 1. Both sides send a [`Hello`](hello::Hello) at once, with the versions that they speak.
//! 2. If both sides have a token, the side that connected proves that it has the token, then the
//!    side that accepted does. Steps 1 and 2 are in `authenticate.rs`; unauthenticated clients get
//!    no further.
//! 3. The side that connected reserves slots and sends its identity and its offers; then the side
//!    that accepted does the same.
//! 4. The side that connected brings its links up with the peer's offers and reports which links
//!    work. For rails that are in more than one pair, it adds offers. Then the side that accepted
//!    does the same.
//! 5. Each side admits the peer with the links that both sides reported, sends its grants
//!    for them, and sends `Ready`.
//! 6. Each side returns the peer to its caller when it has received the other side's `Ready`. Every
//!    operation from then on arrives at a fabric that has admitted the sender.

pub(crate) mod authenticate;
pub mod hello;
pub mod limits;
pub mod proof;
pub mod token;
pub(crate) mod unauthenticated;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::frame::{Frame, Identity, LinkReport, MAX_OFFERS, TransportOffer, refused};
use crate::framed_channel::FramedChannel;
use crate::handshake::authenticate::AuthenticatedPeer;
use crate::handshake::limits::TimeLimit;
use crate::handshake::proof::Role;
use crate::host::{PeerReservation, SessionHost, SessionPeer};
use crate::runtime::{Spawner, closed};
use crate::session::close::{CloseReason, FailOnDrop};
use crate::session::fences::Fences;
use crate::session::liveness::Liveness;
use crate::session::lookups::Lookups;
use crate::session::relocations::Relocations;
use crate::session::{Session, SessionCommand, SessionHandle};
use multirail_spi::{Error, ErrorKind, Result};

/// The most rails that extend the time limit of a handshake, so that a peer that offers more rails cannot hold its
/// permit for longer.
const MAX_COUNTED_RAILS: usize = 64;

/// The limits of the control plane.
#[derive(Debug, Clone, Copy)]
pub struct ControlSettings {
    /// The time between two heartbeats of this side. A shorter timeout of the peer shortens it.
    pub heartbeat: Duration,
    /// The silence after which this side takes a peer for dead.
    pub peer_timeout: Duration,
    /// The time limit of the authentication, of the handshake after it for one rail, and of a lookup.
    pub handshake_limit: Duration,
    /// The time that each further rail adds to the limit of a handshake.
    pub handshake_limit_per_rail: Duration,
}

impl ControlSettings {
    /// The time limit of a handshake in which the side with more rails has `rails` rails.
    pub fn limit_for(&self, rails: usize) -> Duration {
        let further = rails.clamp(1, MAX_COUNTED_RAILS) - 1;
        let more = self.handshake_limit_per_rail.saturating_mul(further as u32);
        self.handshake_limit.saturating_add(more)
    }
}

impl Default for ControlSettings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(500),
            // TCP retransmits a lost segment 0.2, 0.6, 1.4 and 3.0 s after it was sent. With heartbeats every 0.5 s, a
            // network outage of 2 s therefore causes a silence of 3.5 s.
            peer_timeout: Duration::from_secs(5),
            handshake_limit: Duration::from_secs(5),
            handshake_limit_per_rail: Duration::from_secs(1),
        }
    }
}

/// An admitted peer that the user has not taken yet. Dropping it closes the connection.
pub(crate) struct UnacceptedPeer<P: SessionPeer>(Option<P>);

impl<P: SessionPeer> UnacceptedPeer<P> {
    /// Returns the peer, which from now on belongs to the user.
    pub fn claim(mut self) -> Result<P> {
        self.0.take().ok_or_else(|| closed("the peer is gone"))
    }
}

impl<P: SessionPeer> Drop for UnacceptedPeer<P> {
    fn drop(&mut self) {
        if let Some(peer) = self.0.take() {
            peer.disconnect();
        }
    }
}

/// Completes the handshake with an authenticated peer and starts its session. Runs on the
/// control thread.
pub(crate) async fn establish<H: SessionHost>(
    authenticated: AuthenticatedPeer<H>,
) -> Result<UnacceptedPeer<H::Peer>> {
    let AuthenticatedPeer { channel, address, role, host, offers } = authenticated;
    let fabric = upgrade(&host)?;
    let settings = fabric.control_settings();
    // For a tenant this is the tenant's own spawner, which ends before its parent's.
    let spawner = fabric.spawner()?;
    let limit = TimeLimit::new(settings.limit_for(fabric.rails()));
    drop(fabric);
    let mut handshake =
        Handshake { channel: Some(channel), stage: "send its offers", spawner: &spawner, limit: &limit };
    let run = async {
        tokio::select! {
            biased;
            outcome = handshake.run(&host, settings, role, offers) => outcome,
            // A tenant's handshakes run on its parent's listener, which stays open when the tenant is closed.
            () = spawner.closing() => Err(closed("this fabric was closed")),
        }
    };
    let outcome = limit.enforce(run).await.unwrap_or_else(|| {
        let (limit, stage) = (limit.span().as_secs_f64(), handshake.stage);
        let why = format!(
            "{address} did not {stage} within {limit:.1} s: is it a multirail fabric, and is it running? \
             A busy host with many cards takes longer: FabricBuilder::handshake_limit, and its _per_rail"
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
    });
    let admitted = outcome.inspect_err(|error| handshake.send_final_frame(error))?;
    let Admitted { peer, handle, commands, incarnation, liveness } = admitted;
    peer.heard(Instant::now());
    peer.connected(address);
    let (unaccepted, fail) = (UnacceptedPeer(Some(peer.clone())), FailOnDrop(peer.clone()));
    let channel = handshake.channel.take().ok_or_else(abandoned)?;
    drop(handshake);
    let lookups = Lookups::new(settings.handshake_limit);
    let relocations = Relocations::new(Instant::now());
    let fences = Fences::default();
    let session = Session {
        channel,
        peer,
        host,
        spawner,
        handle,
        commands,
        incarnation,
        liveness,
        lookups,
        relocations,
        fences,
    };
    session.spawner.clone().spawn(async move {
        // The task captures the guard, so the guard is dropped even if the task is never polled.
        let _fail = fail;
        session.run().await;
    });
    Ok(unaccepted)
}

/// The contents of a peer's `Offers` frame.
pub(crate) struct Offers {
    identity: Identity,
    /// The silence after which the peer takes this side for dead.
    timeout: Duration,
    transports: Vec<TransportOffer>,
}

impl Offers {
    /// Takes the offers out of an `Offers` frame. Returns an error for any other frame.
    pub fn from_frame(frame: Frame) -> Result<Self> {
        match frame {
            Frame::Offers { identity, peer_timeout_ms, transports } => {
                Ok(Self { identity, timeout: Duration::from_millis(peer_timeout_ms.into()), transports })
            }
            other => Err(unexpected(&other, "Offers")),
        }
    }
}

struct Handshake<'a> {
    /// `None` once the session or the close has taken the channel.
    channel: Option<FramedChannel>,
    /// What this side expects the peer to do next, for messages.
    stage: &'static str,
    spawner: &'a Spawner,
    limit: &'a TimeLimit,
}

impl Drop for Handshake<'_> {
    /// The caller dropped the handshake before its end: tells the peer.
    fn drop(&mut self) {
        self.send_final_frame(&abandoned());
    }
}

struct Admitted<P> {
    peer: P,
    handle: SessionHandle,
    commands: mpsc::UnboundedReceiver<SessionCommand>,
    incarnation: u64,
    liveness: Liveness,
}

impl Handshake<'_> {
    async fn run<H: SessionHost>(
        &mut self,
        host: &Weak<H>,
        settings: ControlSettings,
        role: Role,
        offers: Option<Offers>,
    ) -> Result<Admitted<H::Peer>> {
        // The side that accepts reserves nothing before it has the peer's offers.
        let offers = match (offers, role) {
            (None, Role::Accepting) => Some(self.offers().await?),
            (offers, _) => offers,
        };
        let fabric = upgrade(host)?;
        let identity = fabric.identity().clone();
        let incarnation = identity.incarnation;
        let their_offers = offers.as_ref().map(|offers| offers.transports.clone());
        let reservation = self.spawner.blocking(move || fabric.reserve(their_offers.as_deref())).await??;
        let peer_timeout_ms = u32::try_from(settings.peer_timeout.as_millis()).unwrap_or(u32::MAX);
        let transports = reservation.offers();
        self.channel()?.push(&Frame::Offers { identity, peer_timeout_ms, transports })?;
        let Offers { identity, timeout: their_timeout, transports } = match offers {
            Some(offers) => offers,
            None => self.offers().await?,
        };

        // Each of our rails connects to every rail of the peer that it is paired with.
        self.limit.raise(settings.limit_for(transports.iter().map(|offer| offer.rates.len()).sum()));
        self.stage = "report on its links";
        // The side that accepts has the peer's offers for every pair only after the peer's report.
        let their_report = if role == Role::Accepting { self.report().await? } else { Vec::new() };
        let bring_up = move || {
            let mut reservation = reservation;
            let our_report = reservation.complete(&transports, &their_report);
            (reservation, our_report, their_report)
        };
        let (reservation, our_report, their_report) = self.spawner.blocking(bring_up).await?;
        self.channel()?.push(&Frame::report(&our_report))?;
        let their_report = if role == Role::Connecting { self.report().await? } else { their_report };

        self.stage = "get ready";
        let (handle, commands) = SessionHandle::new();
        // Until `Ready` this future owns the peer: if the future is dropped, the peer is disconnected.
        let mut unaccepted =
            UnacceptedPeer(Some(reservation.admit(&their_report, identity, handle.clone())?));
        let peer = unaccepted.0.as_ref().ok_or_else(abandoned)?;
        self.grant(peer)?;
        self.channel()?.push(&Frame::Ready)?;
        self.ready(peer).await?;
        let liveness =
            Liveness::new(Instant::now(), settings.heartbeat, settings.peer_timeout, their_timeout);
        let peer = unaccepted.0.take().ok_or_else(|| closed("the peer is gone"))?;
        Ok(Admitted { peer, handle, commands, incarnation, liveness })
    }

    fn channel(&mut self) -> Result<&mut FramedChannel> {
        self.channel.as_mut().ok_or_else(abandoned)
    }

    /// Sends the final frame for `error` and closes the channel. Only the first call has an effect.
    fn send_final_frame(&mut self, error: &Error) {
        let Some(mut channel) = self.channel.take() else { return };
        if let Some(final_frame) = CloseReason::by_us(error.clone()).final_frame {
            let _ = channel.push(&final_frame);
        }
        self.spawner.spawn(channel.close());
    }

    async fn offers(&mut self) -> Result<Offers> {
        Offers::from_frame(self.channel()?.recv().await?)
    }

    async fn report(&mut self) -> Result<Vec<LinkReport>> {
        match self.channel()?.recv().await? {
            Frame::Report { links } => Ok(links),
            other => Err(unexpected(&other, "Report")),
        }
    }

    /// Sends the grants, so that the peer has them before its first operation.
    fn grant(&mut self, peer: &impl SessionPeer) -> Result<()> {
        for (label, grant) in peer.grants() {
            self.channel()?.push(&Frame::Grant { transport: label, grant })?;
        }
        Ok(())
    }

    /// Receives the peer's grants and then its `Ready`.
    async fn ready(&mut self, peer: &impl SessionPeer) -> Result<()> {
        // The peer sends one grant per transport at most.
        for _ in 0..=MAX_OFFERS {
            match self.channel()?.recv().await? {
                Frame::Ready => return Ok(()),
                Frame::Grant { transport, grant } => peer.note_grant(&transport, &grant)?,
                other => return Err(unexpected(&other, "Ready")),
            }
        }
        Err(Error::new(ErrorKind::Protocol, "connect", "the peer sent more grants than there are transports"))
    }
}

/// The error for a `frame` that the peer sent instead of `expected`.
pub(crate) fn unexpected(frame: &Frame, expected: &str) -> Error {
    match frame {
        Frame::Refuse { cause, reason } => refused(*cause, reason),
        Frame::Goodbye => closed("the peer closed the connection during the handshake"),
        _ => {
            let why =
                format!("the peer violated the protocol: it sent {} instead of {expected}", frame.name());
            Error::new(ErrorKind::Protocol, "connect", why)
        }
    }
}

/// The error of a handshake that its caller dropped.
fn abandoned() -> Error {
    closed("this side cancelled the handshake")
}

/// The fabric, or `Closed` if it has been dropped.
pub(crate) fn upgrade<H>(host: &Weak<H>) -> Result<Arc<H>> {
    host.upgrade().ok_or_else(|| closed("this fabric was closed"))
}
