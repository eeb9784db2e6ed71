//! From a fresh channel to a peer that may come in: hellos and proofs.
//!
//! Whoever is not past this is a stranger: nothing is reserved for it, its frames
//! are held to a few bytes, and it learns that somebody listens and nothing else.
//! A stranger that is given up is told nothing; one that is refused is told why.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::bootstrap::{Channel, MAX_FRAME};
use crate::frame::Code;
use crate::frame::Frame;
use crate::framed_channel::FramedChannel;
use crate::handshake::hello::Hello;
use crate::handshake::proof::{Role, Transcript};
use crate::handshake::time_limit::Limit;
use crate::handshake::{Offers, unexpected, upgrade};
use crate::host::SessionHost;
use crate::runtime::Spawner;
use crate::session::close::CloseReason;
use multirail_spi::{Error, ErrorKind, Result};

/// The longest frame of a stranger: a hello, a proof or a refusal, and some room for
/// the hellos of later versions.
const UNAUTHENTICATED_FRAME: usize = 2 << 10;

/// A peer that may come in, and to which fabric.
pub(crate) struct AuthenticatedPeer<H> {
    pub wire: FramedChannel,
    pub address: String,
    pub role: Role,
    /// The fabric that was called, or the tenant of it whose token the peer has.
    pub host: Weak<H>,
    /// Of a peer that needs no token: its offers are all that tells it from a
    /// stranger that has nothing to say.
    pub offers: Option<Offers>,
}

/// Greets the peer, for at most `limit`. Runs on the control thread.
pub(crate) async fn authenticate<H: SessionHost>(
    host: Weak<H>,
    spawner: &Spawner,
    channel: Channel,
    role: Role,
    limit: Duration,
) -> Result<AuthenticatedPeer<H>> {
    let address = channel.peer_address().to_owned();
    let binding = channel.binding().to_vec();
    let limit = Limit::new(limit);
    let mut authentication = Authentication {
        wire: FramedChannel::new(channel),
        role,
        binding,
        stage: "say hello",
        limit: &limit,
    };
    let outcome = limit.hold(authentication.run(&host)).await.unwrap_or_else(|| {
        let (limit, stage) = (limit.span().as_secs_f64(), authentication.stage);
        let why = format!(
            "{address} did not {stage} within {limit:.1} s: is it a multirail fabric, and is it running?"
        );
        Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
    });
    let mut wire = authentication.wire;
    match outcome {
        Ok((host, offers)) => Ok(AuthenticatedPeer { wire, address, role, host, offers }),
        Err(error) => {
            if let Some(final_frame) = CloseReason::by_us(error.clone()).final_frame {
                let _ = wire.push(&final_frame);
            }
            match role {
                Role::Connecting => spawner.spawn(wire.close()),
                // A stranger until the end: it takes no more room than one.
                Role::Accepting => wire.close().await,
            }
            Err(error)
        }
    }
}

impl<H: SessionHost> AuthenticatedPeer<H> {
    /// Ends the conversation and says why.
    pub fn refuse(mut self, error: &Error) -> impl Future<Output = ()> + Send + use<H> {
        let _ = self.wire.push(&Frame::refusal(error));
        self.wire.close()
    }
}

struct Authentication<'a> {
    wire: FramedChannel,
    role: Role,
    binding: Vec<u8>,
    /// What the peer is to do next, for messages.
    stage: &'static str,
    limit: &'a Limit,
}

impl Authentication<'_> {
    async fn run<H: SessionHost>(&mut self, called: &Weak<H>) -> Result<(Weak<H>, Option<Offers>)> {
        self.wire.limit(UNAUTHENTICATED_FRAME);
        let ours = Hello::new(upgrade(called)?.token().is_some())?;
        let our_hello = ours.encode()?;
        self.wire.push_bytes(our_hello.clone());
        let their_hello = self.wire.recv_bytes().await?;
        let theirs = Hello::decode(&their_hello)?;
        let (connecting, accepting) = match self.role {
            Role::Connecting => (our_hello, their_hello),
            Role::Accepting => (their_hello, our_hello),
        };
        let transcript = Transcript { connecting, accepting, binding: std::mem::take(&mut self.binding) };
        let host = match (ours.token, theirs.token) {
            (true, true) => self.prove(called, &transcript).await?,
            (false, false) => called.clone(),
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
        self.wire.limit(MAX_FRAME);
        let mut offers = None;
        if !ours.token && self.role == Role::Accepting {
            self.stage = "send its offers";
            // It reserves a slot on each of its rails first; they are taken to be as many as ours.
            let inner = upgrade(called)?;
            self.limit.raise(inner.control_settings().limit_for(inner.rails()));
            drop(inner);
            offers = Some(Offers::from_frame(self.wire.recv().await?)?);
        }
        Ok((host, offers))
    }

    /// Shows that we have the token, and sees that the peer has it.
    async fn prove<H: SessionHost>(&mut self, called: &Weak<H>, transcript: &Transcript) -> Result<Weak<H>> {
        self.stage = "prove that it has the token";
        match self.role {
            Role::Connecting => {
                let token = upgrade(called)?.token().cloned().ok_or_else(|| denied("no token"))?;
                self.wire.push(&Frame::Proof { mac: transcript.prove(&token, Role::Connecting) })?;
                let proof = self.proof().await?;
                match transcript.verify(&token, Role::Accepting, &proof) {
                    true => Ok(called.clone()),
                    false => Err(denied("the peer does not have this side's token: is it the right peer?")),
                }
            }
            Role::Accepting => {
                let proof = self.proof().await?;
                let admitting = upgrade(called)?.admitting();
                // All are tried, so that the time tells nothing about which it was.
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
                self.wire.push(&Frame::Proof { mac: transcript.prove(token, Role::Accepting) })?;
                Ok(Arc::downgrade(fabric))
            }
        }
    }

    async fn proof(&mut self) -> Result<Code> {
        match self.wire.recv().await? {
            Frame::Proof { mac } => Ok(mac),
            other => Err(unexpected(&other, "Proof")),
        }
    }
}

fn denied(why: &str) -> Error {
    Error::new(ErrorKind::Permission, "connect", why)
}
