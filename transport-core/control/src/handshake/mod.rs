//! From a fresh channel to a peer that both sides have admitted.
//!
//! 1. Both say [`Hello`](hello::Hello) at once: which versions they speak.
//! 2. With tokens, the side that connected proves that it has it, then the other.
//!    This far it goes in `authenticate.rs`; unauthenticated clients get no further.
//! 3. The side that connected reserves slots and offers them, with its name; then
//!    the other does.
//! 4. The side that connected brings its links up with the other's offers and reports
//!    what worked, with offers for rails that pair more than once; then the other does.
//! 5. Each admits the peer with the links that both reported, grants it what it may send
//!    over each of them, and says `Ready`.
//! 6. The peer is handed out when the other side is `Ready` too: what is posted
//!    from then on arrives at a fabric that knows the sender.

pub(crate) mod authenticate;
pub mod hello;
pub mod limiter;
pub mod proof;
pub(crate) mod time_limit;
pub mod token;
pub(crate) mod unauthenticated;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::errors::{closed, refused};
use crate::frame::{Frame, Identity, LinkReport, MAX_OFFERS, TransportOffer};
use crate::framed_channel::FramedChannel;
use crate::handshake::authenticate::AuthenticatedPeer;
use crate::handshake::proof::Role;
use crate::handshake::time_limit::Limit;
use crate::host::{PeerReservation, SessionHost, SessionPeer};
use crate::runtime::Spawner;
use crate::session::close::{CloseReason, FailOnDrop};
use crate::session::liveness::Liveness;
use crate::session::lookups::Lookups;
use crate::session::relocations::Relocations;
use crate::session::{Command, Session, SessionHandle};
use multirail_spi::{Error, ErrorKind, Result};

/// Rails that a handshake is given more time for: no peer may hold a place for longer by naming more.
const MOST_RAILS: usize = 64;

/// The limits of the control plane.
#[derive(Debug, Clone, Copy)]
pub struct ControlSettings {
    /// How often we are heard, unless the peer asks for more.
    pub heartbeat: Duration,
    /// Silence after which a peer is dead.
    pub peer_timeout: Duration,
    /// Limit of a authentication, of the handshake after it if that pairs one rail, and of a lookup.
    pub handshake_limit: Duration,
    /// What each further rail adds to that of a handshake.
    pub handshake_limit_per_rail: Duration,
}

impl ControlSettings {
    /// Limit of a handshake of sides of which one has so many rails, the other not more.
    pub fn limit_for(&self, rails: usize) -> Duration {
        let further = rails.clamp(1, MOST_RAILS) - 1;
        let more = self.handshake_limit_per_rail.saturating_mul(further as u32);
        self.handshake_limit.saturating_add(more)
    }
}

impl Default for ControlSettings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(500),
            // TCP repeats what was lost 0.2, 0.6, 1.4 and 3.0 s after it was sent: a network that is away for 2 s
            // is a silence of 3.5 s, heartbeats being 0.5 s apart.
            peer_timeout: Duration::from_secs(5),
            handshake_limit: Duration::from_secs(5),
            handshake_limit_per_rail: Duration::from_secs(1),
        }
    }
}

/// An admitted peer that nobody has taken yet; dropping it ends the connection.
pub(crate) struct UnacceptedPeer<P: SessionPeer>(Option<P>);

impl<P: SessionPeer> UnacceptedPeer<P> {
    /// The peer, from now on the user's.
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

/// Shakes hands with a peer that may come in, and starts the session. Runs on the
/// control thread.
pub(crate) async fn establish<H: SessionHost>(
    authenticated: AuthenticatedPeer<H>,
) -> Result<UnacceptedPeer<H::Peer>> {
    let AuthenticatedPeer { wire, address, role, host, offers } = authenticated;
    let inner = upgrade(&host)?;
    let settings = inner.control_settings();
    // Of a tenant it is the tenant's, which ends before its parent's.
    let spawner = inner.spawner()?;
    let limit = Limit::new(settings.limit_for(inner.rails()));
    drop(inner);
    let mut handshake =
        Handshake { wire: Some(wire), stage: "send its offers", spawner: &spawner, limit: &limit };
    let run = async {
        tokio::select! {
            biased;
            outcome = handshake.run(&host, settings, role, offers) => outcome,
            // A tenant's handshakes run on its parent's listener, which stays.
            () = spawner.closing() => Err(closed("this fabric was closed")),
        }
    };
    let outcome = limit.hold(run).await.unwrap_or_else(|| {
        let (limit, stage) = (limit.span().as_secs_f64(), handshake.stage);
        let why = format!(
            "{address} did not {stage} within {limit:.1} s: is it a multirail fabric, and is it running? \
             A busy host with many cards takes longer: FabricBuilder::handshake_limit, and its _per_rail"
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
    });
    let admitted = outcome.inspect_err(|error| handshake.part(error))?;
    let Admitted { peer, commands, incarnation, liveness } = admitted;
    peer.heard(Instant::now());
    peer.connected(address);
    let (unaccepted, fail) = (UnacceptedPeer(Some(peer.clone())), FailOnDrop(peer.clone()));
    let wire = handshake.wire.take().ok_or_else(abandoned)?;
    drop(handshake);
    let lookups = Lookups::new(settings.handshake_limit);
    let moves = Relocations::new(Instant::now());
    let session = Session { wire, peer, host, spawner, commands, incarnation, liveness, lookups, moves };
    session.spawner.clone().spawn(async move {
        // Captured, so that it is dropped even if this never gets a turn.
        let _fail = fail;
        session.run().await;
    });
    Ok(unaccepted)
}

/// What a peer says about itself.
pub(crate) struct Offers {
    identity: Identity,
    /// Silence after which it takes us for dead.
    timeout: Duration,
    transports: Vec<TransportOffer>,
}

impl Offers {
    /// Of a frame, if it is that one.
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
    /// Taken when the session, or the final_frame, takes over.
    wire: Option<FramedChannel>,
    /// What the peer is to do next, for messages.
    stage: &'static str,
    spawner: &'a Spawner,
    limit: &'a Limit,
}

impl Drop for Handshake<'_> {
    /// Given up half way, because nobody waits any more.
    fn drop(&mut self) {
        self.part(&abandoned());
    }
}

struct Admitted<P> {
    peer: P,
    commands: mpsc::UnboundedReceiver<Command>,
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
        // Who was called reserves nothing before the peer has said what it wants.
        let offers = match (offers, role) {
            (None, Role::Accepting) => Some(self.offers().await?),
            (offers, _) => offers,
        };
        let inner = upgrade(host)?;
        let identity = inner.identity().clone();
        let incarnation = identity.incarnation;
        let theirs = offers.as_ref().map(|offers| offers.transports.clone());
        let prepared = self.spawner.blocking(move || inner.reserve(theirs.as_deref())).await??;
        let peer_timeout_ms = u32::try_from(settings.peer_timeout.as_millis()).unwrap_or(u32::MAX);
        let transports = prepared.offers();
        self.wire()?.push(&Frame::Offers { identity, peer_timeout_ms, transports })?;
        let Offers { identity, timeout: their_timeout, transports } = match offers {
            Some(offers) => offers,
            None => self.offers().await?,
        };

        // Each of our rails is paired with each that falls to it.
        self.limit.raise(settings.limit_for(transports.iter().map(|offer| offer.rates.len()).sum()));
        self.stage = "report on its links";
        // Who was called has offers for every pair only once the other has reported.
        let theirs = if role == Role::Accepting { self.report().await? } else { Vec::new() };
        let bring_up = move || {
            let mut prepared = prepared;
            let report = prepared.complete(&transports, &theirs);
            (prepared, report, theirs)
        };
        let (prepared, report, theirs) = self.spawner.blocking(bring_up).await?;
        self.wire()?.push(&Frame::report(&report))?;
        let report = if role == Role::Connecting { self.report().await? } else { theirs };

        self.stage = "get ready";
        let (handle, commands) = SessionHandle::new();
        // Until `Ready` the peer is nobody's: if this future ends early, so does the peer.
        let mut unaccepted = UnacceptedPeer(Some(prepared.admit(&report, identity, handle)?));
        let peer = unaccepted.0.as_ref().ok_or_else(abandoned)?;
        self.grant(peer)?;
        self.wire()?.push(&Frame::Ready)?;
        self.ready(peer).await?;
        let liveness =
            Liveness::new(Instant::now(), settings.heartbeat, settings.peer_timeout, their_timeout);
        let peer = unaccepted.0.take().ok_or_else(|| closed("the peer is gone"))?;
        Ok(Admitted { peer, commands, incarnation, liveness })
    }

    fn wire(&mut self) -> Result<&mut FramedChannel> {
        self.wire.as_mut().ok_or_else(abandoned)
    }

    /// Tells the peer that it ends here, and why; once.
    fn part(&mut self, error: &Error) {
        let Some(mut wire) = self.wire.take() else { return };
        if let Some(final_frame) = CloseReason::by_us(error.clone()).final_frame {
            let _ = wire.push(&final_frame);
        }
        self.spawner.spawn(wire.close());
    }

    async fn offers(&mut self) -> Result<Offers> {
        Offers::from_frame(self.wire()?.recv().await?)
    }

    async fn report(&mut self) -> Result<Vec<LinkReport>> {
        match self.wire()?.recv().await? {
            Frame::Report { links } => Ok(links),
            other => Err(unexpected(&other, "Report")),
        }
    }

    /// Says what the peer may send, so that it knows before its first operation.
    fn grant(&mut self, peer: &impl SessionPeer) -> Result<()> {
        for (label, allowance) in peer.grants() {
            self.wire()?.push(&Frame::Grant { transport: label, allowance })?;
        }
        Ok(())
    }

    async fn ready(&mut self, peer: &impl SessionPeer) -> Result<()> {
        // One grant per transport.
        for _ in 0..=MAX_OFFERS {
            match self.wire()?.recv().await? {
                Frame::Ready => return Ok(()),
                Frame::Grant { transport, allowance } => peer.note_grant(&transport, &allowance)?,
                other => return Err(unexpected(&other, "Ready")),
            }
        }
        Err(Error::new(ErrorKind::Protocol, "connect", "more grants than there are transports"))
    }
}

/// What the peer said instead of `wanted`.
pub(crate) fn unexpected(frame: &Frame, wanted: &str) -> Error {
    match frame {
        Frame::Refuse { cause, reason } => refused(*cause, reason),
        Frame::Goodbye => closed("the peer closed the connection during the handshake"),
        _ => {
            let why = format!("{} where {wanted} was due: the peer broke the protocol", frame.name());
            Error::new(ErrorKind::Protocol, "connect", why)
        }
    }
}

fn abandoned() -> Error {
    closed("this side gave up the handshake")
}

pub(crate) fn upgrade<H>(host: &Weak<H>) -> Result<Arc<H>> {
    host.upgrade().ok_or_else(|| closed("this fabric was closed"))
}
