//! Admitting a peer: the two sides exchange offers, and bring links up on both sides or not at all.

use std::sync::{Arc, Weak};

use super::reservation::{RailSlot, Reservation};
use super::transport::COMPANION_SUFFIX;
use super::{FabricInner, lock};
use crate::control::{Identity, LinkReport, SessionHandle, TransportOffer};
use crate::engine::Control;
use crate::no_transport::{NoCommonTransport, OfferedTransport};
use crate::spi::HostArenas;
use crate::{Error, ErrorKind, Peer, PeerId, Result};

/// The slots that are reserved for a peer on every transport. If it is dropped before the peer is admitted, it gives
/// the slots back.
pub(crate) struct PeerAdmission {
    /// Weak, so that a peer that stalls in its handshake keeps no fabric open.
    fabric: Weak<FabricInner>,
    transports: Vec<Reservation>,
    /// The memory of the fabric.
    host_memory: Arc<HostArenas>,
    /// The transports that the peer offers.
    peer_offers: Vec<OfferedTransport>,
}

impl FabricInner {
    /// Reserves slots for a peer on every transport. The side that connects passes no offers, and reserves one slot
    /// per rail. The other side passes the peer's offers as `theirs`, and reserves one slot per pair of rails.
    /// `is_local` says that the peer is in this process.
    pub(crate) fn prepare(
        self: &Arc<Self>,
        theirs: Option<&[TransportOffer]>,
        is_local: bool,
    ) -> Result<PeerAdmission> {
        self.check_open("connect")?;
        if let Some(retained) = self.retained.upgrade() {
            retained.set_reachable();
        }
        let new = |transport| Reservation::new(transport, is_local);
        let transports = self.transports.iter().map(new).collect();
        let mut admission = PeerAdmission {
            fabric: Arc::downgrade(self),
            transports,
            host_memory: Arc::clone(&self.host_memory),
            peer_offers: Vec::new(),
        };
        admission.transports.iter_mut().try_for_each(|reservation| reservation.reserve(theirs))?;
        Ok(admission)
    }
}

impl PeerAdmission {
    /// The offers to send to the peer.
    pub(crate) fn offers(&self) -> Vec<TransportOffer> {
        self.transports.iter().map(Reservation::offer).collect()
    }

    /// Brings the links up with the peer's offers, and returns a report for each transport. May block while a backend
    /// talks to the peer's process.
    ///
    /// `reports` are the reports of a peer that connected to this side. They are empty on the side that connected: its
    /// peer waits for this side's reports.
    pub(crate) fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> Vec<LinkReport> {
        let data = theirs.iter().filter(|offer| !offer.label.ends_with(COMPANION_SUFFIX));
        self.peer_offers = data.map(|offer| OfferedTransport::new(&offer.label, &offer.backend)).collect();
        self.transports.iter_mut().map(|reservation| reservation.complete(theirs, reports)).collect()
    }

    /// Adds the peer to the fabric, with the links that both sides brought up.
    ///
    /// # Errors
    /// `Unreachable` if no transport is up on both sides; `Closed` if the fabric was closed.
    pub(crate) fn admit(
        mut self,
        theirs: &[LinkReport],
        identity: Identity,
        session: SessionHandle,
    ) -> Result<Peer> {
        let closed = || Error::new(ErrorKind::Closed, "connect", "the fabric was closed");
        let fabric = self.fabric.upgrade().ok_or_else(closed)?;
        fabric.check_open("connect")?;
        let mut links = Vec::new();
        let mut refused = None;
        for (reservation, transport) in self.transports.iter_mut().zip(&fabric.transports) {
            if reservation.refused.is_none() {
                reservation.refused = match theirs.iter().find(|report| report.label == reservation.label) {
                    None => Some("the peer did not report on this transport".into()),
                    Some(report) => report.refused.as_ref().map(|why| format!("refused by the peer: {why}")),
                };
            }
            // A companion comes behind its transport, and carries nothing without it.
            match transport.is_companion {
                true => reservation.refused = refused.clone().or(reservation.refused.take()),
                false => refused.clone_from(&reservation.refused),
            }
            links.extend(transport.groups.iter().map(|group| reservation.link(transport, group)));
        }
        if links.iter().all(|link| !link.is_up()) {
            let reason = |reservation: &Reservation| {
                format!("{}: {}", reservation.label, reservation.refused.as_deref().unwrap_or(""))
            };
            let data = || self.transports.iter().filter(|reservation| !reservation.is_companion);
            let why: Vec<_> = data().map(reason).collect();
            let ours = data().map(Reservation::offered).collect();
            let offers = NoCommonTransport::new(ours, std::mem::take(&mut self.peer_offers));
            let context = format!("no transport reaches {}; {}", identity.host, why.join("; "));
            return Err(Error::new(ErrorKind::Unreachable, "connect", context).with_source(offers));
        }
        // The slots of transports that are up belong to the peer now. Dropping `self` gives the others back.
        let up = self.transports.iter_mut().filter(|reservation| reservation.refused.is_none());
        up.for_each(|reservation| reservation.slots.clear());
        let id = PeerId::next();
        let peer = Peer::new(id, &fabric, identity, links, session);
        lock(&fabric.peers).insert(id, peer.clone());
        for link in peer.0.links.iter().filter(|link| link.is_up()) {
            if link.engine.first_rail == 0 {
                link.engine.receiver_credits.open(peer.0.grantee());
            }
            link.engine.control(Control::Link { peer: peer.0.clone() });
        }
        if fabric.check_open("connect").is_err() {
            peer.fail(closed());
        }
        Ok(peer)
    }
}

impl Drop for PeerAdmission {
    fn drop(&mut self) {
        if self.transports.iter().all(|reservation| reservation.slots.is_empty()) {
            return;
        }
        let slots = self.transports.iter_mut().flat_map(|reservation| &mut reservation.slots);
        slots.for_each(RailSlot::give_back);
        // The peer may have imported regions, by keys that it guessed.
        self.host_memory.retire();
    }
}

/// Connects two fabrics of this process by handing the offers over in memory. Returns each side's handle of the other.
pub(super) fn connect_local(ours: &Arc<FabricInner>, theirs: &Arc<FabricInner>) -> Result<(Peer, Peer)> {
    let mut a = ours.prepare(None, true)?;
    let offer_a = a.offers();
    let mut b = theirs.prepare(Some(&offer_a), true)?;
    let offer_b = b.offers();
    let report_a = a.complete(&offer_b, &[]);
    let report_b = b.complete(&offer_a, &report_a);
    let there = a.admit(&report_b, theirs.identity().clone(), SessionHandle::detached())?;
    let here = b.admit(&report_a, ours.identity().clone(), SessionHandle::detached())?;
    let _ = there.0.context.in_process_peer.set(Arc::downgrade(&here.0));
    let _ = here.0.context.in_process_peer.set(Arc::downgrade(&there.0));
    // Each side must know its grants before anyone can send.
    there.grants().try_for_each(|(label, grant)| here.note_grant(label, &grant))?;
    here.grants().try_for_each(|(label, grant)| there.note_grant(label, &grant))?;
    Ok((there, here))
}
