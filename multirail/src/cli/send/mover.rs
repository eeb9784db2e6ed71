//! Moves windows into the server's region by paged writes.

use std::time::Duration;

use multirail::{Op, Pages, Peer, Region, RemoteRegion};

use crate::cli::failure::Done;
use crate::cli::files::Layout;

/// Longer than the fabric's deadline of an operation, which ends it first.
const LIMIT: Duration = Duration::from_secs(60);

/// Moves windows of a local region to the same place in a remote one.
pub struct Mover {
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
    layout: Layout,
    /// The pages of every full window.
    full: Vec<Pages>,
}

impl Mover {
    /// A mover between two regions of one layout.
    pub fn new(peer: &Peer, local: &Region, remote: RemoteRegion, layout: Layout) -> Self {
        let full = (0..layout.windows)
            .map(|slot| pages(layout, layout.offset(u64::from(slot)), layout.window as usize));
        Self { peer: peer.clone(), local: local.clone(), remote, layout, full: full.collect() }
    }

    /// Moves the first `len` bytes of window `sequence`; they are delivered on return.
    pub fn move_window(&self, sequence: u64, len: usize) -> Done {
        let (page, offset) = (self.layout.page as usize, self.layout.offset(sequence));
        let slot = (sequence % u64::from(self.layout.windows)) as usize;
        let partial;
        let whole = match len == self.layout.window as usize {
            true => &self.full[slot],
            false => {
                partial = pages(self.layout, offset, len);
                &partial
            }
        };
        let paged = match whole.is_empty() {
            true => None,
            false => Some(self.peer.write_pages(&self.local, whole, &self.remote, whole, page)?),
        };
        let tail = (!len.is_multiple_of(page)).then(|| {
            let (from, to) = (offset + len - len % page, offset + len);
            self.peer.write(&self.local, from..to, &self.remote, from)
        });
        for mut op in [paged, tail.transpose()?].into_iter().flatten() {
            Op::wait(&mut op, LIMIT)?;
        }
        Ok(())
    }
}

/// The whole pages among `len` bytes at `offset`.
fn pages(layout: Layout, offset: usize, len: usize) -> Pages {
    let page = layout.page as usize;
    let (first, count) = ((offset / page) as u32, (len / page) as u32);
    Pages::new((first..first + count).collect::<Vec<_>>())
}
