//! Admitting a peer: offers out, offers in, links up on both sides or not at all.

use std::sync::{Arc, Weak};

use super::reservation::Reservation;
use super::{FabricInner, lock};
use crate::control::{Identity, LinkReport, SessionHandle, TransportOffer};
use crate::engine::Control;
use crate::no_transport::{NoCommonTransport, OfferedTransport};
use crate::{Error, ErrorKind, Peer, PeerId, Result};

/// Slots reserved for a peer on every transport. Dropped unadmitted, it gives them back.
pub(crate) struct Prepared {
    /// Weak, so that a peer that stalls in its handshake keeps no fabric open.
    fabric: Weak<FabricInner>,
    transports: Vec<Reservation>,
    /// What the peer offers.
    theirs: Vec<OfferedTransport>,
}

impl FabricInner {
    /// Reserves slots on the rails of every transport: one each for the side that
    /// connects, and for the other one per pair with `theirs`; for a peer in this process
    /// or anywhere.
    pub(crate) fn prepare(
        self: &Arc<Self>,
        theirs: Option<&[TransportOffer]>,
        is_local: bool,
    ) -> Result<Prepared> {
        self.check_open("connect")?;
        if let Some(retained) = self.retained.upgrade() {
            retained.set_reachable();
        }
        let new = |transport| Reservation::new(transport, is_local);
        let transports = self.transports.iter().map(new).collect();
        let mut prepared = Prepared { fabric: Arc::downgrade(self), transports, theirs: Vec::new() };
        prepared.transports.iter_mut().try_for_each(|reservation| reservation.reserve(theirs))?;
        Ok(prepared)
    }
}

impl Prepared {
    /// What to tell the peer.
    pub(crate) fn offers(&self) -> Vec<TransportOffer> {
        self.transports.iter().map(Reservation::offer).collect()
    }

    /// Brings links up with the peer's offers, and says of each transport whether
    /// it worked. May block while a backend talks to the peer's process.
    ///
    /// `reports` are the peer's, where it connected; else empty: it waits for ours.
    pub(crate) fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> Vec<LinkReport> {
        self.theirs =
            theirs.iter().map(|offer| OfferedTransport::new(&offer.label, &offer.backend)).collect();
        self.transports.iter_mut().map(|reservation| reservation.complete(theirs, reports)).collect()
    }

    /// Makes the peer known, with the links that both sides brought up.
    pub(crate) fn admit(
        mut self,
        theirs: &[LinkReport],
        who: Identity,
        session: SessionHandle,
    ) -> Result<Peer> {
        let closed = || Error::new(ErrorKind::Closed, "connect", "the fabric was closed");
        let fabric = self.fabric.upgrade().ok_or_else(closed)?;
        fabric.check_open("connect")?;
        let mut links = Vec::new();
        for (prepared, transport) in self.transports.iter_mut().zip(&fabric.transports) {
            if prepared.refused.is_none() {
                prepared.refused = match theirs.iter().find(|report| report.label == prepared.label) {
                    None => Some("the peer did not report on this transport".into()),
                    Some(report) => report.refused.as_ref().map(|why| format!("refused by the peer: {why}")),
                };
            }
            links.extend(transport.groups.iter().map(|group| prepared.link(transport, group)));
        }
        if links.iter().all(|link| !link.is_up()) {
            let reason = |prepared: &Reservation| {
                format!("{}: {}", prepared.label, prepared.refused.as_deref().unwrap_or(""))
            };
            let why: Vec<_> = self.transports.iter().map(reason).collect();
            let ours = self.transports.iter().map(Reservation::offered).collect();
            let offers = NoCommonTransport::new(ours, std::mem::take(&mut self.theirs));
            let context = format!("no transport reaches {}; {}", who.host, why.join("; "));
            return Err(Error::new(ErrorKind::Unreachable, "connect", context).with_source(offers));
        }
        // What is up now belongs to the peer; what is refused goes back as `self` drops.
        let up = self.transports.iter_mut().filter(|prepared| prepared.refused.is_none());
        up.for_each(|prepared| prepared.slots.clear());
        let id = PeerId::next();
        let peer = Peer::new(id, &fabric, who, links, session);
        lock(&fabric.peers).insert(id, peer.clone());
        for link in peer.0.links.iter().filter(|link| link.is_up()) {
            if link.engine.first_rail == 0 {
                link.engine.ledger.open(&peer.0).inspect_err(|error| peer.fail(error.clone()))?;
            }
            link.engine.control(Control::Link { peer: Arc::clone(&peer.0) });
        }
        if fabric.check_open("connect").is_err() {
            peer.fail(closed());
        }
        Ok(peer)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for slot in self.transports.iter().flat_map(|prepared| &prepared.slots) {
            slot.domain.connector().disconnect(slot.slot);
        }
    }
}
