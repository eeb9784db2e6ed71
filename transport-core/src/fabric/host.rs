//! The fabric's side of the control plane's traits.

use std::sync::Arc;

use super::FabricInner;
use super::admission::PeerAdmission;
use crate::control::{
    Bootstrap, ControlSettings, HandshakeLimiter, Identity, LinkReport, PeerReservation, SessionHandle,
    SessionHost, Spawner, Token, TransportOffer,
};
use crate::{Peer, Result};

impl SessionHost for FabricInner {
    type Peer = Peer;
    type Reservation = PeerAdmission;

    fn control_settings(&self) -> ControlSettings {
        self.settings
    }

    fn bootstrap(&self) -> Arc<dyn Bootstrap> {
        Arc::clone(&self.bootstrap)
    }

    fn rails(&self) -> usize {
        self.rails()
    }

    fn identity(&self) -> &Identity {
        self.identity()
    }

    fn token(&self) -> Option<&Token> {
        self.token()
    }

    fn admitting(self: &Arc<Self>) -> Vec<(Arc<Self>, Token)> {
        let all = std::iter::once(Arc::clone(self)).chain(self.tenants());
        all.filter_map(|fabric| fabric.token().cloned().map(|token| (fabric, token))).collect()
    }

    fn handshakes(&self) -> &HandshakeLimiter {
        &self.handshakes
    }

    fn spawner(&self) -> Result<Spawner> {
        // A tenant has a thread handle of its own, which ends before its parent's.
        Ok(self.control_thread("connect")?.spawner())
    }

    fn reserve(self: &Arc<Self>, theirs: Option<&[TransportOffer]>) -> Result<PeerAdmission> {
        self.prepare(theirs, false)
    }

    fn published(&self, name: &str) -> Option<Vec<u8>> {
        let region = super::lock(&self.published).get(name).cloned();
        region.filter(|region| !region.0.is_revoked()).map(|region| region.descriptor().to_bytes())
    }
}

impl PeerReservation for PeerAdmission {
    type Peer = Peer;

    fn offers(&self) -> Vec<TransportOffer> {
        self.offers()
    }

    fn complete(&mut self, theirs: &[TransportOffer], reports: &[LinkReport]) -> Vec<LinkReport> {
        self.complete(theirs, reports)
    }

    fn admit(self, theirs: &[LinkReport], identity: Identity, session: SessionHandle) -> Result<Peer> {
        self.admit(theirs, identity, session)
    }
}
