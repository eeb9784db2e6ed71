//! From a fresh channel to a peer that both sides have admitted.
//!
//! 1. Both say [`Hello`] at once: who they are, and which versions they speak.
//! 2. Both reserve slots and send their offers. Strangers never get that far.
//! 3. Each brings its links up with the other's offers and reports what worked.
//! 4. Each admits the peer with the links that both reported, and says `Ready`.
//! 5. The peer is handed out when the other side is `Ready` too: what is posted
//!    from then on arrives at a fabric that knows the sender.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::bootstrap::Channel;
use super::ending::{End, closed, refused};
use super::frame::{Frame, LinkReport, TransportOffer};
use super::hello::Hello;
use super::liveness::Liveness;
use super::lookups::Lookups;
use super::session::{Command, Session, SessionHandle};
use super::thread::Spawner;
use super::wire::Wire;
use crate::fabric::{FabricInner, Prepared};
use crate::{Error, ErrorKind, Peer, Result};

/// The limits of the control plane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ControlSettings {
    /// How often we are heard, unless the peer asks for more.
    pub heartbeat: Duration,
    /// Silence after which a peer is dead.
    pub peer_timeout: Duration,
    /// Limit of a handshake, and of a lookup.
    pub handshake_limit: Duration,
}

impl Default for ControlSettings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(500),
            peer_timeout: Duration::from_secs(3),
            handshake_limit: Duration::from_secs(5),
        }
    }
}

/// An admitted peer that nobody has taken yet; dropping it ends the connection.
pub(crate) struct Unclaimed(Option<Peer>);

impl Unclaimed {
    /// The peer, from now on the user's.
    pub fn claim(mut self) -> Result<Peer> {
        self.0.take().ok_or_else(|| closed("the peer is gone"))
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(peer) = self.0.take() {
            peer.disconnect();
        }
    }
}

/// Shakes hands over `channel` and starts the session. Runs on the control thread.
pub(crate) async fn establish(
    fabric: Weak<FabricInner>,
    spawner: &Spawner,
    channel: Channel,
) -> Result<Unclaimed> {
    let settings = upgrade(&fabric)?.control_settings();
    let address = channel.peer_address().to_owned();
    let mut handshake = Handshake { wire: Some(Wire::new(channel)), stage: "say hello", spawner };
    let outcome =
        timeout(settings.handshake_limit, handshake.run(&fabric, settings)).await.unwrap_or_else(|_| {
            let (limit, stage) = (settings.handshake_limit.as_secs_f64(), handshake.stage);
            let why = format!(
                "{address} did not {stage} within {limit:.1} s: is it a multirail fabric, and is it running?"
            );
            Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
        });
    let admitted = outcome.inspect_err(|error| handshake.part(error))?;
    let Admitted { peer, commands, incarnation, liveness } = admitted;
    peer.0.is_heard(Instant::now());
    let _ = peer.0.address.set(address);
    let unclaimed = Unclaimed(Some(peer.clone()));
    let wire = handshake.wire.take().ok_or_else(abandoned)?;
    let (spawner, lookups) = (spawner.clone(), Lookups::new(settings.handshake_limit));
    let session = Session { wire, peer, fabric, spawner, commands, incarnation, liveness, lookups };
    session.spawner.clone().spawn(session.run());
    Ok(unclaimed)
}

struct Handshake<'a> {
    /// Taken when the session, or the farewell, takes over.
    wire: Option<Wire>,
    /// What the peer is to do next, for messages.
    stage: &'static str,
    spawner: &'a Spawner,
}

impl Drop for Handshake<'_> {
    /// Given up half way, because nobody waits any more.
    fn drop(&mut self) {
        self.part(&abandoned());
    }
}

struct Admitted {
    peer: Peer,
    commands: mpsc::UnboundedReceiver<Command>,
    incarnation: u64,
    liveness: Liveness,
}

impl Handshake<'_> {
    async fn run(&mut self, fabric: &Weak<FabricInner>, settings: ControlSettings) -> Result<Admitted> {
        let ours = Hello::new(upgrade(fabric)?.identity().clone(), settings.peer_timeout);
        self.wire()?.push_bytes(ours.encode()?);
        let theirs = Hello::decode(&self.wire()?.recv_bytes().await?)?;

        self.stage = "send its offers";
        let inner = upgrade(fabric)?;
        let prepared = blocking(move || inner.prepare()).await??;
        self.wire()?.push(&Frame::Offers { transports: prepared.offers() })?;
        let offers = self.offers().await?;

        self.stage = "report on its links";
        let (prepared, report) = blocking(move || complete(prepared, &offers)).await?;
        self.wire()?.push(&Frame::report(&report))?;
        let report = self.report().await?;

        self.stage = "get ready";
        let (handle, commands) = SessionHandle::new();
        let incarnation = ours.identity.incarnation;
        let their_timeout = theirs.peer_timeout();
        // Until `Ready` the peer is nobody's: if this future ends early, so does the peer.
        let mut unclaimed = Unclaimed(Some(prepared.admit(&report, theirs.identity, handle)?));
        self.wire()?.push(&Frame::Ready)?;
        self.ready().await?;
        let liveness =
            Liveness::new(Instant::now(), settings.heartbeat, settings.peer_timeout, their_timeout);
        let peer = unclaimed.0.take().ok_or_else(|| closed("the peer is gone"))?;
        Ok(Admitted { peer, commands, incarnation, liveness })
    }

    fn wire(&mut self) -> Result<&mut Wire> {
        self.wire.as_mut().ok_or_else(abandoned)
    }

    /// Tells the peer that it ends here, and why; once.
    fn part(&mut self, error: &Error) {
        let Some(mut wire) = self.wire.take() else { return };
        if let Some(farewell) = End::by_us(error.clone()).farewell {
            let _ = wire.push(&farewell);
        }
        self.spawner.spawn(wire.close());
    }

    async fn offers(&mut self) -> Result<Vec<TransportOffer>> {
        match self.wire()?.recv().await? {
            Frame::Offers { transports } => Ok(transports),
            other => Err(unexpected(&other, "Offers")),
        }
    }

    async fn report(&mut self) -> Result<Vec<LinkReport>> {
        match self.wire()?.recv().await? {
            Frame::Report { links } => Ok(links),
            other => Err(unexpected(&other, "Report")),
        }
    }

    async fn ready(&mut self) -> Result<()> {
        match self.wire()?.recv().await? {
            Frame::Ready => Ok(()),
            other => Err(unexpected(&other, "Ready")),
        }
    }
}

/// What the peer said instead of `wanted`.
fn unexpected(frame: &Frame, wanted: &str) -> Error {
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

fn upgrade(fabric: &Weak<FabricInner>) -> Result<Arc<FabricInner>> {
    fabric.upgrade().ok_or_else(|| closed("this fabric was closed"))
}

fn complete(mut prepared: Prepared, offers: &[TransportOffer]) -> (Prepared, Vec<LinkReport>) {
    let report = prepared.complete(offers);
    (prepared, report)
}

/// Runs what may block on a helper thread: meanwhile other sessions go on.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    spawn_blocking(work)
        .await
        .map_err(|e| closed("a backend panicked, or this fabric was closed").with_source(e))
}
