//! Making a peer's regions usable here.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::control::SessionHost;
use crate::descriptor::Entry;
use crate::engine::peer::{Link, PairedRail};
use crate::index::TransportIndex;
use crate::peer::PeerInner;
use crate::remote::{DirectPath, RemoteInner};
use crate::spi::{KeyMaterial, PeerSlot, RemoteMemory};
use crate::{Descriptor, Error, ErrorKind, MemoryKind, Peer, RemoteRegion, Result};

/// How long importing one key may take: a backend may have to ask the peer's process.
const IMPORT_LIMIT: Duration = Duration::from_secs(2);

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
        for links in peer.routes().filter(|links| links[0].is_up()) {
            match import(links, &descriptor.entries) {
                Ok(imports) => return Ok(peer.remote(descriptor, links[0].engine.transport, imports)),
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

/// Imports the entries of one transport: one per local rail, by the rail it sends to.
fn import(links: &[Link], entries: &[Entry]) -> Result<Vec<Option<Arc<dyn RemoteMemory>>>> {
    let label = &links[0].label;
    let mut imports = Vec::new();
    for rail in links.iter().flat_map(|link| &link.rails) {
        imports.push(match rail {
            None => None,
            Some(rail) => {
                let theirs = |entry: &&Entry| entry.transport == *label && entry.rail == rail.remote;
                let entry = entries.iter().find(theirs);
                entry.map(|entry| import_on(rail, &entry.key)).transpose()?
            }
        });
    }
    if imports.iter().all(Option::is_none) {
        let of = |entry: &&Entry| entry.transport == *label;
        let why = match entries.iter().find(of) {
            None => format!("the descriptor has no entry for transport {label}"),
            Some(entry) => format!(
                "its owner registered the region near rail {} of transport {label}, which no rail of this side sends to; register it on all rails",
                entry.rail
            ),
        };
        return Err(Error::new(ErrorKind::Unreachable, "import", why));
    }
    Ok(imports)
}

fn import_on(rail: &PairedRail, key: &KeyMaterial) -> Result<Arc<dyn RemoteMemory>> {
    if key.is_staged() && !rail.domain.capabilities().supports_staging {
        let why = "no card of the peer takes this memory, and it is staged there: allow that here, too \
                   (MULTIRAIL_STAGING=1)";
        return Err(Error::new(ErrorKind::Unsupported, "import", why));
    }
    rail.domain.import(rail.slot, key, IMPORT_LIMIT)
}

impl PeerInner {
    fn remote(
        &self,
        descriptor: &Descriptor,
        route: TransportIndex,
        imports: Vec<Option<Arc<dyn RemoteMemory>>>,
    ) -> RemoteRegion {
        let link = self.lead(route);
        // The direct path uses the first rail's import.
        let first = link.direct.clone().zip(imports.first().cloned().flatten());
        let direct_path = first.map(|(direct, import)| DirectPath {
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
            device_memory: matches!(descriptor.kind, MemoryKind::Cuda { .. }),
            route,
            lead: link.engine.group,
            direct_path,
            imports,
            revoked: false.into(),
        });
        self.remember(&remote);
        RemoteRegion(remote)
    }
}
