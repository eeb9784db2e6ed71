//! Writes that are checked and planned once and posted many times.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Work;
use crate::engine::peer::Link;
use crate::index::TransportIndex;
use crate::peer::PeerInner;
use crate::{Access, Op, Result, Signal, Trigger};

/// A paged write, ready to be posted again and again: what a loop over a KV cache does.
///
/// Lists, bounds, rights and capability were checked when it was made. A post checks
/// what can change since: that the peer lives and the region was not revoked. It
/// allocates nothing. Posts of one prepared write may be under way at once.
///
/// It holds the regions, but not the peer's connection.
pub struct PreparedWrite {
    pub(crate) peer: Arc<PeerInner>,
    pub(crate) transport: TransportIndex,
    pub(crate) work: Work,
    pub(crate) trigger: Option<Trigger>,
    pub(crate) deadline: Option<Duration>,
}

impl PreparedWrite {
    /// Submits it once more.
    ///
    /// # Errors
    /// `PeerDied`, `Revoked` (either region), `Closed`; `Busy` if `max_operations` are under way.
    pub fn post(&self) -> Result<Op> {
        let (peer, link, work) = self.checked()?;
        peer.submit_when(link, work.clone(), self.trigger.as_ref(), self.deadline, "write_pages")
    }

    /// Submits it with another imm than it was prepared with.
    ///
    /// # Errors
    /// As [`PreparedWrite::post`]'s, and `InvalidRequest` if it was prepared without
    /// an imm: whether the transport carries them was not asked.
    pub fn post_with_imm(&self, imm: u32) -> Result<Op> {
        if self.work.imm.is_none() {
            let why = "prepared without an imm; prepare it with any, and post it with this one";
            return Err(crate::Error::new(crate::ErrorKind::InvalidRequest, "write_pages", why));
        }
        let (peer, link, work) = self.checked()?;
        let work = Work { imm: Some(imm), ..work.clone() };
        peer.submit_when(link, work, self.trigger.as_ref(), self.deadline, "write_pages")
    }

    /// Submits it to begin once `word` has reached `value`: see [`WriteOptions::when`](crate::WriteOptions::when). A loop of steps
    /// posts it ahead, for one value more each time.
    ///
    /// # Errors
    /// As [`PreparedWrite::post`]'s.
    pub fn post_when(&self, word: Arc<dyn Signal>, value: u32) -> Result<Op> {
        let (peer, link, work) = self.checked()?;
        let trigger = Trigger::new(word, value);
        peer.submit_when(link, work.clone(), Some(&trigger), self.deadline, "write_pages")
    }

    /// Bytes of one post.
    pub fn bytes(&self) -> u64 {
        self.work.shape.bytes()
    }

    /// What a post checks, and what it would submit over which link.
    pub(crate) fn checked(&self) -> Result<(&Arc<PeerInner>, &Link, &Work)> {
        self.peer.check_alive()?;
        if let Some(local) = &self.work.local {
            local.check_usable("write_pages")?;
        }
        if let Some(remote) = &self.work.remote {
            remote.check(0, 0, Access::REMOTE_WRITE, "write_pages")?;
        }
        Ok((&self.peer, self.peer.first_link_of(self.transport), &self.work))
    }
}

impl fmt::Debug for PreparedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = self.work.shape.piece_count();
        f.debug_struct("PreparedWrite").field("pages", &pages).field("bytes", &self.bytes()).finish()
    }
}
