//! The operations of a peer: checked once here, then run at once or submitted.

use std::ops::Range;

use crate::engine::Work;
use crate::engine::peer::{CheckedRange, Link};
use crate::options::{ReadOptions, SendOptions, WriteOptions};
use crate::pages::Pages;
use crate::plan::Shape;
use crate::request::{cut_read, cut_write, imm_alone, message};
use crate::spi::{Operations, WorkKind};
use crate::{Access, Error, ErrorKind, Op, Peer, Region, RemoteRegion, Result};

impl Peer {
    /// Writes a range of `src` to `offset` bytes into `dst`.
    ///
    /// The operation resolves when the bytes are visible at the target.
    /// Errors before submission: `OutOfBounds`, `RemoteAccess`, `Revoked`,
    /// `PeerDied`, `InvalidRequest` (an empty range), `Busy`.
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

    /// Apart for either, so that a plain write asks nothing about its options.
    #[inline(always)]
    fn write_as(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &RemoteRegion,
        offset: usize,
        options: &WriteOptions,
    ) -> Result<Op> {
        let (link, span) = self.0.check_write(src, range, dst, offset, options, "write")?;
        if let Some(op) = link.try_direct(src, &dst.0, span, WorkKind::Write, options) {
            return Ok(op);
        }
        self.write_later(link, src, dst, span, options)
    }

    /// A write that the processor does not carry out here and now.
    #[inline(never)]
    fn write_later(
        &self,
        link: &Link,
        src: &Region,
        dst: &RemoteRegion,
        span: CheckedRange,
        options: &WriteOptions,
    ) -> Result<Op> {
        if options.trigger.is_none()
            && let Some(op) = link.try_direct_device_memory(src, &dst.0, span, WorkKind::Write, options.imm)
        {
            return Ok(op);
        }
        let shape = cut_write(link, span, options, "write")?;
        let work = options.work(shape, src, dst);
        self.0.submit_when(link, work, options.trigger.as_ref(), options.deadline, "write")
    }

    /// Delivers immediate data alone, without bytes.
    pub fn write_imm(&self, imm: u32) -> Result<Op> {
        let link = self.0.check_imm(imm, "write_imm")?;
        if let Some(op) = link.try_direct_message(WorkKind::Write, std::ptr::null_mut(), 0, Some(imm)) {
            return Ok(op);
        }
        self.0.submit(link, imm_alone(imm), None, "write_imm")
    }

    /// Writes pages of `page` bytes: the i-th of `from` in `src` to the i-th of `to` in `dst`.
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
        self.0.submit_when(link, work, options.trigger.as_ref(), options.deadline, "write_pages")
    }

    /// Checks a paged write and says what is to be submitted, and over which link.
    pub(crate) fn plan_write_pages(
        &self,
        src: &Region,
        from: Pages,
        dst: &RemoteRegion,
        to: Pages,
        page: usize,
        options: &WriteOptions,
    ) -> Result<(&Link, Work)> {
        let page = page as u64;
        let count = u32::try_from(from.len()).unwrap_or(u32::MAX);
        if page == 0 || from.is_empty() || from.len() != to.len() || count == u32::MAX {
            let why = format!(
                "{} source and {} destination pages of {page} bytes; both lists need the same length, and neither may be empty",
                from.len(),
                to.len()
            );
            return Err(Error::new(ErrorKind::InvalidRequest, "write_pages", why));
        }
        src.0.check_usable("write_pages")?;
        from.check(page, src.0.len, "source")?;
        to.check(page, dst.0.len, "destination")?;
        dst.0.check(0, page, Access::REMOTE_WRITE, "write_pages")?;
        let link = self.0.link_to(src, &dst.0, "write_pages")?;
        let caps = link.require(Operations::WRITE, options.imm, "write_pages")?;
        if page > caps.max_write {
            let why =
                format!("a page of {page} bytes; this transport writes at most {} at once", caps.max_write);
            return Err(Error::new(ErrorKind::TooLarge, "write_pages", why));
        }
        let shape = Shape::Pages { local: from.layout(page), remote: to.layout(page), page, count };
        Ok((link, options.work(shape, src, dst)))
    }

    /// Reads from `offset` bytes into `src` to a range of `dst`.
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
        let (link, span) = self.0.check_read(dst, range, src, offset)?;
        let options = options.as_write();
        if let Some(op) = link.try_direct(dst, &src.0, span, WorkKind::Read, &options) {
            return Ok(op);
        }
        if let Some(op) = link.try_direct_device_memory(dst, &src.0, span, WorkKind::Read, None) {
            return Ok(op);
        }
        let work = Work { kind: WorkKind::Read, ..options.work(cut_read(link, span)?, dst, src) };
        self.0.submit(link, work, options.deadline, "read")
    }

    /// Sends a range of `src` as one message into a receive the peer has posted.
    /// Without one it waits there, until the deadline.
    pub fn send(&self, src: &Region, range: Range<usize>) -> Result<Op> {
        self.send_with(src, range, &SendOptions::default())
    }

    /// As [`Peer::send`], with options.
    pub fn send_with(&self, src: &Region, range: Range<usize>, options: &SendOptions) -> Result<Op> {
        let (link, span) = self.0.check_send(src, range, options)?;
        let start = src.0.start.wrapping_add(span.local as usize);
        if src.0.device_memory_mask == 0
            && let Some(op) = link.try_direct_message(WorkKind::Send, start, span.len, options.imm)
        {
            return Ok(op);
        }
        self.0.submit(link, message(src, span, options.imm), options.deadline, "send")
    }

    /// The largest message `send` takes, in bytes; 0 if the transport has none.
    pub fn max_message(&self) -> u64 {
        let link = self.0.links.iter().find(|link| link.is_up());
        link.and_then(Link::capabilities).map_or(0, |caps| caps.max_message)
    }
}
