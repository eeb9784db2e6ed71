//! Moves windows into the server's region by paged writes.

use std::time::Duration;

use crate::files::Layout;
use multirail::{Op, Pages, Peer, Region, RemoteRegion};

use crate::failure::CommandResult;

/// Longer than the fabric's deadline of an operation, which ends it first.
const LIMIT: Duration = Duration::from_secs(60);

/// A window that is ready to move.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its number.
    pub sequence: u64,
    /// Bytes of its table.
    pub table: u32,
    /// Bytes of files.
    pub data: u32,
}

/// Moves windows of a local region to the same place in a remote one.
pub struct WindowWriter {
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
    layout: Layout,
    /// The pages of every full window.
    full: Vec<Pages>,
}

impl WindowWriter {
    /// A mover between two regions of one layout.
    pub fn new(peer: &Peer, local: &Region, remote: RemoteRegion, layout: Layout) -> Self {
        let full = (0..layout.windows)
            .map(|slot| pages(layout, layout.data_at(u64::from(slot)), layout.data as usize));
        Self { peer: peer.clone(), local: local.clone(), remote, layout, full: full.collect() }
    }

    /// Moves the bytes and the table of a window; they are delivered on return.
    pub fn write_window(&self, window: Window) -> CommandResult {
        let Window { sequence, table, data } = window;
        let (page, offset, len) = (self.layout.page as usize, self.layout.data_at(sequence), data as usize);
        let partial;
        let whole = match data == self.layout.data {
            true => &self.full[self.layout.slot(sequence)],
            false => {
                partial = pages(self.layout, offset, len);
                &partial
            }
        };
        let paged = match whole.is_empty() {
            true => None,
            false => Some(self.peer.write_pages(&self.local, whole, &self.remote, whole, page)?),
        };
        let at = self.layout.table_at(sequence);
        let tail = offset + len - len % page..offset + len;
        let plain = [tail, at..at + table as usize].map(|range| {
            let start = range.start;
            (!range.is_empty()).then(|| self.peer.write(&self.local, range, &self.remote, start)).transpose()
        });
        let [tail, table] = plain;
        for mut op in [paged, tail?, table?].into_iter().flatten() {
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
