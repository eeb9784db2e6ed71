//! Remote regions: regions of a peer that this side has imported.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::descriptor::Entry;
use crate::engine::memory::{DirectPath, RemoteInner};
use crate::engine::peer::{Link, PairedRail};
use crate::spi::{Paths, PeerSlot, RemoteKey, RemoteMemory};
use crate::{Access, Descriptor, Error, ErrorKind, MemoryKind, PeerId, Result};

/// The most time for the import of one key: a backend may have to ask the peer's process.
const IMPORT_LIMIT: Duration = Duration::from_secs(2);

/// A region of a peer. Clones share it. Dropping the last clone releases what was mapped for it.
#[derive(Clone)]
pub struct RemoteRegion(pub(crate) Arc<RemoteInner>);

impl RemoteRegion {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Whether there are no bytes; such a region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// What the owner allows this side to do with the region.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The peer that owns the region.
    pub fn peer(&self) -> PeerId {
        self.0.peer
    }

    /// How bytes get to the region, in a few words for people: the device, mapped memory, a copy by the kernel,
    /// staging.
    pub fn path(&self) -> &'static str {
        self.0.path()
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRegion")
            .field("peer", &self.0.peer)
            .field("region", &self.0.region)
            .field("len", &self.0.len)
            .field("access", &self.0.access)
            .field("path", &self.path())
            .finish()
    }
}

impl RemoteRegion {
    /// Imports a region of `peer` over the transport of `links`.
    ///
    /// # Errors
    /// `Unreachable` if the region has no entry for the transport, or none for a rail that this side sends to; the
    /// errors of the backend.
    pub(crate) fn import(peer: PeerId, links: &[Link], descriptor: &Descriptor) -> Result<Self> {
        let imports = import_entries(links, &descriptor.entries)?;
        let link = &links[0];
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
        Ok(Self(Arc::new(RemoteInner {
            peer,
            region: descriptor.region,
            len: descriptor.len,
            access: descriptor.access(),
            device_memory: matches!(descriptor.kind, MemoryKind::Cuda { .. }),
            transport: link.engine.transport,
            first_group: link.engine.group,
            direct_path,
            paths: [false, true].map(|in_device_memory| {
                let import = imports.iter().flatten().next();
                import.map_or(Paths::empty(), |import| import.paths(in_device_memory))
            }),
            coalesce: link.capabilities().and_then(|caps| caps.coalesce).unwrap_or_default(),
            max_coalesced: imports.iter().flatten().map(|import| import.max_coalesced()).min().unwrap_or(0),
            imports,
            revoked: false.into(),
        })))
    }
}

/// Imports the entries of one transport. Returns one import per local rail: that of the remote rail it sends to.
fn import_entries(links: &[Link], entries: &[Entry]) -> Result<Vec<Option<Arc<dyn RemoteMemory>>>> {
    let label = &links[0].label;
    let mut imports = Vec::new();
    for rail in links.iter().flat_map(|link| &link.rails) {
        imports.push(match rail {
            None => None,
            Some(rail) => {
                let is_theirs = |entry: &&Entry| entry.transport == *label && entry.rail == rail.remote;
                let entry = entries.iter().find(is_theirs);
                entry.map(|entry| import_on(rail, &entry.key)).transpose()?
            }
        });
    }
    if imports.iter().all(Option::is_none) {
        let is_of_transport = |entry: &&Entry| entry.transport == *label;
        let why = match entries.iter().find(is_of_transport) {
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

fn import_on(rail: &PairedRail, key: &RemoteKey) -> Result<Arc<dyn RemoteMemory>> {
    if key.is_staged() && !rail.domain.capabilities().supports_staging {
        let why = "no device of the peer can register this memory, so the peer stages it; allow staging on this \
                   side too (MULTIRAIL_STAGING=1)";
        return Err(Error::new(ErrorKind::Unsupported, "import", why));
    }
    rail.domain.import(rail.slot, key, IMPORT_LIMIT)
}
