//! Transfers that are checked and planned once and posted many times.

use std::fmt;
use std::sync::Arc;

use crate::engine::Work;
use crate::engine::index::TransportIndex;
use crate::engine::peer::{CheckedRange, Link};
use crate::{Error, ErrorKind, Op, PathPolicy, Peer, Result, Signal, WriteOptions};

/// A transfer of pages or of a list that is ready to be posted many times, as in a loop over a KV cache.
///
/// Lists, bounds, access rights and capabilities were checked when it was prepared. A post checks only what may have
/// changed since: that the peer is alive, and that no region was revoked. A post allocates nothing, unless several rail
/// groups share the transfer or it has several parts. Several posts of one prepared transfer may be under way at once.
/// A transfer of one small request may run in the calling thread, as [`Peer::write`] does.
///
/// A prepared transfer keeps the regions alive, but not the peer's connection.
pub struct PreparedTransfer {
    peer: Peer,
    /// At least one.
    parts: Vec<Part>,
    options: WriteOptions,
    /// The bytes of a transfer that is one request: the calling thread may be able to carry it out at once.
    only: Option<CheckedRange>,
}

/// A part of a transfer: the regions that lie on the same rails of one transport.
#[derive(Clone)]
pub(crate) struct Part {
    pub transport: TransportIndex,
    pub work: Work,
}

impl PreparedTransfer {
    /// A transfer of at least one part.
    pub(crate) fn new(peer: &Peer, parts: Vec<Part>, options: &WriteOptions) -> Self {
        let only = only_range(&parts);
        Self { peer: peer.clone(), parts, options: options.clone(), only }
    }

    /// Submits the transfer.
    ///
    /// # Errors
    /// `PeerDied`, `Revoked` (any region), `Closed`, `Unreachable` (the [`PathPolicy`] has changed);
    /// `Busy` if `max_operations` are under way.
    pub fn post(&self) -> Result<Op> {
        self.submit(None, &self.options)
    }

    /// Submits the transfer, and then delivers `bytes` to the target, instead of the notification that it was prepared
    /// with: see [`WriteOptions::notify`].
    ///
    /// # Errors
    /// Those of [`PreparedTransfer::post`] and of [`Peer::notify`].
    pub fn post_and_notify(&self, bytes: impl Into<Vec<u8>>) -> Result<Op> {
        self.submit(None, &self.options.clone().notify(bytes))
    }

    /// Submits the write with another imm than it was prepared with.
    ///
    /// # Errors
    /// Those of [`PreparedTransfer::post`], and `InvalidRequest` if the transfer was prepared without an imm: then
    /// nothing has checked whether the transport carries imms.
    pub fn post_with_imm(&self, imm: u32) -> Result<Op> {
        if self.parts[0].work.imm.is_none() {
            let why = "the transfer was prepared without an imm; prepare a write with any imm, and post it with \
                       this one";
            return Err(Error::new(ErrorKind::InvalidRequest, self.name(), why));
        }
        self.submit(Some(imm), &self.options)
    }

    /// Submits the transfer to begin once `signal` has reached `value`: see [`WriteOptions::when`]. A loop of steps
    /// posts it in advance, with a value that is one higher each time.
    ///
    /// # Errors
    /// Those of [`PreparedTransfer::post`].
    pub fn post_when(&self, signal: Arc<dyn Signal>, value: u32) -> Result<Op> {
        self.submit(None, &self.options.clone().when(signal, value))
    }

    /// Submits the transfer, with another imm if there is one. Of the options only trigger, deadline, notification and
    /// trace matter: the rest is planned.
    fn submit(&self, imm: Option<u32>, options: &WriteOptions) -> Result<Op> {
        self.check()?;
        let (peer, name) = (&self.peer, self.name());
        let with_imm = |part: &Part| {
            let mut part = part.clone();
            part.work.imm = imm.or(part.work.imm);
            part
        };
        if options.extras.is_some() {
            let parts = self.parts.iter().map(with_imm).collect();
            let direct = || self.try_direct(imm);
            return peer.submit_with_extras(|| Ok(parts), Some(&direct), options, name);
        }
        let (trigger, deadline) = (options.trigger.as_ref(), options.deadline);
        if trigger.is_none()
            && let Some(done) = self.try_direct(imm)
        {
            return Ok(done);
        }
        if let [part] = &self.parts[..] {
            let Part { transport, work } = with_imm(part);
            return peer.submit_when(peer.0.first_link_of(transport), work, trigger, deadline, name);
        }
        peer.submit_parts(self.parts.iter().map(with_imm), trigger, deadline, name, None)
    }

    /// Carries the transfer out in the calling thread, if it is one request for which there is a direct path now.
    #[inline]
    fn try_direct(&self, imm: Option<u32>) -> Option<Op> {
        let range = self.only?;
        let (link, work) = (self.only_link(), &self.parts[0].work);
        let (local, remote) = (work.locals().next()?, work.remotes().next()?);
        let (kind, imm) = (work.kind, imm.or(work.imm));
        link.try_direct(local, remote, range, kind, imm, work.locality)
            .or_else(|| link.try_direct_device_memory(local, remote, range, kind, imm))
    }

    /// The bytes of a transfer that is one request.
    pub(crate) fn only(&self) -> Option<CheckedRange> {
        self.only
    }

    /// The link of a transfer that has one part.
    fn only_link(&self) -> &Link {
        self.peer.0.first_link_of(self.parts[0].transport)
    }

    /// Bytes of one post.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.work.shape.bytes()).sum()
    }

    /// The name of the operation in errors.
    fn name(&self) -> &'static str {
        self.parts[0].work.operation_kind().name()
    }

    /// Makes the checks of a post.
    pub(crate) fn check(&self) -> Result<()> {
        self.peer.0.check_alive()?;
        let (name, policy) = (self.name(), self.peer.path_policy());
        for Part { work, .. } in &self.parts {
            work.check_regions(name)?;
            if policy != PathPolicy::ANY {
                let mut pairs = work.locals().zip(work.remotes());
                pairs.try_for_each(|(local, remote)| self.peer.check_paths(local, remote, policy, name))?;
            }
        }
        Ok(())
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }
}

/// The bytes of a transfer that is one request.
fn only_range(parts: &[Part]) -> Option<CheckedRange> {
    let [Part { work, .. }] = parts else { return None };
    if work.shape.piece_count() != 1 {
        return None;
    }
    let mut only = Vec::with_capacity(1);
    work.shape.expand(0..1, &mut only, |local, remote, len| CheckedRange { local, remote, len });
    only.pop()
}

impl fmt::Debug for PreparedTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests: u64 = self.parts.iter().map(|part| u64::from(part.work.shape.piece_count())).sum();
        f.debug_struct("PreparedTransfer")
            .field("operation", &self.name())
            .field("requests", &requests)
            .field("bytes", &self.bytes())
            .finish()
    }
}
