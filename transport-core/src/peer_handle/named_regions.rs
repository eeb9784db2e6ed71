//! What a handle knows by name: a peer's regions and catalogues, as imported for the current connection.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::Spawner;
use crate::{Error, ErrorKind, Peer, PeerId, RemoteCatalogue, RemoteList, RemoteRegion, Result};

/// The regions and catalogues that were looked up by name.
#[derive(Default)]
pub(super) struct NamedRegions(Mutex<Names>);

#[derive(Default)]
struct Names {
    regions: BTreeMap<String, Found<RemoteRegion>>,
    catalogues: BTreeMap<String, Found<Arc<RemoteCatalogue>>>,
}

/// The result of the last lookup of a name.
struct Found<T> {
    /// The connection that it was imported for.
    peer: PeerId,
    result: Result<T>,
}

/// By what a region is found again on another connection.
#[derive(Clone)]
pub(super) enum RegionName {
    Published(String),
    /// The region of this number in a catalogue.
    Catalogued {
        catalogue: String,
        number: usize,
    },
}

/// A region or a list of regions, with the name of each region. A region without a name cannot be found again.
pub(super) struct Named<T> {
    pub names: Vec<Option<RegionName>>,
    /// As imported for the connection that it was last used on.
    pub value: T,
}

/// How many names a new connection has, and how many of the former one's it does not have.
#[derive(Debug, Default)]
pub(super) struct ImportCount {
    pub imported: usize,
    pub missing: usize,
}

impl ImportCount {
    fn count<T>(&mut self, result: &Result<T>) {
        match result {
            Ok(_) => self.imported += 1,
            Err(_) => self.missing += 1,
        }
    }
}

impl NamedRegions {
    /// The region of this name, if it is imported for the connection `peer`.
    pub fn region(&self, name: &str, peer: PeerId) -> Option<RemoteRegion> {
        self.lock().regions.get(name).and_then(|found| found.on(peer)?.clone().ok())
    }

    /// The catalogue of this name, if it is imported for the connection `peer`.
    pub fn catalogue(&self, name: &str, peer: PeerId) -> Option<Arc<RemoteCatalogue>> {
        self.lock().catalogues.get(name).and_then(|found| found.on(peer)?.clone().ok())
    }

    /// Remembers a region that was looked up.
    pub fn add_region(&self, name: String, region: &RemoteRegion) {
        let found = Found { peer: region.peer(), result: Ok(region.clone()) };
        let former = insert(&mut self.lock().regions, name, found);
        drop(former);
    }

    /// Remembers a catalogue that was looked up.
    pub fn add_catalogue(&self, name: String, catalogue: &Arc<RemoteCatalogue>) {
        let found = Found { peer: catalogue.peer().id(), result: Ok(Arc::clone(catalogue)) };
        let former = insert(&mut self.lock().catalogues, name, found);
        drop(former);
    }

    /// The name of a region that was looked up, by itself or in a catalogue.
    pub fn name_of(&self, region: &RemoteRegion) -> Option<RegionName> {
        let names = self.lock();
        let is_it = |known: &RemoteRegion| Arc::ptr_eq(&known.0, &region.0);
        let is_found = |found: &Found<RemoteRegion>| found.result.as_ref().is_ok_and(is_it);
        if let Some((name, _)) = names.regions.iter().find(|(_, found)| is_found(found)) {
            return Some(RegionName::Published(name.clone()));
        }
        let mut catalogues = names.catalogues.iter();
        catalogues.find_map(|(name, found)| {
            let number = found.result.as_ref().ok()?.number_of(region)?;
            Some(RegionName::Catalogued { catalogue: name.clone(), number })
        })
    }

    /// The region for the connection `peer`: as it is, or found again by its name.
    ///
    /// # Errors
    /// `Revoked` if the region has no name, or its name was not looked up on this connection. The error of the lookup,
    /// if that failed: `NotFound` if the peer has not published the name again.
    pub fn resolve<'a>(&self, region: &'a mut Named<RemoteRegion>, peer: &Peer) -> Result<&'a RemoteRegion> {
        if region.value.peer() != peer.id() {
            region.value = self.find_again(region.names[0].as_ref(), peer)?;
        }
        Ok(&region.value)
    }

    /// The list for the connection `peer`: as it is, or with the same entries in the regions of the same names.
    ///
    /// # Errors
    /// As [`NamedRegions::resolve`]; `OutOfBounds` if a region is too short now for its entries.
    pub fn resolve_list<'a>(&self, list: &'a mut Named<RemoteList>, peer: &Peer) -> Result<&'a RemoteList> {
        if list.value.regions().iter().any(|region| region.peer() != peer.id()) {
            let regions = list.names.iter().map(|name| self.find_again(name.as_ref(), peer));
            let regions = regions.collect::<Result<_>>()?;
            list.value = list.value.in_regions(regions)?;
        }
        Ok(&list.value)
    }

    fn find_again(&self, name: Option<&RegionName>, peer: &Peer) -> Result<RemoteRegion> {
        match name {
            None => Err(Error::new(
                ErrorKind::Revoked,
                "rebind",
                "a region of the transfer was imported by its descriptor, which ended with the former connection; look \
                 regions up by PeerHandle::region or PeerHandle::catalogue",
            )),
            Some(RegionName::Published(name)) => {
                let names = self.lock();
                let result = names.regions.get(name).and_then(|found| found.on(peer.id()));
                named(result.cloned(), &format!("region {name:?}"))
            }
            Some(RegionName::Catalogued { catalogue: name, number }) => {
                let result = {
                    let names = self.lock();
                    names.catalogues.get(name).and_then(|found| found.on(peer.id())).cloned()
                };
                // Not under the lock: a region whose import has failed is tried again here.
                let region = result.map(|catalogue| catalogue?.region(*number).cloned());
                named(region, &format!("region {number} of catalogue {name:?}"))
            }
        }
    }

    /// Imports everything that is known by name for a new connection. Blocking work runs on a helper thread.
    ///
    /// # Errors
    /// The reason why the connection ended, if it did. What else fails is remembered for its name.
    pub async fn import_again(&self, peer: &Peer, spawner: &Spawner) -> Result<ImportCount> {
        let mut count = ImportCount::default();
        for name in self.region_names() {
            let result = import_region(peer, &name, spawner).await;
            peer.0.check_alive()?;
            count.count(&result);
            let former = insert(&mut self.lock().regions, name, Found { peer: peer.id(), result });
            drop(former);
        }
        for (name, numbers) in self.catalogue_names() {
            let result = import_catalogue(peer, &name, numbers, spawner).await.map(Arc::new);
            peer.0.check_alive()?;
            count.count(&result);
            let former = insert(&mut self.lock().catalogues, name, Found { peer: peer.id(), result });
            drop(former);
        }
        peer.0.check_alive()?;
        Ok(count)
    }

    fn region_names(&self) -> Vec<String> {
        self.lock().regions.keys().cloned().collect()
    }

    /// The names of the catalogues, and the numbers of the regions that were found in each.
    fn catalogue_names(&self) -> Vec<(String, Vec<usize>)> {
        let names = self.lock();
        let numbers = |found: &Found<Arc<RemoteCatalogue>>| {
            found.result.as_ref().map_or_else(|_| Vec::new(), |catalogue| catalogue.imported_numbers())
        };
        names.catalogues.iter().map(|(name, found)| (name.clone(), numbers(found))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Found<T> {
    /// The result, if it is of the connection `peer`.
    fn on(&self, peer: PeerId) -> Option<&Result<T>> {
        (self.peer == peer).then_some(&self.result)
    }
}

/// Inserts what was found, unless the map has it for a later connection. Returns what is not kept: dropping an import
/// may unmap memory, so the caller unlocks the map first.
#[must_use = "to be dropped after unlocking"]
fn insert<T>(map: &mut BTreeMap<String, Found<T>>, name: String, found: Found<T>) -> Option<Found<T>> {
    match map.get(&name) {
        Some(known) if known.peer > found.peer => Some(found),
        _ => map.insert(name, found),
    }
}

/// The error for what cannot be found again, with its name.
fn named<T>(result: Option<Result<T>>, what: &str) -> Result<T> {
    let not_looked_up = || {
        let why = format!(
            "{what} was imported for a former connection and not looked up on this one; look it up again by the handle"
        );
        Err(Error::new(ErrorKind::Revoked, "rebind", why))
    };
    result.unwrap_or_else(not_looked_up).map_err(|error| {
        let why = format!("{what} cannot be used on the new connection: {}", error.context());
        Error::new(error.kind(), "rebind", why).with_source(error)
    })
}

async fn import_region(peer: &Peer, name: &str, spawner: &Spawner) -> Result<RemoteRegion> {
    let (descriptor, peer) = (peer.published(name).await?, peer.clone());
    spawner.blocking(move || peer.import(&descriptor)).await?
}

async fn import_catalogue(
    peer: &Peer,
    name: &str,
    numbers: Vec<usize>,
    spawner: &Spawner,
) -> Result<RemoteCatalogue> {
    let published = import_region(peer, name, spawner).await?;
    let reader = peer.clone();
    let (reading, landing) = spawner.blocking(move || reader.begin_catalogue(&published)).await??;
    reading.await?;
    let reader = peer.clone();
    let import = move || {
        let catalogue = reader.end_catalogue(&landing)?;
        // A region that fails here is tried again when it is found.
        numbers.into_iter().for_each(|number| drop(catalogue.region(number)));
        Ok(catalogue)
    };
    spawner.blocking(import).await?
}
