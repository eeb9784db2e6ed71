//! Connecting: an offer out, the peer's offer in.

use std::sync::Arc;

use multirail_spi::{Connector, Error, ErrorKind, PeerSlot, Result};

use crate::domain::{Core, LoopbackDomain, random};
use crate::host::Host;
use crate::offer::Offer;
use crate::peer::{Inbound, Outbound, Reach};
use crate::segment::Segment;

impl Connector for LoopbackDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare_with(Segment::create()?, Host::here(), self.socket()?)
    }

    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare_with(Segment::private()?, Host::default(), String::new())
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        let offer = Offer::parse(offer)?;
        let core = &self.shared.core;
        let state =
            |kind, context: &str| Error::new(kind, "connect", format!("peer slot {}: {context}", slot.0));
        match core.peers.find(slot) {
            Some(peer) if peer.leaving => {
                return Err(state(ErrorKind::Closed, "disconnected; prepare a new one"));
            }
            Some(peer) if peer.outbound.is_some() => return Err(state(ErrorKind::Busy, "connected already")),
            Some(_) => {}
            None => return Err(state(ErrorKind::NotFound, "was never prepared; call `prepare` first")),
        }
        let outbound = Arc::new(Outbound::new(slot, reach(&offer)?));
        let kept = core.peers.update(slot, |peer| {
            let free = !peer.leaving && peer.outbound.is_none();
            if free {
                peer.outbound = Some(outbound);
            }
            free
        });
        if kept != Some(true) {
            return Err(state(ErrorKind::Busy, "changed while it was being connected"));
        }
        core.door.ring();
        #[cfg(target_os = "linux")]
        if let Some(server) = self.shared.server.get() {
            server.look_again();
        }
        Ok(())
    }

    fn disconnect(&self, slot: PeerSlot) {
        let core = &self.shared.core;
        let left = core.peers.update(slot, |peer| {
            let first = !peer.leaving;
            peer.leaving = true;
            first.then(|| peer.clone())
        });
        let Some(Some(peer)) = left else { return };
        peer.hang_up();
        core.regions.remove_board(&peer.inbound);
        if core.polled.load(std::sync::atomic::Ordering::Acquire) {
            core.door.ring();
        } else {
            core.peers.remove(slot, &peer.inbound);
        }
        #[cfg(target_os = "linux")]
        if let Some(server) = self.shared.server.get() {
            server.look_again();
        }
    }
}

impl LoopbackDomain {
    fn prepare_with(&self, segment: Segment, host: Host, socket: String) -> Result<(PeerSlot, Vec<u8>)> {
        let core = &self.shared.core;
        let token = random()?;
        let inbound = Arc::new(Inbound::new(segment, core.door.clone(), token));
        let offer = Offer { host, process: std::process::id(), domain: core.id, token, socket };
        let bytes = offer.to_bytes()?;
        Ok((core.peers.insert(inbound), bytes))
    }

    /// The name of the domain's socket; starts the server at first use.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn socket(&self) -> Result<String> {
        if let Some(server) = self.shared.server.get() {
            return Ok(server.name().into());
        }
        let server = crate::server::Server::start(&self.shared.core)?;
        Ok(self.shared.server.get_or_init(|| server).name().into())
    }

    #[cfg(any(not(target_os = "linux"), miri))]
    fn socket(&self) -> Result<String> {
        Ok(String::new())
    }
}

/// Finds the peer: in this process, or in another one of this host.
fn reach(offer: &Offer) -> Result<Reach> {
    let unreachable = |why: String| Error::new(ErrorKind::Unreachable, "connect", why);
    // An offer to this process alone says nothing of its host: to find out costs more than the rest.
    let is_local = offer.host == Host::default();
    if !is_local && let Some(obstacle) = Host::here().obstacle(&offer.host) {
        return Err(unreachable(obstacle));
    }
    let Some(core) = Core::here(offer.domain) else {
        let why = "the offer was made for a peer in its own process: prepare one for others";
        return if is_local { Err(unreachable(why.into())) } else { reach_process(offer) };
    };
    let inbound = core.admit(&offer.token)?.ok_or_else(|| {
        let context = "the peer's offer was used already or withdrawn: exchange new offers";
        Error::new(ErrorKind::Unreachable, "connect", context)
    })?;
    Ok(Reach::Local { inbound, domain: Arc::downgrade(&core) })
}

#[cfg(all(target_os = "linux", not(miri)))]
fn reach_process(offer: &Offer) -> Result<Reach> {
    Ok(Reach::Process(Box::new(crate::dial::dial(offer)?)))
}

#[cfg(any(not(target_os = "linux"), miri))]
fn reach_process(_: &Offer) -> Result<Reach> {
    let context = "loopback reaches other processes on Linux only: use a network transport, or one process";
    Err(Error::new(ErrorKind::Unsupported, "connect", context))
}
