//! Connections: each side's ring, and where the peer's is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use multirail_spi::{Error, ErrorKind, KeyMaterial, PeerSlot, RemoteMemory, Result, WorkKind};

use crate::ring::{LEN, Ring, SLOT, SLOTS, There};
use crate::wire::KNOCK;

/// One connection.
pub(crate) struct Link {
    pub slot: PeerSlot,
    theirs: OnceLock<(There, Arc<dyn RemoteMemory>)>,
    pub ring: Ring,
    /// Whether the peer is told that it may.
    pub knocks: bool,
    is_leaving: AtomicBool,
}

impl Link {
    fn new(slot: PeerSlot, ring: Ring, knocks: bool) -> Self {
        Self { slot, theirs: OnceLock::new(), ring, knocks, is_leaving: AtomicBool::new(false) }
    }

    /// The peer's ring; `None` where it does not stage, or is not connected yet.
    pub(crate) fn there(&self) -> Option<There> {
        self.theirs.get().map(|(there, _)| *there)
    }

    /// Whether the imm of a request would be taken for a knock, were it to go by the card.
    pub(crate) fn is_knock(&self, kind: WorkKind, imm: Option<u32>) -> bool {
        let knock = || self.there().and_then(|there| there.knock);
        kind == WorkKind::Write && imm == Some(KNOCK) && knock().is_some()
    }

    /// The connection is over, but for the endpoint's goodbye.
    pub(crate) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Release);
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    pub(crate) fn connect(&self, ring: Arc<dyn RemoteMemory>, knocks: bool) {
        let there =
            There { base: ring.base(), rkey: ring.rkey(), knock: (knocks && self.knocks).then_some(KNOCK) };
        let _ = self.theirs.set((there, ring));
    }
}

/// All of a domain, by slot.
#[derive(Default)]
pub(crate) struct Links {
    version: AtomicU64,
    all: Mutex<Vec<Option<Arc<Link>>>>,
}

impl Links {
    /// A new connection, which knocks if fewer than `knockers` are there.
    pub(crate) fn insert(&self, slot: PeerSlot, ring: Ring, knockers: u64) -> Arc<Link> {
        let at = slot.0 as usize;
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() <= at {
            all.resize(at + 1, None);
        }
        let knocks = (all.iter().flatten().count() as u64) < knockers;
        let link = Arc::new(Link::new(slot, ring, knocks));
        all[at] = Some(Arc::clone(&link));
        self.version.fetch_add(1, Ordering::Release);
        link
    }

    pub(crate) fn of(&self, slot: PeerSlot) -> Option<Arc<Link>> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(slot.0 as usize).cloned().flatten()
    }

    /// All connections are over.
    pub(crate) fn clear(&self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// A connection is over.
    pub(crate) fn remove(&self, link: &Arc<Link>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = all.get_mut(link.slot.0 as usize)
            && place.as_ref().is_some_and(|known| Arc::ptr_eq(known, link))
        {
            *place = None;
        }
    }

    /// Those there are, where that has changed since version `seen`.
    #[inline]
    pub(crate) fn since(&self, seen: &mut u64) -> Option<Vec<Option<Arc<Link>>>> {
        if self.version.load(Ordering::Acquire) == *seen {
            return None;
        }
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = self.version.load(Ordering::Acquire);
        Some(all.clone())
    }
}

/// What a side offers to who stages.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Stage {
    pub ring: KeyMaterial,
    /// Whether the side can knock, and is woken by it.
    pub knocks: bool,
}

/// What follows the card's own offer. A peer that does not stage reads the offer, and not what comes after it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Appendix {
    version: u8,
    stage: Stage,
    slots: u32,
    slot: u32,
}

const VERSION: u8 = 2;
/// The last bytes of an offer that has an appendix; before them stands its length, in two bytes.
const MARK: [u8; 8] = *b"mrstaged";

/// An offer with what a peer needs to stage.
pub(crate) fn append(mut offer: Vec<u8>, stage: Stage) -> Result<Vec<u8>> {
    let appendix = Appendix { version: VERSION, stage, slots: SLOTS as u32, slot: SLOT as u32 };
    let why = |error: postcard::Error| Error::new(ErrorKind::Io, "connect", error.to_string());
    let bytes = postcard::to_stdvec(&appendix).map_err(why)?;
    offer.extend_from_slice(&bytes);
    offer.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    offer.extend_from_slice(&MARK);
    Ok(offer)
}

/// An offer as the card wrote it; and by what the peer stages, if it does.
pub(crate) fn split(offer: &[u8]) -> Result<(&[u8], Option<Stage>)> {
    let Some((rest, len)) = offer.strip_suffix(&MARK).and_then(<[u8]>::split_last_chunk) else {
        return Ok((offer, None));
    };
    let malformed =
        |why: &str| Error::new(ErrorKind::Protocol, "connect", format!("what the peer stages by: {why}"));
    let at = rest.len().checked_sub(u16::from_le_bytes(*len).into());
    let (offer, bytes) = rest.split_at(at.ok_or_else(|| malformed("it is longer than its offer"))?);
    // First of all: what follows may be anything then.
    if let Some(version) = bytes.first().filter(|version| **version != VERSION) {
        let why = format!(
            "the peer stages by version {version}, this side by {VERSION}: use the same multirail on both"
        );
        return Err(Error::new(ErrorKind::Version, "connect", why));
    }
    let appendix: Appendix = postcard::from_bytes(bytes).map_err(|why| malformed(&why.to_string()))?;
    if (appendix.slots, appendix.slot) != (SLOTS as u32, SLOT as u32) {
        let Appendix { slots, slot, .. } = appendix;
        let why = format!(
            "the peer stages by {slots} slots of {slot} bytes, this side by {SLOTS} of {SLOT}: use the same \
             multirail on both"
        );
        return Err(Error::new(ErrorKind::Version, "connect", why));
    }
    if appendix.stage.ring.len != LEN as u64 || appendix.stage.ring.is_staged() {
        return Err(malformed("its ring cannot be"));
    }
    Ok((offer, Some(appendix.stage)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: KeyMaterial = KeyMaterial { base: 1 << 40, key: 77, len: LEN as u64 };

    proptest! {
        #[test]
        fn offers_come_apart_as_they_were_joined(offer: Vec<u8>, knocks: bool, bent: (prop::sample::Index, u8), cut: prop::sample::Index) {
            let joined = append(offer.clone(), Stage { ring: KEY, knocks }).unwrap();
            prop_assert_eq!(split(&joined).unwrap(), (&offer[..], Some(Stage { ring: KEY, knocks })));
            // Nothing panics, whatever comes.
            let mut other = joined.clone();
            other[bent.0.index(joined.len())] ^= bent.1;
            let _ = split(&other);
            let _ = split(&joined[cut.index(joined.len())..]);
            prop_assert_eq!(split(&joined[..joined.len() - 1]).unwrap().1, None);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let append = |offer, ring| append(offer, Stage { ring, knocks: true }).unwrap();
        let refused = |ring| split(&append(vec![1], ring)).unwrap_err().kind();
        assert_eq!(refused(KeyMaterial { len: 1, ..KEY }), ErrorKind::Protocol);
        assert_eq!(refused(KeyMaterial { base: KeyMaterial::STAGED, ..KEY }), ErrorKind::Protocol);
        let mut other = append(Vec::new(), KEY);
        other[0] = VERSION + 1;
        assert_eq!(split(&other).unwrap_err().kind(), ErrorKind::Version);
    }
}
