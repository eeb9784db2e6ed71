//! Endpoints that move: telling the other side, and following it.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Peer;
use crate::engine::peer::PairedRail;
use crate::index::GroupIndex;
use crate::spi::{Connector, PeerSlot};
use crate::{Error, ErrorKind, Result};

/// The renewals of a slot that are under way, twice, and 1 more once it is to be disconnected: the last of
/// them does that, or the slot could be another peer's before they end.
#[derive(Default)]
pub(crate) struct Renewals(AtomicU32);

const LEFT: u32 = 1;
const ONE: u32 = 2;

impl PairedRail {
    /// Renews the slot, which stays this peer's meanwhile.
    fn renews<T>(&self, renew: impl FnOnce(&dyn Connector) -> Result<T>) -> Result<T> {
        let begins = |state: u32| (state & LEFT == 0).then(|| state + ONE);
        if self.renewals.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, begins).is_err() {
            let why = "the peer has left meanwhile";
            return Err(Error::new(ErrorKind::Closed, "renew a connection", why));
        }
        let _ends = Ends(self);
        renew(self.domain.connector())
    }

    /// Disconnects the slot: now, or once nothing renews it.
    pub(crate) fn disconnect(&self) {
        if self.renewals.0.fetch_or(LEFT, Ordering::AcqRel) == 0 {
            self.domain.connector().disconnect(self.slot);
        }
    }
}

/// Ends a renewal, also one that panics.
struct Ends<'a>(&'a PairedRail);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let Self(rail) = self;
        if rail.renewals.0.fetch_sub(ONE, Ordering::AcqRel) == ONE | LEFT {
            rail.domain.connector().disconnect(rail.slot);
        }
    }
}

impl Peer {
    /// Renews the connection of the pair of that number of the transport called `label`, and wakes the engine, so that
    /// its endpoint looks at the new connection: nothing else wakes an endpoint that sleeps.
    fn renew<T>(
        &self,
        label: &str,
        pair: u16,
        renew: impl FnOnce(&dyn Connector, PeerSlot) -> Result<T>,
    ) -> Result<T> {
        let up = self.0.links.iter().filter(|link| link.is_up() && link.label == label);
        let mut pairs = up.flat_map(|link| link.pairs().map(move |(_, pair)| (link, pair)));
        let Some((link, pair)) = pairs.find(|(_, known)| known.pair == pair) else {
            let why = format!("pair {pair} of {label:?}, which is none between us");
            return Err(Error::new(ErrorKind::Protocol, "renew a connection", why));
        };
        let renewed = pair.renews(|connector| renew(connector, pair.slot));
        link.engine.wake();
        renewed
    }

    /// The other side is somewhere else with one pair of rails: we follow.
    pub(crate) fn note_move(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>> {
        self.renew(label, pair, |connector, slot| connector.renew(slot, offer))
    }

    /// The other side has followed us.
    pub(crate) fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()> {
        self.renew(label, pair, |connector, slot| connector.renewed(slot, answer))
    }
}

impl super::PeerInner {
    /// Tells the other side where our rail is, if it has moved: rail `rail` of the link over
    /// `group`.
    pub(crate) fn tell_move(&self, group: GroupIndex, rail: usize) {
        let link = &self.links[group];
        for (_, pair) in link.pairs().filter(|(of, _)| *of == rail) {
            let connector = pair.domain.connector();
            let told = connector.offer_again(pair.slot).and_then(|offer| {
                let Some(offer) = offer else { return Ok(()) };
                if let Some(twin) = self.twin.get().and_then(std::sync::Weak::upgrade).map(Peer) {
                    let answer = twin.note_move(&link.label, pair.pair, &offer)?;
                    return pair.renews(|connector| connector.renewed(pair.slot, &answer));
                }
                self.session.moved(&link.label, pair.pair, offer);
                Ok(())
            });
            if let Err(error) = told {
                tracing::warn!(%error, rail, "a peer is not told that a rail has moved, and cannot be reached over it");
            }
        }
    }
}
