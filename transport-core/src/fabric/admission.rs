//! Admitting a peer: offers out, offers in, links up on both sides or not at all.

use std::future::Future;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::{FabricInner, Transport, lock};
use crate::control::{Identity, LinkReport, SessionHandle, TransportOffer};
use crate::descriptor::Entry;
use crate::engine::Control;
use crate::link::{Link, PairedRail};
use crate::peer::PeerInner;
use crate::remote::{RemoteInner, Shortcut};
use crate::spi::{Connector, Domain, PeerSlot, RemoteMemory};
use crate::{Descriptor, Error, ErrorKind, Peer, PeerId, RemoteRegion, Result};

/// How long importing one key may take: a backend may have to ask the peer's process.
const IMPORT_LIMIT: Duration = Duration::from_secs(2);

/// Slots reserved for a peer on every transport. Dropped unadmitted, it gives them back.
pub(crate) struct Prepared {
    /// Weak, so that a peer that stalls in its handshake keeps no fabric open.
    fabric: Weak<FabricInner>,
    transports: Vec<PreparedTransport>,
}

struct PreparedTransport {
    label: String,
    backend: &'static str,
    rails: Vec<PreparedRail>,
    /// Rails brought up, in pairs with the peer's rail of the same position.
    up: usize,
    refused: Option<String>,
}

struct PreparedRail {
    domain: Arc<dyn Domain>,
    slot: PeerSlot,
    offer: Vec<u8>,
}

impl FabricInner {
    /// Reserves a slot on every rail of every transport, for a peer in this process or anywhere.
    pub(crate) fn prepare(self: &Arc<Self>, is_local: bool) -> Result<Prepared> {
        self.check_open("connect")?;
        let prepare = if is_local { <dyn Connector>::prepare_local } else { <dyn Connector>::prepare };
        let transports = self.transports.iter().map(PreparedTransport::new).collect();
        let mut prepared = Prepared { fabric: Arc::downgrade(self), transports };
        for (transport, prepared) in self.transports.iter().zip(&mut prepared.transports) {
            for domain in &transport.domains {
                let (slot, offer) = prepare(domain.connector())?;
                prepared.rails.push(PreparedRail { domain: Arc::clone(domain), slot, offer });
            }
        }
        Ok(prepared)
    }
}

impl Prepared {
    /// What to tell the peer.
    pub(crate) fn offers(&self) -> Vec<TransportOffer> {
        let offer = |prepared: &PreparedTransport| TransportOffer {
            label: prepared.label.clone(),
            backend: prepared.backend.into(),
            rails: prepared.rails.iter().map(|rail| rail.offer.clone()).collect(),
        };
        self.transports.iter().map(offer).collect()
    }

    /// Brings links up with the peer's offers, and says of each transport whether
    /// it worked. May block while a backend talks to the peer's process.
    pub(crate) fn complete(&mut self, theirs: &[TransportOffer]) -> Vec<LinkReport> {
        self.transports
            .iter_mut()
            .map(|prepared| {
                let ours = |offer: &&TransportOffer| {
                    offer.label == prepared.label && offer.backend == prepared.backend
                };
                prepared.refused = match theirs.iter().find(ours) {
                    None => Some("the peer has no transport of this label and backend".into()),
                    Some(offer) => prepared.pair(&offer.rails).err().map(|error| error.to_string()),
                };
                LinkReport { label: prepared.label.clone(), refused: prepared.refused.clone() }
            })
            .collect()
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
        for (position, prepared) in self.transports.iter_mut().enumerate() {
            if prepared.refused.is_none() {
                prepared.refused = match theirs.iter().find(|report| report.label == prepared.label) {
                    None => Some("the peer did not report on this transport".into()),
                    Some(report) => report.refused.as_ref().map(|why| format!("refused by the peer: {why}")),
                };
            }
            links.push(prepared.link(&fabric.transports[position]));
        }
        if links.iter().all(|link| !link.is_up()) {
            let why: Vec<_> = links
                .iter()
                .map(|link| format!("{}: {}", link.label, link.refused.as_deref().unwrap_or("")))
                .collect();
            return Err(Error::new(
                ErrorKind::Unreachable,
                "connect",
                format!("no transport reaches {}; {}", who.host, why.join("; ")),
            ));
        }
        // What is up now belongs to the peer; what is refused goes back as `self` drops.
        self.transports.iter_mut().filter(|prepared| prepared.refused.is_none()).for_each(|prepared| {
            prepared.rails.drain(..prepared.up);
        });
        let id = PeerId::next();
        let peer = Peer::new(id, &fabric, who, links, session);
        lock(&fabric.peers).insert(id, peer.clone());
        for link in peer.0.links.iter().filter(|link| link.is_up()) {
            link.engine.control(Control::Link { peer: Arc::clone(&peer.0) });
        }
        if fabric.check_open("connect").is_err() {
            peer.fail(closed());
        }
        Ok(peer)
    }
}

impl PreparedTransport {
    fn new(transport: &Transport) -> Self {
        let (label, backend) = (transport.label.clone(), transport.backend);
        Self { label, backend, rails: Vec::new(), up: 0, refused: None }
    }

    /// Pairs local rail i with remote rail i, as far as both sides have rails.
    fn pair(&mut self, theirs: &[Vec<u8>]) -> Result<()> {
        for (rail, offer) in self.rails.iter().zip(theirs) {
            rail.domain.connector().complete(rail.slot, offer)?;
            self.up += 1;
        }
        match self.up {
            0 => Err(Error::new(ErrorKind::Unreachable, "connect", "the peer offers no rail")),
            _ => Ok(()),
        }
    }

    fn link(&self, transport: &Transport) -> Link {
        let up = if self.refused.is_some() { 0 } else { self.up };
        let pair = |rail: &PreparedRail| PairedRail { domain: Arc::clone(&rail.domain), slot: rail.slot };
        let mut rails: Vec<_> = self.rails.iter().take(up).map(|rail| Some(pair(rail))).collect();
        rails.resize_with(transport.domains.len(), || None);
        let first = rails.iter().flatten().next();
        Link {
            label: self.label.clone(),
            engine: Arc::clone(&transport.engine),
            index: if up > 0 { transport.engine.claim_link() } else { u32::MAX },
            direct: first.and_then(|rail| rail.domain.direct(rail.slot)),
            direct_slot: first.map_or(0, |rail| rail.slot.0),
            max_direct: first.map_or(0, |rail| rail.domain.capabilities().max_direct),
            rails,
            refused: self.refused.clone(),
            pending: CachePadded::new(AtomicU32::new(0)),
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // Of an admitted transport only the rails without a partner are left here.
        for rail in self.transports.iter().flat_map(|prepared| &prepared.rails) {
            rail.domain.connector().disconnect(rail.slot);
        }
    }
}

/// Connects two fabrics of this process by handing the offers over in memory.
pub(super) fn connect_local(ours: &Arc<FabricInner>, theirs: &Arc<FabricInner>) -> Result<(Peer, Peer)> {
    let (mut a, mut b) = (ours.prepare(true)?, theirs.prepare(true)?);
    let (offer_a, offer_b) = (a.offers(), b.offers());
    let (report_a, report_b) = (a.complete(&offer_b), b.complete(&offer_a));
    let there = a.admit(&report_b, theirs.identity.clone(), SessionHandle::detached())?;
    let here = b.admit(&report_a, ours.identity.clone(), SessionHandle::detached())?;
    let _ = (there.0.twin.set(Arc::downgrade(&here.0)), here.0.twin.set(Arc::downgrade(&there.0)));
    Ok((there, here))
}

impl Peer {
    /// Makes a region of this peer usable here, by the first transport that both
    /// the region and the connection have.
    ///
    /// A descriptor of an earlier opening of the peer is refused as `Revoked`.
    /// May block up to 2 s per rail while a backend asks the peer's process.
    pub fn import(&self, descriptor: &Descriptor) -> Result<RemoteRegion> {
        let peer = &self.0;
        peer.check_alive()?;
        if descriptor.incarnation != self.incarnation() {
            let why = "the descriptor is of another opening of the owner's fabric; ask for a new one";
            return Err(Error::new(ErrorKind::Revoked, "import", why));
        }
        let mut reasons = Vec::new();
        for (route, link) in peer.links.iter().enumerate().filter(|(_, link)| link.is_up()) {
            match link.import(&descriptor.entries) {
                Ok(imports) => return Ok(peer.remote(descriptor, route, imports)),
                Err(error) => reasons.push(error),
            }
        }
        Err(reasons.into_iter().next().unwrap_or_else(|| {
            let why = "the descriptor has no entry for a transport that reaches its owner";
            Error::new(ErrorKind::Unreachable, "import", why)
        }))
    }

    /// Looks up a region the peer published, and imports it.
    pub fn region(&self, name: &str) -> impl Future<Output = Result<RemoteRegion>> + Send + 'static {
        let (peer, name) = (self.clone(), name.to_owned());
        async move {
            let bytes = match peer.twin() {
                Some(twin) => twin.published(&name)?,
                // The death that ended the lookup says more than that the session is over.
                None => {
                    let found = peer.0.session.lookup(&name).await;
                    found.map_err(|error| peer.0.death().unwrap_or(error))?
                }
            };
            peer.import(&Descriptor::from_bytes(&bytes)?)
        }
    }

    /// What the fabric that knows this peer has published.
    fn published(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.0.fabric.upgrade().and_then(|fabric| fabric.published(name));
        let why = || format!("the peer has published nothing named {name:?}");
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "region", why()))
    }
}

impl Link {
    fn import(&self, entries: &[Entry]) -> Result<Vec<Option<Arc<dyn RemoteMemory>>>> {
        let mut imports = Vec::new();
        for (position, rail) in self.rails.iter().enumerate() {
            imports.push(match rail {
                None => None,
                Some(rail) => {
                    let ours =
                        |entry: &&Entry| entry.transport == self.label && usize::from(entry.rail) == position;
                    let entry = entries.iter().find(ours);
                    entry.map(|entry| rail.domain.import(rail.slot, &entry.key, IMPORT_LIMIT)).transpose()?
                }
            });
        }
        if imports.iter().all(Option::is_none) {
            let why = format!("the descriptor has no entry for transport {}", self.label);
            return Err(Error::new(ErrorKind::Unreachable, "import", why));
        }
        Ok(imports)
    }
}

impl PeerInner {
    fn remote(
        &self,
        descriptor: &Descriptor,
        route: usize,
        imports: Vec<Option<Arc<dyn RemoteMemory>>>,
    ) -> RemoteRegion {
        let link = &self.links[route];
        // Rails pair from the first on, and the way past the worker is the first rail's.
        let first = link.direct.clone().zip(imports.first().cloned().flatten());
        let shortcut = first.map(|(direct, import)| Shortcut {
            direct,
            max: link.max_direct,
            slot: PeerSlot(link.direct_slot),
            rkey: import.rkey(),
            base: import.base(),
            import,
        });
        let remote = Arc::new(RemoteInner {
            peer: self.id,
            region: descriptor.region,
            len: descriptor.len,
            access: descriptor.access(),
            route,
            shortcut,
            imports,
            revoked: false.into(),
        });
        self.remember(&remote);
        RemoteRegion(remote)
    }
}
