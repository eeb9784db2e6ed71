//! Writes that are checked and planned once and posted many times.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Work;
use crate::engine::index::TransportIndex;
use crate::engine::peer::Link;
use crate::{Access, Op, Peer, Result, Signal, Trigger};

/// A paged write that is ready to be posted many times, as in a loop over a KV cache.
///
/// Lists, bounds, access rights and capabilities were checked when it was prepared. A post checks only what may have
/// changed since: that the peer is alive, and that no region was revoked. A post allocates nothing. Several posts of
/// one prepared write may be under way at once.
///
/// A prepared write keeps the regions alive, but not the peer's connection.
pub struct PreparedWrite {
    pub(crate) peer: Peer,
    pub(crate) transport: TransportIndex,
    pub(crate) work: Work,
    pub(crate) trigger: Option<Trigger>,
    pub(crate) deadline: Option<Duration>,
}

impl PreparedWrite {
    /// Submits the write.
    ///
    /// # Errors
    /// `PeerDied`, `Revoked` (either region), `Closed`; `Busy` if `max_operations` are under way.
    pub fn post(&self) -> Result<Op> {
        let (peer, link, work) = self.checked()?;
        peer.submit_when(link, work.clone(), self.trigger.as_ref(), self.deadline, "write_pages")
    }

    /// Submits the write with another imm than it was prepared with.
    ///
    /// # Errors
    /// Those of [`PreparedWrite::post`], and `InvalidRequest` if the write was prepared without an imm: then nothing
    /// has checked whether the transport carries imms.
    pub fn post_with_imm(&self, imm: u32) -> Result<Op> {
        if self.work.imm.is_none() {
            let why =
                "the write was prepared without an imm; prepare it with any imm, and post it with this one";
            return Err(crate::Error::new(crate::ErrorKind::InvalidRequest, "write_pages", why));
        }
        let (peer, link, work) = self.checked()?;
        let work = Work { imm: Some(imm), ..work.clone() };
        peer.submit_when(link, work, self.trigger.as_ref(), self.deadline, "write_pages")
    }

    /// Submits the write to begin once `signal` has reached `value`: see
    /// [`WriteOptions::when`](crate::WriteOptions::when). A loop of steps posts it in advance, with a value that is one
    /// higher each time.
    ///
    /// # Errors
    /// Those of [`PreparedWrite::post`].
    pub fn post_when(&self, signal: Arc<dyn Signal>, value: u32) -> Result<Op> {
        let (peer, link, work) = self.checked()?;
        let trigger = Trigger::new(signal, value);
        peer.submit_when(link, work.clone(), Some(&trigger), self.deadline, "write_pages")
    }

    /// Bytes of one post.
    pub fn bytes(&self) -> u64 {
        self.work.shape.bytes()
    }

    /// Makes the checks of a post. Returns the peer, the link, and the work that a post submits.
    pub(crate) fn checked(&self) -> Result<(&Peer, &Link, &Work)> {
        self.peer.0.check_alive()?;
        if let Some(local) = &self.work.local {
            local.check_usable("write_pages")?;
        }
        if let Some(remote) = &self.work.remote {
            remote.check(0, 0, Access::REMOTE_WRITE, "write_pages")?;
        }
        Ok((&self.peer, self.peer.0.first_link_of(self.transport), &self.work))
    }
}

impl fmt::Debug for PreparedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = self.work.shape.piece_count();
        f.debug_struct("PreparedWrite").field("pages", &pages).field("bytes", &self.bytes()).finish()
    }
}
