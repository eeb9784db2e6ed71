//! Paying for the first use before it comes.

use super::Peer;
use crate::engine::Work;
use crate::plan::Shape;
use crate::spi::{Operations, WorkKind};
use crate::{Op, Result};

impl Peer {
    /// Touches every rail to this peer, so that the first operation later costs no more
    /// than the ones after it. It moves no byte of a region and delivers no imm.
    ///
    /// Each rail of each transport gets one write of no bytes (see
    /// [`WorkRequest::len`](crate::spi::WorkRequest::len) for what a backend makes of
    /// it), and every region that is imported from the peer is made ready, in the calling thread.
    /// By backend:
    ///
    /// - `loopback`: the worker touches the shared memory of message rings and staging buffers, both ways.
    ///   What is imported from another process is mapped page by page by the kernel, before
    ///   this returns: some milliseconds per GiB. In one process there is nothing to map.
    /// - `null` devices: a request like any other.
    ///
    /// Import first, then warm up; both sides may. The operation resolves when every rail has
    /// answered, by the fabric's default deadline at the latest.
    ///
    /// # Errors
    /// `PeerDied`, `Closed`, `Busy`; later those of any write.
    pub fn warm_up(&self) -> Result<Op> {
        self.0.check_alive()?;
        self.0.first_link("warm_up")?;
        for remote in self.0.imported() {
            remote.imports.iter().flatten().for_each(|import| import.warm_up());
        }
        let writes = |link: &&crate::engine::peer::Link| {
            link.capabilities().is_some_and(|caps| caps.operations.contains(Operations::WRITE))
        };
        let ops = self.0.links.iter().filter(|link| link.is_up()).filter(writes).map(|link| {
            let shape = Shape::WarmUp { rails: link.rails.iter().flatten().count() as u32 };
            self.0.submit(link, Work::of(WorkKind::Write, shape), None, "warm_up")
        });
        Ok(Op::all(ops.collect::<Result<_>>()?))
    }
}
