//! The connection to one member, and the next one when it is lost.

use std::sync::Arc;
use std::time::Duration;

use multirail::{Error, ErrorKind, Peer};
use tokio::time::sleep;

use super::{GroupState, SlotId};
use crate::Member;
use crate::backoff::Backoff;

/// Keeps one slot connected. It ends with its slot.
pub struct LinkTask {
    pub state: Arc<GroupState>,
    pub member: Member,
    pub slot: SlotId,
    /// Whether this side connects. If not, the member does, and the group accepts.
    pub connects: bool,
}

impl LinkTask {
    /// Watches `peer`, if the slot is connected already. Then connects, again and again.
    pub async fn run(self, mut peer: Option<Peer>) {
        let name = &self.member.name;
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
        loop {
            while let Some(connected) = peer.take() {
                let reason = connected.closed().await;
                tracing::info!(?name, %reason, "the connection to a member is lost");
                peer = self.state.lost(name, self.slot);
                backoff.reset();
            }
            if !self.connects {
                return;
            }
            match self.connect().await {
                Attempt::Connected(connected) => {
                    if !self.state.connected(name, self.slot, &connected) {
                        connected.disconnect();
                        return;
                    }
                    tracing::info!(?name, peer = connected.id().number(), "connected to a member");
                    peer = Some(connected);
                }
                Attempt::OwnFabricClosed | Attempt::IsOwnFabric => return,
                Attempt::Failed(error) => {
                    tracing::debug!(?name, %error, "cannot connect to a member yet");
                    sleep(backoff.next()).await;
                }
            }
        }
    }

    /// Connects to the first address that answers.
    async fn connect(&self) -> Attempt {
        let mut last = None;
        for address in &self.member.addresses {
            let connecting = match self.state.fabric() {
                // The fabric is not held while the member answers.
                Some(fabric) => fabric.connect(address),
                None => return Attempt::OwnFabricClosed,
            };
            match connecting.await {
                Ok(peer) if peer.incarnation() == self.state.own => {
                    peer.disconnect();
                    return Attempt::IsOwnFabric;
                }
                Ok(peer) if self.member.incarnation == 0 || peer.incarnation() == self.member.incarnation => {
                    return Attempt::Connected(peer);
                }
                Ok(other) => {
                    other.disconnect();
                    let why = format!("another process listens at {address} by now");
                    last = Some(Error::new(ErrorKind::PeerDied, "connect", why));
                }
                Err(error) => last = Some(error),
            }
        }
        Attempt::Failed(
            last.unwrap_or_else(|| {
                Error::new(ErrorKind::Unreachable, "connect", "the member has no address")
            }),
        )
    }
}

/// How an attempt to connect has ended. The kind of an error may come from the member, and decides nothing.
enum Attempt {
    Connected(Peer),
    OwnFabricClosed,
    /// The directory lists this fabric itself, without its incarnation.
    IsOwnFabric,
    Failed(Error),
}
