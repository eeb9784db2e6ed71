//! Prepared transfers that are made anew for each connection.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::{HandleState, NamedRegions};
use crate::{Peer, PreparedTransfer, Result};

/// Makes the transfer for a connection. It keeps the lists, and the remote regions as it last found them.
pub(super) type Recipe = Box<dyn FnMut(&Peer, &NamedRegions) -> Result<PreparedTransfer> + Send>;

/// A prepared transfer of a [`PeerHandle`](crate::PeerHandle): the same lists, made anew for each connection.
///
/// A [`PreparedTransfer`] belongs to one connection. After the peer has come back, a post of the former one fails with
/// `PeerDied`, and [`RebindableTransfer::current`] gives a new one. It finds the remote regions by the names by which
/// the handle had looked them up: [`PeerHandle::region`](crate::PeerHandle::region), or a catalogue's name and the
/// region's number in it. Nothing is posted again by itself.
///
/// It keeps the local regions alive, but not the handle.
pub struct RebindableTransfer {
    state: Arc<HandleState>,
    bound: Mutex<Bound>,
}

struct Bound {
    transfer: Arc<PreparedTransfer>,
    recipe: Recipe,
}

impl RebindableTransfer {
    /// The transfer that `recipe` makes for the current connection.
    pub(super) fn new(state: &Arc<HandleState>, mut recipe: Recipe) -> Result<Self> {
        let transfer = Arc::new(recipe(&state.peer()?, &state.names)?);
        Ok(Self { state: Arc::clone(state), bound: Mutex::new(Bound { transfer, recipe }) })
    }

    /// The transfer for the current connection. The first call after a reconnect checks and plans it anew; other calls
    /// return the same one.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`](crate::PeerHandle::peer). If the transfer cannot be made for the new connection,
    /// the text says why: `NotFound` if the peer has not published a region's name again, or its catalogue has fewer
    /// regions; `Revoked` if a region was imported by its descriptor instead of by a name, or was looked up on the
    /// former connection only; and the errors of preparing it, such as `OutOfBounds` if a region is shorter now, or
    /// `RemoteAccess`. A later call tries again.
    pub fn current(&self) -> Result<Arc<PreparedTransfer>> {
        let peer = self.state.peer()?;
        // If a recipe panics, the transfer is still that of its connection.
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let Bound { transfer, recipe } = &mut *bound;
        if transfer.peer().id() != peer.id() {
            *transfer = Arc::new(recipe(&peer, &self.state.names)?);
        }
        Ok(Arc::clone(transfer))
    }
}

impl fmt::Debug for RebindableTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RebindableTransfer").field("peer", &self.state.source.name()).finish_non_exhaustive()
    }
}
