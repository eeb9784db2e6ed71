//! Regions that are being revoked.
//!
//! A revocation ends once no operation of this side uses the region and no peer is inside a copy to or from it.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use crate::Time;
use crate::index::TransportIndex;
use crate::memory::RegionInner;
use crate::op::OpId;

/// A region that is being revoked.
pub(crate) struct Revocation {
    /// The `revoke` operation that waits for this. `None` once it has its result, or if no operation waits.
    pub id: Option<OpId>,
    pub region: Arc<RegionInner>,
    pub deadline: Time,
    pub submitted_at: Time,
    /// Whether the engine has reported the revocation as stalled.
    pub stalled: bool,
    /// How operations and receives of this side use the region. No new ones begin, so this only falls.
    pub local_use: LocalUse,
    /// Whether the engine has told the operations and receives that use the region to end.
    pub users_stopped: bool,
}

/// How operations and receives of this side use a region that is being revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LocalUse {
    None,
    /// A write or a send reads from the region.
    ReadsFrom,
    /// A read or a receive writes into the region.
    WritesInto,
}

/// All revocations that have not ended.
#[derive(Default)]
pub(crate) struct Revocations(Vec<Revocation>);

impl Revocation {
    /// Whether operations or receives of this side still use the region.
    pub fn is_in_use(&self) -> bool {
        self.local_use > LocalUse::None
    }

    /// Revokes the keys of the region on `rails`. Returns the result once the revocation is over.
    pub fn poll(&self, transport: TransportIndex, rails: Range<usize>) -> Poll<crate::Result<()>> {
        match self.region.poll_quiesced(transport, rails, self.is_in_use()) {
            Poll::Ready(Ok(())) if self.local_use == LocalUse::WritesInto => Poll::Pending,
            Poll::Ready(result) => Poll::Ready(result),
            // The backend has been asked to revoke every key, and no operation waits for more.
            Poll::Pending if self.id.is_none() && !self.is_in_use() => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Revocations {
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Revocation> {
        self.0.iter()
    }

    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Revocation> {
        self.0.iter_mut()
    }

    pub fn get(&self, index: usize) -> &Revocation {
        &self.0[index]
    }

    pub fn get_mut(&mut self, index: usize) -> &mut Revocation {
        &mut self.0[index]
    }

    /// Adds a revocation; returns its index. If an earlier `revoke` of the same region timed out or was cancelled,
    /// the new operation waits for that revocation.
    pub fn add(
        &mut self,
        id: Option<OpId>,
        region: Arc<RegionInner>,
        deadline: Time,
        submitted_at: Time,
    ) -> usize {
        let is_same = |known: &Revocation| known.id.is_none() && Arc::ptr_eq(&known.region, &region);
        let index = self.0.iter().position(is_same).unwrap_or(self.0.len());
        match self.0.get_mut(index) {
            Some(known) => {
                (known.id, known.deadline, known.submitted_at, known.stalled) =
                    (id, deadline, submitted_at, false)
            }
            None => self.0.push(Revocation {
                id,
                region,
                deadline,
                submitted_at,
                stalled: false,
                local_use: LocalUse::WritesInto,
                users_stopped: false,
            }),
        }
        index
    }

    /// Removes a revocation, and moves the last one to its index. Returns the operation that waits for it.
    pub fn swap_remove(&mut self, index: usize) -> Option<OpId> {
        self.0.swap_remove(index).id
    }

    /// The number of revocations that an operation waits for.
    #[inline]
    pub fn awaited(&self) -> usize {
        if self.0.is_empty() { 0 } else { self.count_awaited() }
    }

    #[cold]
    fn count_awaited(&self) -> usize {
        self.0.iter().filter(|revocation| revocation.id.is_some()).count()
    }

    /// Lets an operation wait no longer. The region stays revoked. Returns false if the operation is no revocation.
    pub fn cancel(&mut self, id: OpId) -> bool {
        let found = self.0.iter_mut().find(|revocation| revocation.id == Some(id));
        found.is_some_and(|revocation| revocation.id.take().is_some())
    }

    /// Removes all revocations. Returns the operations that wait for them.
    pub fn take_awaited(&mut self) -> impl Iterator<Item = OpId> + use<> {
        std::mem::take(&mut self.0).into_iter().filter_map(|revocation| revocation.id)
    }
}
