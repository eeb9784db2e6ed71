//! Checks of requests. Each check returns the link that the request takes; then the request runs at once or is
//! submitted.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::Work;
use crate::engine::memory::RemoteInner;
use crate::engine::peer::{CheckedRange, Link};
use crate::engine::plan::Shape;
use crate::options::{PER_WR_UNIT, ReadOptions, SendOptions, WriteOptions};
use crate::spi::{Capabilities, Operations, WorkKind};
use crate::{Access, Error, ErrorKind, ImmMode, Peer, Region, RemoteRegion, Result};

impl Peer {
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
        let link = self.link_to(src, &dst.0, operation)?;
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
    ) -> Result<(&Link, CheckedRange)> {
        let (local, len) = dst.0.check(range, "read")?;
        if len == 0 {
            return Err(empty("read"));
        }
        src.0.check(offset as u64, len, Access::REMOTE_READ, "read")?;
        let link = self.link_to(dst, &src.0, "read")?;
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
        let link = self.first_link("send")?;
        self.same_fabric(src, "send")?;
        let caps = link.capabilities_for(Operations::SEND, options.imm, "send")?;
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
        operation: &'static str,
    ) -> Result<&Link> {
        if remote.peer != self.0.id {
            return Err(foreign(operation, "the remote region was imported for another peer"));
        }
        self.same_fabric(region, operation)?;
        self.0.check_alive()?;
        Ok(&self.0.links[remote.first_group])
    }

    #[inline]
    pub(crate) fn same_fabric(&self, region: &Region, operation: &'static str) -> Result<()> {
        if region.0.fabric_id != self.0.context.fabric_id {
            return Err(foreign(operation, "the local region belongs to another fabric"));
        }
        Ok(())
    }

    /// The link that messages and imms without bytes take.
    pub(crate) fn first_link(&self, operation: &'static str) -> Result<&Link> {
        self.0
            .links
            .iter()
            .find(|link| link.is_up())
            .ok_or_else(|| Error::new(ErrorKind::Unreachable, operation, "no transport is up"))
    }

    /// Checks an imm without bytes. Returns the link.
    pub(crate) fn check_imm(&self, imm: u32, operation: &'static str) -> Result<&Link> {
        self.0.check_alive()?;
        let link = self.first_link(operation)?;
        link.capabilities_for(Operations::WRITE_IMM, Some(imm), operation)?;
        Ok(link)
    }
}

/// Cuts a checked write into pieces, if the transport can do it.
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

impl ReadOptions {
    /// The same options for the code that reads and writes share.
    pub(crate) fn as_write(&self) -> WriteOptions {
        WriteOptions { deadline: self.deadline, locality: self.locality, ..WriteOptions::DEFAULT }
    }
}

#[cold]
fn empty(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidRequest, operation, "the range is empty; for an imm alone use write_imm")
}

#[cold]
fn foreign(operation: &'static str, why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidRequest, operation, why)
}
