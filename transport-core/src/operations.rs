//! The operations of a peer. Each is checked once here. Then it runs at once in the calling thread, or is submitted to
//! the engines.

// Over 800 lines: all operations of one type, with the checks that they share.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::coalescing::coalesces;
use crate::engine::memory::{RegionInner, RemoteInner};
use crate::engine::op::OpId;
use crate::engine::peer::{CheckedRange, Link};
use crate::engine::plan::{ListPlan, PieceRule, Shape};
use crate::engine::{OnEnd, SharedState, Submission, Work};
use crate::list::plan;
use crate::notifications::NotificationBytes;
use crate::options::{PER_WR_UNIT, ReadOptions, SendOptions, WriteOptions};
use crate::outgoing::Outgoing;
use crate::pages::Pages;
use crate::prepared::{Part, PreparedTransfer};
use crate::span_link::{TracedTransfer, parent};
use crate::spi::{Capabilities, Operations, WorkKind};
use crate::striping::{OpSlot, OpSlots};
use crate::{
    Access, Error, ErrorKind, ImmMode, LocalList, Op, PathPolicy, Peer, Region, RemoteList, RemoteRegion,
    Result, Selection, Time, TraceContext, Trigger,
};

/// When an operation was submitted, its trigger, and its deadline.
#[derive(Clone)]
pub(crate) struct Times {
    submitted_at: Time,
    trigger: Option<Trigger>,
    deadline: Time,
}

impl Peer {
    /// Writes a range of `src` to `offset` bytes into `dst`. The operation resolves when the bytes are visible at the
    /// target.
    ///
    /// # Errors
    /// Before submission: `OutOfBounds`, `RemoteAccess`, `Revoked`, `PeerDied`, `InvalidRequest` (an empty range),
    /// `Unreachable` (no rails in common, or a path that the [`PathPolicy`] does not allow), `Busy`.
    pub fn write(&self, src: &Region, range: Range<usize>, dst: &RemoteRegion, offset: usize) -> Result<Op> {
        self.write_as(src, range, dst, offset, &WriteOptions::DEFAULT)
    }

    /// As [`Peer::write`], with options.
    pub fn write_with(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &RemoteRegion,
        offset: usize,
        options: &WriteOptions,
    ) -> Result<Op> {
        self.write_as(src, range, dst, offset, options)
    }

    /// Inlined into both callers, so that a plain write need not look at its options.
    #[inline(always)]
    fn write_as(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &RemoteRegion,
        offset: usize,
        options: &WriteOptions,
    ) -> Result<Op> {
        let (link, span) = self.check_write(src, range, dst, offset, options, "write")?;
        if options.extras.is_some() {
            return self.write_with_extras(link, src, dst, span, options);
        }
        if options.may_run_at_once()
            && let Some(op) =
                link.try_direct(&src.0, &dst.0, span, WorkKind::Write, options.imm, options.locality)
        {
            return Ok(op);
        }
        self.write_later(link, src, dst, span, options)
    }

    /// A write that does not run at once in the calling thread.
    #[inline(never)]
    fn write_later(
        &self,
        link: &Link,
        src: &Region,
        dst: &RemoteRegion,
        span: CheckedRange,
        options: &WriteOptions,
    ) -> Result<Op> {
        if options.may_run_at_once()
            && let Some(op) =
                link.try_direct_device_memory(&src.0, &dst.0, span, WorkKind::Write, options.imm)
        {
            return Ok(op);
        }
        let shape = cut_write(link, span, options, "write")?;
        if options.coalesce.is_some() || dst.0.max_coalesced > 0 {
            return self.write_either_way(link, shape, src, dst, options);
        }
        let work = options.work(shape, src, dst);
        self.submit_inlined(link, work, options.trigger.as_ref(), options.deadline, "write")
    }

    /// A write that may be coalesced. A function of its own: to change a finished [`Work`] cost other writes 30
    /// instructions.
    #[cold]
    #[inline(never)]
    fn write_either_way(
        &self,
        link: &Link,
        shape: Shape,
        src: &Region,
        dst: &RemoteRegion,
        options: &WriteOptions,
    ) -> Result<Op> {
        let work = self.work(WorkKind::Write, shape, src, dst, options)?;
        self.submit_when(link, work, options.trigger.as_ref(), options.deadline, "write")
    }

    #[cold]
    #[inline(never)]
    fn write_with_extras(
        &self,
        link: &Link,
        src: &Region,
        dst: &RemoteRegion,
        span: CheckedRange,
        options: &WriteOptions,
    ) -> Result<Op> {
        let direct = || {
            let (imm, locality) = (options.imm, options.locality);
            let direct = link.try_direct(&src.0, &dst.0, span, WorkKind::Write, imm, locality);
            direct.or_else(|| link.try_direct_device_memory(&src.0, &dst.0, span, WorkKind::Write, imm))
        };
        let parts = || {
            let shape = cut_write(link, span, options, "write")?;
            let work = self.work(WorkKind::Write, shape, src, dst, options)?;
            Ok(vec![Part { transport: dst.0.transport, work }])
        };
        self.submit_with_extras(parts, Some(&direct), options, "write")
    }

    /// Delivers immediate data without bytes.
    pub fn write_imm(&self, imm: u32) -> Result<Op> {
        let link = self.check_imm(imm, "write_imm")?;
        if let Some(op) = link.try_direct_message(WorkKind::Write, std::ptr::null_mut(), 0, Some(imm)) {
            return Ok(op);
        }
        self.submit(link, imm_alone(imm), None, "write_imm")
    }

    /// Writes pages of `page` bytes: the i-th page of `from` in `src` to the i-th page of `to` in `dst`.
    ///
    /// If many pages follow the page before them in both regions, such neighbours share work requests, up to the
    /// transport's chunk. [`Outcome::merged`](crate::Outcome::merged) counts them. With
    /// [`ImmMode::PerWr`] each page is a request, with its imm.
    ///
    /// # Errors
    /// Before submission: `InvalidRequest` (lists of different lengths, no pages, pages without bytes), `OutOfBounds`,
    /// `RemoteAccess`, `Revoked`, `PeerDied`, `Unreachable` (no rails in common, or a path that the [`PathPolicy`] does
    /// not allow), `Unsupported`, `TooLarge` (a page that no single request can carry), `Busy`.
    pub fn write_pages(
        &self,
        src: &Region,
        from: impl Into<Pages>,
        dst: &RemoteRegion,
        to: impl Into<Pages>,
        page: usize,
    ) -> Result<Op> {
        self.write_pages_with(src, from, dst, to, page, &WriteOptions::DEFAULT)
    }

    /// As [`Peer::write_pages`], with options.
    pub fn write_pages_with(
        &self,
        src: &Region,
        from: impl Into<Pages>,
        dst: &RemoteRegion,
        to: impl Into<Pages>,
        page: usize,
        options: &WriteOptions,
    ) -> Result<Op> {
        let (link, work) = self.plan_write_pages(src, from.into(), dst, to.into(), page, options)?;
        if options.extras.is_some() {
            let parts = vec![Part { transport: dst.0.transport, work }];
            return self.submit_with_extras(|| Ok(parts), None, options, "write_pages");
        }
        self.submit_when(link, work, options.trigger.as_ref(), options.deadline, "write_pages")
    }

    /// Prepares a [`Peer::write_pages_with`] with these arguments, to be posted many times.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use multirail_core::{Peer, Region, RemoteRegion, Pages, WriteOptions, Result};
    /// # fn hand_over(peer: &Peer, cache: &Region, theirs: &RemoteRegion) -> Result<()> {
    /// let (from, to) = (Pages::new([7, 1, 3]), Pages::new([0, 1, 2]));
    /// let options = WriteOptions::new().imm(1);
    /// let pages = peer.prepare_write_pages(cache, &from, theirs, &to, 64 << 10, &options)?;
    /// for _ in 0..1000 {
    ///     pages.post()?.wait(Duration::from_secs(1))?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Peer::write_pages_with`] before submission.
    pub fn prepare_write_pages(
        &self,
        src: &Region,
        from: impl Into<Pages>,
        dst: &RemoteRegion,
        to: impl Into<Pages>,
        page: usize,
        options: &WriteOptions,
    ) -> Result<PreparedTransfer> {
        let (_, work) = self.plan_write_pages(src, from.into(), dst, to.into(), page, options)?;
        Ok(PreparedTransfer::new(self, vec![Part { transport: dst.0.transport, work }], options))
    }

    /// Checks a paged write. Returns the link, and the work to submit over it.
    pub(crate) fn plan_write_pages(
        &self,
        src: &Region,
        from: Pages,
        dst: &RemoteRegion,
        to: Pages,
        page: usize,
        options: &WriteOptions,
    ) -> Result<(&Link, Work)> {
        self.plan_pages(WorkKind::Write, (src, from), (dst, to), page, options)
    }

    /// Reads pages of `page` bytes: into the i-th page of `to` in `dst` from the i-th page of `from` in `src`. The local
    /// side comes first, as in [`Peer::read`].
    ///
    /// # Errors
    /// Those of [`Peer::write_pages`]. `Unsupported` names a transport that cannot read.
    pub fn read_pages(
        &self,
        dst: &Region,
        to: impl Into<Pages>,
        src: &RemoteRegion,
        from: impl Into<Pages>,
        page: usize,
    ) -> Result<Op> {
        self.read_pages_with(dst, to, src, from, page, &ReadOptions::default())
    }

    /// As [`Peer::read_pages`], with options.
    pub fn read_pages_with(
        &self,
        dst: &Region,
        to: impl Into<Pages>,
        src: &RemoteRegion,
        from: impl Into<Pages>,
        page: usize,
        options: &ReadOptions,
    ) -> Result<Op> {
        let (link, work) = self.plan_read_pages(dst, to.into(), src, from.into(), page, options)?;
        if options.extras.is_some() {
            let parts = vec![Part { transport: src.0.transport, work }];
            return self.submit_with_extras(|| Ok(parts), None, &options.as_write(), "read_pages");
        }
        self.submit_when(link, work, options.trigger.as_ref(), options.deadline, "read_pages")
    }

    /// Prepares a [`Peer::read_pages_with`] with these arguments, to be posted many times.
    ///
    /// # Errors
    /// Those of [`Peer::read_pages_with`] before submission.
    pub fn prepare_read_pages(
        &self,
        dst: &Region,
        to: impl Into<Pages>,
        src: &RemoteRegion,
        from: impl Into<Pages>,
        page: usize,
        options: &ReadOptions,
    ) -> Result<PreparedTransfer> {
        let (_, work) = self.plan_read_pages(dst, to.into(), src, from.into(), page, options)?;
        let part = Part { transport: src.0.transport, work };
        Ok(PreparedTransfer::new(self, vec![part], &options.as_write()))
    }

    /// Checks a paged read. Returns the link, and the work to submit over it.
    pub(crate) fn plan_read_pages(
        &self,
        dst: &Region,
        to: Pages,
        src: &RemoteRegion,
        from: Pages,
        page: usize,
        options: &ReadOptions,
    ) -> Result<(&Link, Work)> {
        self.plan_pages(WorkKind::Read, (dst, to), (src, from), page, &options.as_write())
    }

    /// Checks a paged write or read.
    fn plan_pages(
        &self,
        kind: WorkKind,
        (local, local_pages): (&Region, Pages),
        (remote, remote_pages): (&RemoteRegion, Pages),
        page: usize,
        options: &WriteOptions,
    ) -> Result<(&Link, Work)> {
        let page = page as u64;
        let (name, operations, access) = match kind {
            WorkKind::Read => ("read_pages", Operations::READ, Access::REMOTE_READ),
            WorkKind::Write | WorkKind::Send => ("write_pages", Operations::WRITE, Access::REMOTE_WRITE),
        };
        let count = u32::try_from(local_pages.len()).unwrap_or(u32::MAX);
        if page == 0 || local_pages.is_empty() || local_pages.len() != remote_pages.len() || count == u32::MAX
        {
            let why = format!(
                "there are {} local pages and {} remote pages of {page} bytes; both lists need the same length, and neither they nor the pages may be empty",
                local_pages.len(),
                remote_pages.len()
            );
            return Err(Error::new(ErrorKind::InvalidRequest, name, why));
        }
        local.0.check_usable(name)?;
        local_pages.check(page, local.0.len(), "local", name)?;
        remote_pages.check(page, remote.0.len, "remote", name)?;
        remote.0.check(0, page, access, name)?;
        let link = self.link_to(local, &remote.0, options.path_policy, name)?;
        let caps = link.capabilities_for(operations, options.imm, name)?;
        if page > caps.max_write {
            let why =
                format!("a page has {page} bytes; this transport moves at most {} at once", caps.max_write);
            return Err(Error::new(ErrorKind::TooLarge, name, why));
        }
        let imm_per_page = options.imm.is_some() && options.imm_mode == ImmMode::PerWr;
        let shares_requests = !imm_per_page && local_pages.share_requests(&remote_pages, page);
        let (local_layout, remote_layout) = (local_pages.layout(page), remote_pages.layout(page));
        let shape = if shares_requests {
            let mut list = ListPlan::with_capacity(count as usize, true);
            let offsets = local_layout.offsets(0..count).zip(remote_layout.offsets(0..count));
            // A page is one request at least, however large.
            let rule = PieceRule::Merge { chunk: caps.chunk.clamp(page, caps.max_write) };
            let entries = offsets.map(|(local, remote)| (local, remote, page));
            list.push_segment(Arc::clone(&local.0), Arc::clone(&remote.0), rule, entries);
            Shape::List(Arc::new(list))
        } else {
            Shape::Pages { local: local_layout, remote: remote_layout, page, count }
        };
        let mut work = Work { kind, ..options.work(shape, local, remote) };
        self.choose_way(&mut work, remote, options)?;
        Ok((link, work))
    }

    /// Reads into a range of `dst` from `offset` bytes into `src`.
    pub fn read(&self, dst: &Region, range: Range<usize>, src: &RemoteRegion, offset: usize) -> Result<Op> {
        self.read_with(dst, range, src, offset, &ReadOptions::default())
    }

    /// As [`Peer::read`], with options.
    pub fn read_with(
        &self,
        dst: &Region,
        range: Range<usize>,
        src: &RemoteRegion,
        offset: usize,
        options: &ReadOptions,
    ) -> Result<Op> {
        let (link, span) = self.check_read(dst, range, src, offset, options)?;
        if options.extras.is_some() {
            let options = options.as_write();
            let parts = || {
                let work = self.work(WorkKind::Read, cut_read(link, span)?, dst, src, &options)?;
                Ok(vec![Part { transport: src.0.transport, work }])
            };
            let direct = || {
                let locality = options.locality;
                let direct = link.try_direct(&dst.0, &src.0, span, WorkKind::Read, None, locality);
                direct.or_else(|| link.try_direct_device_memory(&dst.0, &src.0, span, WorkKind::Read, None))
            };
            return self.submit_with_extras(parts, Some(&direct), &options, "read");
        }
        if options.may_run_at_once() {
            if let Some(op) = link.try_direct(&dst.0, &src.0, span, WorkKind::Read, None, options.locality) {
                return Ok(op);
            }
            if let Some(op) = link.try_direct_device_memory(&dst.0, &src.0, span, WorkKind::Read, None) {
                return Ok(op);
            }
        }
        let options_of_write = options.as_write();
        let mut work =
            Work { kind: WorkKind::Read, ..options_of_write.work(cut_read(link, span)?, dst, src) };
        self.choose_way(&mut work, src, &options_of_write)?;
        self.submit_when(link, work, options.trigger.as_ref(), options.deadline, "read")
    }

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
    /// `TooLarge` (with an imm per request, an entry that no single request can carry; more than 2^26 entries or
    /// requests), `Busy`.
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
        if options.extras.is_some() {
            return self.submit_with_extras(|| Ok(parts), None, options, "write_list");
        }
        self.submit_parts(parts, options.trigger.as_ref(), options.deadline, "write_list", None)
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
        if options.extras.is_some() {
            return self.submit_with_extras(|| Ok(parts), None, &options, "read_list");
        }
        self.submit_parts(parts, options.trigger.as_ref(), options.deadline, "read_list", None)
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

    /// Sends a range of `src` as one message into a receive that the peer has posted. If the peer has posted none, the
    /// operation waits for one, until its deadline.
    pub fn send(&self, src: &Region, range: Range<usize>) -> Result<Op> {
        self.send_with(src, range, &SendOptions::default())
    }

    /// As [`Peer::send`], with options.
    pub fn send_with(&self, src: &Region, range: Range<usize>, options: &SendOptions) -> Result<Op> {
        if let Some(trace) = options.trace {
            return self.send_traced(src, range, options, trace);
        }
        let (link, span) = self.check_send(src, range, options)?;
        let start = src.0.start().wrapping_add(span.local as usize);
        if src.0.device_memory_mask == 0
            && let Some(op) = link.try_direct_message(WorkKind::Send, start, span.len, options.imm)
        {
            return Ok(op);
        }
        self.submit(link, message(src, span, options.imm), options.deadline, "send")
    }

    #[cold]
    #[inline(never)]
    fn send_traced(
        &self,
        src: &Region,
        range: Range<usize>,
        options: &SendOptions,
        trace: TraceContext,
    ) -> Result<Op> {
        let _transfer = TracedTransfer::begin(Some(trace), "send", Some(self.0.id.number()));
        self.send_with(src, range, &SendOptions { trace: None, ..options.clone() })
    }

    /// Delivers bytes to the peer, who takes them from [`Fabric::notifications`](crate::Fabric::notifications): up to
    /// 1 MiB, after all notifications to this peer that were sent before. Both fabrics have to be opened with
    /// [`FabricBuilder::notifications`](crate::FabricBuilder::notifications). To be told of the end of a transfer, use
    /// [`WriteOptions::notify`].
    ///
    /// The operation resolves when the bytes are in the peer's memory. If the peer takes no notifications, it waits, for
    /// the fabric's default deadline at most.
    ///
    /// # Errors
    /// Before submission: `Unsupported` (one of the fabrics was opened without notifications), `TooLarge`, `PeerDied`,
    /// `Unreachable` (a path that the [`PathPolicy`] does not allow), `Busy` (so many notifications are under way that
    /// this side's memory for them is used up: await some).
    pub fn notify(&self, bytes: &[u8]) -> Result<Op> {
        self.notify_with(bytes, &SendOptions::default())
    }

    /// As [`Peer::notify`], with options.
    ///
    /// # Errors
    /// Those of [`Peer::notify`], and `InvalidRequest` for an imm, which a notification does not carry.
    pub fn notify_with(&self, bytes: &[u8], options: &SendOptions) -> Result<Op> {
        if options.imm.is_some() {
            let why = "a notification carries no imm; put its bits into the bytes, or call write_imm too";
            return Err(Error::new(ErrorKind::InvalidRequest, "notify", why));
        }
        let transfer = TracedTransfer::begin(options.trace, "notify", Some(self.0.id.number()));
        let content = NotificationBytes::new(bytes, transfer.context());
        if Outgoing::try_short(self, &content, options.path_policy)? {
            return Ok(Op::without_receipt(bytes.len() as u64));
        }
        Ok(Outgoing::prepare(self, &content, options.path_policy, "notify")?.send(options.deadline))
    }

    /// Touches every rail to this peer, so that the first operation later costs no more than the ones after it. A
    /// warm-up moves no byte of a region and delivers no imm.
    ///
    /// Each rail of each transport gets one write of no bytes; [`WorkRequest::len`](crate::spi::WorkRequest::len) says
    /// what a backend does with it. The calling thread makes every region ready that is imported from the peer. By
    /// backend:
    ///
    /// - `loopback`: the worker touches the shared memory of message rings and staging buffers, in both directions.
    ///   The kernel maps what is imported from another process, page by page, before this returns: some milliseconds
    ///   per GiB. Within one process there is nothing to map.
    /// - `null` devices: a request like any other.
    ///
    /// Import first, then warm up. Both sides may do it. The operation resolves when every rail has answered, by the
    /// fabric's default deadline at the latest.
    ///
    /// # Errors
    /// `PeerDied`, `Closed`, `Busy`; later those of any write.
    pub fn warm_up(&self) -> Result<Op> {
        self.0.check_alive()?;
        self.first_link("warm_up")?;
        for remote in self.0.context.imported() {
            remote.imports.iter().flatten().for_each(|import| import.warm_up());
        }
        let can_write = |link: &&Link| {
            link.capabilities().is_some_and(|caps| caps.operations.contains(Operations::WRITE))
        };
        // The devices of a rail group may have been lost before the two sides connected.
        let reaches = |link: &&Link| link.is_up() && link.rails.iter().any(Option::is_some);
        let ops = self.0.links.iter().filter(reaches).filter(can_write).map(|link| {
            let shape = Shape::WarmUp { rails: link.rails.iter().flatten().count() as u32 };
            self.submit(link, Work::of(WorkKind::Write, shape), None, "warm_up")
        });
        Ok(Op::all(ops.collect::<Result<_>>()?))
    }

    /// The largest message that [`Peer::send`] takes, in bytes; 0 if the transport has no messages.
    pub fn max_message(&self) -> u64 {
        let link = self.0.links.iter().find(|link| link.is_up());
        link.and_then(Link::capabilities).map_or(0, |caps| caps.max_message)
    }

    // ---- checks: each returns the link that the request takes ----

    /// Checks a write of a range against both regions and the peer. Inlined into every write, because a call that
    /// passes its arguments and results through memory costs as much as the checks.
    #[inline(always)]
    pub(crate) fn check_write(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &RemoteRegion,
        offset: usize,
        options: &WriteOptions,
        operation: &'static str,
    ) -> Result<(&Link, CheckedRange)> {
        let (local, len) = src.0.check(range, operation)?;
        if len == 0 && options.imm.is_none() {
            return Err(empty(operation));
        }
        dst.0.check(offset as u64, len, Access::REMOTE_WRITE, operation)?;
        let link = self.link_to(src, &dst.0, options.path_policy, operation)?;
        Ok((link, CheckedRange { local, remote: offset as u64, len }))
    }

    /// Checks a read into a range against both regions and the peer.
    #[inline]
    pub(crate) fn check_read(
        &self,
        dst: &Region,
        range: Range<usize>,
        src: &RemoteRegion,
        offset: usize,
        options: &ReadOptions,
    ) -> Result<(&Link, CheckedRange)> {
        let (local, len) = dst.0.check(range, "read")?;
        if len == 0 {
            return Err(empty("read"));
        }
        src.0.check(offset as u64, len, Access::REMOTE_READ, "read")?;
        let link = self.link_to(dst, &src.0, options.path_policy, "read")?;
        Ok((link, CheckedRange { local, remote: offset as u64, len }))
    }

    /// Checks a message. Returns the link and the range in `src`.
    pub(crate) fn check_send(
        &self,
        src: &Region,
        range: Range<usize>,
        options: &SendOptions,
    ) -> Result<(&Link, CheckedRange)> {
        let (local, len) = src.0.check(range, "send")?;
        self.0.check_alive()?;
        let (link, policy) = (self.first_link("send")?, self.path_policy().and(options.path_policy));
        self.same_fabric(src, "send")?;
        let caps = link.capabilities_for(Operations::SEND, options.imm, "send")?;
        if policy != PathPolicy::ANY {
            policy.check(caps.path | src.0.staging_on(link.engine.transport), &link.label, "send")?;
        }
        if len > caps.max_message {
            let why =
                format!("the message has {len} bytes, at most {}: use write for more", caps.max_message);
            return Err(Error::new(ErrorKind::TooLarge, "send", why));
        }
        Ok((link, CheckedRange { local, remote: 0, len }))
    }

    /// Makes the checks that all accesses share. Returns the link that `remote` was imported for.
    #[inline]
    pub(crate) fn link_to(
        &self,
        region: &Region,
        remote: &RemoteInner,
        paths: PathPolicy,
        operation: &'static str,
    ) -> Result<&Link> {
        if remote.peer != self.0.id {
            return Err(foreign(operation, "the remote region was imported for another peer"));
        }
        if paths != PathPolicy::ANY || region.0.fabric_id != self.0.context.unrestricted_fabric_id() {
            self.check_fabric_and_paths(region, remote, paths, operation)?;
        }
        self.0.check_alive()?;
        Ok(&self.0.links[remote.first_group])
    }

    #[cold]
    #[inline(never)]
    fn check_fabric_and_paths(
        &self,
        region: &Region,
        remote: &RemoteInner,
        paths: PathPolicy,
        operation: &'static str,
    ) -> Result<()> {
        self.same_fabric(region, operation)?;
        self.check_paths(&region.0, remote, self.path_policy().and(paths), operation)
    }

    /// Refuses bytes between two regions that would take a path which `policy` does not allow.
    pub(crate) fn check_paths(
        &self,
        local: &RegionInner,
        remote: &RemoteInner,
        policy: PathPolicy,
        operation: &'static str,
    ) -> Result<()> {
        policy.check(local.path_to(remote), &self.0.links[remote.first_group].label, operation)
    }

    /// The work of a checked write or read, and whether its pages are coalesced.
    ///
    /// # Errors
    /// As [`Peer::choose_way`].
    pub(crate) fn work(
        &self,
        kind: WorkKind,
        shape: Shape,
        local: &Region,
        remote: &RemoteRegion,
        options: &WriteOptions,
    ) -> Result<Work> {
        let mut work = Work { kind, ..options.work(shape, local, remote) };
        self.choose_way(&mut work, remote, options)?;
        Ok(work)
    }

    /// Decides whether the pages of `work` are coalesced. In place, because a copy of the work costs as much as posting it.
    ///
    /// # Errors
    /// `Unsupported` if the options ask for coalescing and one of the two sides does not coalesce; `Unreachable` if the
    /// path policy does not allow it.
    #[inline(always)]
    fn choose_way(&self, work: &mut Work, remote: &RemoteRegion, options: &WriteOptions) -> Result<()> {
        if options.coalesce.is_some() || remote.0.max_coalesced > 0 {
            work.coalesce = coalesces(self, work, &remote.0, options)?;
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn same_fabric(&self, region: &Region, operation: &'static str) -> Result<()> {
        if region.0.fabric_id != self.0.context.fabric_id {
            return Err(foreign(operation, "the local region belongs to another fabric"));
        }
        Ok(())
    }

    /// The link that messages and imms without bytes take: the first that is up. A receiver of single messages posts its
    /// receives there too.
    pub(crate) fn first_link(&self, operation: &'static str) -> Result<&Link> {
        // A link for notifications is up only if the transport is up that it belongs to, which comes before it.
        let first = self.0.links.iter().find(|link| link.is_up());
        first.ok_or_else(|| Error::new(ErrorKind::Unreachable, operation, "no transport is up"))
    }

    /// Checks an imm without bytes. Returns the link.
    pub(crate) fn check_imm(&self, imm: u32, operation: &'static str) -> Result<&Link> {
        self.0.check_alive()?;
        let link = self.first_link(operation)?;
        let caps = link.capabilities_for(Operations::WRITE_IMM, Some(imm), operation)?;
        self.path_policy().check(caps.path, &link.label, operation)?;
        Ok(link)
    }

    // ---- submitting: first the slots in the op tables, then the work ----

    /// Submits an operation to the engine of `link`, or to the engines of the rail groups of the same transport that
    /// are to carry it.
    pub(crate) fn submit(
        &self,
        link: &Link,
        work: Work,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        self.submit_when(link, work, None, deadline, operation)
    }

    /// As [`Peer::submit`]. The operation begins once `trigger` is due.
    #[inline(never)]
    pub(crate) fn submit_when(
        &self,
        link: &Link,
        work: Work,
        trigger: Option<&Trigger>,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        self.submit_inlined(link, work, trigger, deadline, operation)
    }

    /// As [`Peer::submit_when`]. Inlined into writes, because each call that takes the work by value moves it.
    #[inline(always)]
    fn submit_inlined(
        &self,
        link: &Link,
        work: Work,
        trigger: Option<&Trigger>,
        deadline: Option<Duration>,
        operation: &'static str,
    ) -> Result<Op> {
        let times = self.times(trigger, deadline);
        let slots = OpSlots::take(&self.0, link, &work, operation)?;
        Ok(self.submit_with(slots, work, times, operation))
    }

    /// Submits the parts of an operation as one, in the span of the trace that `options` name. If they have a
    /// notification, it begins once all parts have succeeded. `direct`, if there is one, may run all of it at once, if
    /// there is no trigger.
    #[cold]
    #[inline(never)]
    pub(crate) fn submit_with_extras(
        &self,
        parts: impl FnOnce() -> Result<Vec<Part>>,
        direct: Option<&dyn Fn() -> Option<Op>>,
        options: &WriteOptions,
        operation: &'static str,
    ) -> Result<Op> {
        let transfer = TracedTransfer::begin(options.parent_trace(), operation, Some(self.0.id.number()));
        let direct = direct.filter(|_| options.may_run_at_once());
        let Some(bytes) = options.notification() else {
            if let Some(done) = direct.and_then(|direct| direct()) {
                return Ok(done);
            }
            return self.submit_parts(parts()?, options.trigger.as_ref(), options.deadline, operation, None);
        };
        let content = NotificationBytes::new(bytes, transfer.context());
        let limits = (options.path_policy, options.deadline);
        if let Some(direct) = direct
            && let Some(done) = Outgoing::try_at_once(self, &content, limits, operation, direct)?
        {
            return Ok(done);
        }
        let (parts, outgoing) =
            (parts()?, Outgoing::prepare(self, &content, options.path_policy, operation)?);
        if let Some(op) = direct.and_then(|direct| direct()) {
            return Ok(if op.has_succeeded_at_once() {
                outgoing.send_after(op, options.deadline)
            } else {
                op
            });
        }
        let (sends, on_end) = outgoing.hold(options.deadline);
        let op =
            self.submit_parts(parts, options.trigger.as_ref(), options.deadline, operation, Some(on_end))?;
        Ok(Op::and_then_quietly(op, sends))
    }

    /// Submits the parts of an operation as one. All parts have the same imm; one that comes last comes after all parts.
    /// Calls `on_end` when all of them are over.
    pub(crate) fn submit_parts(
        &self,
        parts: impl IntoIterator<Item = Part>,
        trigger: Option<&Trigger>,
        deadline: Option<Duration>,
        operation: &'static str,
        on_end: Option<OnEnd>,
    ) -> Result<Op> {
        let times = self.times(trigger, deadline);
        let mut shares = Vec::new();
        for Part { transport, work } in parts {
            match OpSlots::take(&self.0, self.0.first_link_of(transport), &work, operation)? {
                OpSlots::One(slot) => shares.push((slot, work)),
                OpSlots::Many(slots, _) => {
                    shares.extend(
                        slots.into_iter().map(|(slot, pieces)| (slot, Work { pieces, ..work.clone() })),
                    );
                }
            }
        }
        let imm_comes_last = |(_, work): &(_, Work)| work.imm.is_some() && work.imm_mode == ImmMode::Last;
        let is_shared = on_end.is_some() || shares.len() > 1 && shares.first().is_some_and(imm_comes_last);
        let shared = is_shared.then(|| Arc::new(SharedState::new(shares.len() as u32, on_end)));
        let ops = shares.into_iter().map(|(slot, work)| {
            let work = Work { shared: shared.clone(), ..work };
            self.submit_share(slot, work, times.clone(), operation)
        });
        Ok(Op::all(ops.collect()))
    }

    /// The times of an operation that is submitted now.
    #[inline]
    pub(crate) fn times(&self, trigger: Option<&Trigger>, deadline: Option<Duration>) -> Times {
        let submitted_at = self.0.context.clock.now();
        let deadline = submitted_at.after(deadline.unwrap_or(self.0.context.default_deadline));
        Times { submitted_at, trigger: trigger.cloned(), deadline }
    }

    /// Submits an operation to the engines that it has slots of. Inlined, because each call that takes the work by
    /// value moves it.
    #[inline(always)]
    pub(crate) fn submit_with(
        &self,
        slots: OpSlots<'_>,
        work: Work,
        times: Times,
        operation: &'static str,
    ) -> Op {
        match slots {
            OpSlots::One(slot) => self.submit_to(slot, work, times, operation),
            OpSlots::Many(parts, countdown) => {
                let parts = parts.into_iter().map(|(slot, pieces)| {
                    let work = Work { pieces, shared: countdown.clone(), ..work.clone() };
                    self.submit_share(slot, work, times.clone(), operation)
                });
                Op::all(parts.collect())
            }
        }
    }

    /// Submits one of several shares of an operation.
    #[inline(never)]
    pub(crate) fn submit_share(
        &self,
        slot: OpSlot<'_>,
        work: Work,
        times: Times,
        operation: &'static str,
    ) -> Op {
        self.submit_to(slot, work, times, operation)
    }

    #[inline(always)]
    fn submit_to(&self, slot: OpSlot<'_>, work: Work, times: Times, operation: &'static str) -> Op {
        let link = slot.link;
        let id = slot.keep();
        let Times { submitted_at, trigger, deadline } = times;
        let is_only = trigger.is_none() && link.backlog.add(work.backlog_weight());
        let span = self.span(id, &link.engine.label, operation, &work);
        let submission = Submission { id, peer: self.0.clone(), submitted_at, trigger, deadline, work, span };
        link.engine.submit(submission, is_only);
        Op::pending(Arc::clone(&link.engine), id)
    }

    /// The tracing span of the operation's events, a child of its transfer's or of the caller's span.
    #[inline]
    fn span(
        &self,
        id: OpId,
        transport: &str,
        operation: &'static str,
        work: &Work,
    ) -> Option<Box<tracing::Span>> {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return None;
        }
        let (peer, bytes) = (self.0.id.number(), work.bytes());
        let span =
            tracing::debug_span!(parent: parent(), "operation", op = %id, transport, operation, peer, bytes);
        tracing::trace!(parent: &span, "submitted");
        Some(Box::new(span))
    }
}

/// Cuts a checked write into pieces, if the transport can do it. Inlined into writes: a call costs 20 instructions.
#[inline(always)]
pub(crate) fn cut_write(
    link: &Link,
    span: CheckedRange,
    options: &WriteOptions,
    operation: &'static str,
) -> Result<Shape> {
    let caps = link.capabilities_for(Operations::WRITE, options.imm, operation)?;
    let chunk = match (options.imm, options.imm_mode) {
        (Some(_), ImmMode::PerWr) => per_wr_chunk(caps, operation)?,
        _ => Shape::chunk_for(span.len, caps.chunk, caps.max_write),
    };
    Ok(Shape::Range { local: span.local, remote: span.remote, len: span.len, chunk })
}

/// Cuts a checked read into pieces, if the transport can do it.
pub(crate) fn cut_read(link: &Link, span: CheckedRange) -> Result<Shape> {
    let caps = link.capabilities_for(Operations::READ, None, "read")?;
    let chunk = Shape::chunk_for(span.len, caps.chunk, caps.max_write);
    Ok(Shape::Range { local: span.local, remote: span.remote, len: span.len, chunk })
}

/// The work of an imm without bytes.
pub(crate) fn imm_alone(imm: u32) -> Work {
    let shape = Shape::Range { local: 0, remote: 0, len: 0, chunk: 1 };
    Work { imm: Some(imm), ..Work::of(WorkKind::Write, shape) }
}

/// The work of a message.
pub(crate) fn message(src: &Region, span: CheckedRange, imm: Option<u32>) -> Work {
    let shape = Shape::Range { local: span.local, remote: 0, len: span.len, chunk: span.len.max(1) };
    Work { local: Some(Arc::clone(&src.0)), imm, ..Work::of(WorkKind::Send, shape) }
}

/// The piece size of a `PerWr` write. It is the same everywhere, so that both sides can count the imms.
fn per_wr_chunk(caps: &Capabilities, operation: &'static str) -> Result<u64> {
    if caps.max_write < PER_WR_UNIT {
        let why = format!(
            "this transport writes {} bytes at once, but PerWr needs {PER_WR_UNIT}; write pages instead",
            caps.max_write
        );
        return Err(Error::new(ErrorKind::Unsupported, operation, why));
    }
    Ok(PER_WR_UNIT)
}

#[cold]
fn empty(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidRequest, operation, "the range is empty; for an imm alone use write_imm")
}

#[cold]
fn foreign(operation: &'static str, why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidRequest, operation, why)
}
