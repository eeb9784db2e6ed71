//! Authenticates a peer on a new channel: hellos and proofs.
//!
//! Until this is done, the peer is an unauthenticated client. This side reserves nothing for such
//! a client, limits its frames to 2 KiB, and sends it only a hello: that a fabric listens, its versions,
//! and whether it has a token. This side sends a refused client the reason, and a dropped client
//! nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::bootstrap::{Channel, MAX_FRAME};
use crate::frame::{Code, Frame};
use crate::framed_channel::FramedChannel;
use crate::handshake::hello::Hello;
use crate::handshake::limits::TimeLimit;
use crate::handshake::proof::{Role, Transcript};
use crate::handshake::{Offers, unexpected, upgrade};
use crate::host::SessionHost;
use crate::runtime::Spawner;
use crate::session::close::CloseReason;
use multirail_spi::{Error, ErrorKind, Result};

/// The longest frame of an unauthenticated client in bytes. A hello, a proof and a refusal fit, and so
/// should the hellos of later versions.
const UNAUTHENTICATED_FRAME: usize = 2 << 10;

/// An authenticated peer, and the fabric that it has authenticated to.
pub(crate) struct AuthenticatedPeer<H> {
    pub channel: FramedChannel,
    pub address: String,
    pub role: Role,
    /// The fabric that listens or connects, or the tenant of it whose token the peer has.
    pub host: Weak<H>,
    /// The offers of a peer that connected and needs no token. Without a token, only a client that has
    /// sent its offers counts as authenticated.
    pub offers: Option<Offers>,
}

/// Exchanges hellos and proofs with the peer, for at most `limit`. Runs on the control thread.
pub(crate) async fn authenticate<H: SessionHost>(
    host: Weak<H>,
    spawner: &Spawner,
    channel: Channel,
    role: Role,
    limit: Duration,
) -> Result<AuthenticatedPeer<H>> {
    let address = channel.peer_address().to_owned();
    let binding = channel.binding().to_vec();
    let limit = TimeLimit::new(limit);
    let mut authentication = Authentication {
        channel: FramedChannel::new(channel),
        role,
        binding,
        stage: "send its hello",
        limit: &limit,
    };
    let outcome = limit.enforce(authentication.run(&host)).await.unwrap_or_else(|| {
        let (limit, stage) = (limit.span().as_secs_f64(), authentication.stage);
        let why = format!(
            "{address} did not {stage} within {limit:.1} s: is it a multirail fabric, and is it running?"
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
    });
    let mut channel = authentication.channel;
    match outcome {
        Ok((host, offers)) => Ok(AuthenticatedPeer { channel, address, role, host, offers }),
        Err(error) => {
            if let Some(final_frame) = CloseReason::by_us(error.clone()).final_frame {
                let _ = channel.push(&final_frame);
            }
            match role {
                Role::Connecting => spawner.spawn(channel.close()),
                // The close is awaited here, so that it counts as part of the unauthenticated client.
                Role::Accepting => channel.close().await,
            }
            Err(error)
        }
    }
}

impl<H: SessionHost> AuthenticatedPeer<H> {
    /// Sends the peer a refusal with the reason and closes the connection.
    pub fn refuse(mut self, error: &Error) -> impl Future<Output = ()> + Send + use<H> {
        let _ = self.channel.push(&Frame::refusal(error));
        self.channel.close()
    }
}

struct Authentication<'a> {
    channel: FramedChannel,
    role: Role,
    binding: Vec<u8>,
    /// What this side expects the peer to do next, for messages.
    stage: &'static str,
    limit: &'a TimeLimit,
}

impl Authentication<'_> {
    async fn run<H: SessionHost>(&mut self, host: &Weak<H>) -> Result<(Weak<H>, Option<Offers>)> {
        self.channel.set_frame_limit(UNAUTHENTICATED_FRAME);
        let ours = Hello::new(upgrade(host)?.token().is_some())?;
        let our_hello = ours.encode()?;
        self.channel.push_bytes(our_hello.clone());
        let their_hello = self.channel.recv_bytes().await?;
        let theirs = Hello::decode(&their_hello)?;
        let (connecting, accepting) = match self.role {
            Role::Connecting => (our_hello, their_hello),
            Role::Accepting => (their_hello, our_hello),
        };
        let transcript = Transcript { connecting, accepting, binding: std::mem::take(&mut self.binding) };
        let authenticated_to = match (ours.token, theirs.token) {
            (true, true) => self.prove(host, &transcript).await?,
            (false, false) => host.clone(),
            (false, true) => {
                return Err(denied("the peer asks for a token: FabricBuilder::token, or --token-file"));
            }
            (true, false) => {
                return Err(denied(
                    "this side has a token and the peer has none: give the peer the same one \
                     (FabricBuilder::token, or --token-file)",
                ));
            }
        };
        self.channel.set_frame_limit(MAX_FRAME);
        let mut offers = None;
        if !ours.token && self.role == Role::Accepting {
            self.stage = "send its offers";
            // The peer first reserves a slot on each of its rails. This side assumes that the peer has as many rails
            // as this side.
            let fabric = upgrade(host)?;
            self.limit.raise(fabric.control_settings().limit_for(fabric.rails()));
            drop(fabric);
            offers = Some(Offers::from_frame(self.channel.recv().await?)?);
        }
        Ok((authenticated_to, offers))
    }

    /// Proves to the peer that this side has the token, and verifies the peer's proof.
    async fn prove<H: SessionHost>(&mut self, host: &Weak<H>, transcript: &Transcript) -> Result<Weak<H>> {
        self.stage = "prove that it has the token";
        match self.role {
            Role::Connecting => {
                let token =
                    upgrade(host)?.token().cloned().ok_or_else(|| denied("this side has no token"))?;
                self.channel.push(&Frame::Proof { mac: transcript.prove(&token, Role::Connecting) })?;
                let proof = self.proof().await?;
                match transcript.verify(&token, Role::Accepting, &proof) {
                    true => Ok(host.clone()),
                    false => Err(denied("the peer does not have this side's token: is it the right peer?")),
                }
            }
            Role::Accepting => {
                let proof = self.proof().await?;
                let admitting = upgrade(host)?.admitting();
                // All tokens are tried, so that the time does not reveal which one matched.
                let mut matching = admitting
                    .iter()
                    .map(|(fabric, token)| {
                        transcript.verify(token, Role::Connecting, &proof).then_some((fabric, token))
                    })
                    .collect::<Vec<_>>()
                    .into_iter()
                    .flatten();
                let (fabric, token) = matching.next().ok_or_else(|| {
                    denied("the peer's token is another one: give both sides the same (FabricBuilder::token, or --token-file)")
                })?;
                self.channel.push(&Frame::Proof { mac: transcript.prove(token, Role::Accepting) })?;
                Ok(Arc::downgrade(fabric))
            }
        }
    }

    async fn proof(&mut self) -> Result<Code> {
        match self.channel.recv().await? {
            Frame::Proof { mac } => Ok(mac),
            other => Err(unexpected(&other, "Proof")),
        }
    }
}

fn denied(why: &str) -> Error {
    Error::new(ErrorKind::Permission, "connect", why)
}
