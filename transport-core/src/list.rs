//! Lists: transfers between entries of many regions, chosen by index.

mod entries;
mod planner;
mod region_list;
mod selection;

pub use region_list::{LocalList, RegionList, RemoteList};
pub use selection::Selection;

use crate::prepared::PreparedTransfer;
use crate::spi::WorkKind;
use crate::{Explanation, Op, Peer, ReadOptions, Result, WriteOptions};
use planner::plan;

impl Peer {
    /// Writes entries of `local` to entries of `remote`: the i-th selected entry of one list goes to the i-th selected
    /// entry of the other, and both have the same length. One operation spans any number of regions.
    ///
    /// ```
    /// # use multirail_core::{LocalList, Peer, Region, RemoteList, RemoteRegion, Result, WriteOptions};
    /// # fn hand_over(peer: &Peer, layers: &[Region], theirs: &[RemoteRegion]) -> Result<()> {
    /// // A KV cache: one region per layer, 1,000 blocks of 64 KiB each. Made once.
    /// let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
    /// for (mine, other) in layers.iter().zip(theirs) {
    ///     local.push_strided(mine, 0, 64 << 10, 1000, 64 << 10)?;
    ///     remote.push_strided(other, 0, 64 << 10, 1000, 64 << 10)?;
    /// }
    /// // Block 7 of the first layer goes to block 3, block 8 to block 1.
    /// let options = WriteOptions::new().imm(1);
    /// peer.write_list(&local, &[7, 8], &remote, &[3, 1], &options)?.detach();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Entries that follow each other in both regions share work requests; [`Outcome::merged`](crate::Outcome::merged)
    /// counts them. An entry that is longer than the transport's chunk is cut, as [`Peer::write`] cuts its range. With
    /// [`ImmMode::PerWr`](crate::ImmMode::PerWr) each entry is one request, with its imm. Entries have no order among
    /// each other.
    ///
    /// Regions that lie on different rails make one operation of several parts: each part uses the rails of its
    /// regions. An imm that comes last comes after all parts.
    ///
    /// # Errors
    /// Before submission: `InvalidRequest` (no entries, selections of different lengths, an index beyond a list, a pair
    /// of entries of different lengths), `RemoteAccess`, `Revoked`, `PeerDied`, `Unreachable`, `Unsupported`,
    /// `TooLarge` (with an imm per request, an entry that no single request can carry; more than 2^26 requests), `Busy`.
    pub fn write_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &WriteOptions,
    ) -> Result<Op> {
        let (local, remote) = ((local, local_selection.into()), (remote, remote_selection.into()));
        let parts = plan(self, WorkKind::Write, local, remote, options)?;
        self.submit_parts(parts, options.trigger.as_ref(), options.deadline, "write_list")
    }

    /// Reads entries of `remote` into entries of `local`: as [`Peer::write_list`], the other way.
    ///
    /// # Errors
    /// Those of [`Peer::write_list`].
    pub fn read_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &ReadOptions,
    ) -> Result<Op> {
        let (local, remote) = ((local, local_selection.into()), (remote, remote_selection.into()));
        let options = options.as_write();
        let parts = plan(self, WorkKind::Read, local, remote, &options)?;
        self.submit_parts(parts, options.trigger.as_ref(), options.deadline, "read_list")
    }

    /// Prepares a [`Peer::write_list`] with these arguments, to be posted many times.
    ///
    /// # Errors
    /// Those of [`Peer::write_list`] before submission.
    pub fn prepare_write_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &WriteOptions,
    ) -> Result<PreparedTransfer> {
        let (local, remote) = ((local, local_selection.into()), (remote, remote_selection.into()));
        let parts = plan(self, WorkKind::Write, local, remote, options)?;
        Ok(PreparedTransfer::new(self, parts, options))
    }

    /// Prepares a [`Peer::read_list`] with these arguments, to be posted many times.
    ///
    /// # Errors
    /// Those of [`Peer::read_list`] before submission.
    pub fn prepare_read_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &ReadOptions,
    ) -> Result<PreparedTransfer> {
        let (local, remote) = ((local, local_selection.into()), (remote, remote_selection.into()));
        let options = options.as_write();
        let parts = plan(self, WorkKind::Read, local, remote, &options)?;
        Ok(PreparedTransfer::new(self, parts, &options))
    }

    /// Explains what [`Peer::write_list`] with these arguments would do now: one explanation for each part, that is,
    /// for all regions that lie on the same rails.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_write_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &WriteOptions,
    ) -> Result<Vec<Explanation>> {
        self.prepare_write_list(local, local_selection, remote, remote_selection, options)?.explain()
    }

    /// Explains what [`Peer::read_list`] with these arguments would do now, as [`Peer::explain_write_list`].
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_read_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &ReadOptions,
    ) -> Result<Vec<Explanation>> {
        self.prepare_read_list(local, local_selection, remote, remote_selection, options)?.explain()
    }
}
