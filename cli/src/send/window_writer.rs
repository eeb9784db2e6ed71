//! Writes windows into the server's region with paged writes.

use std::time::Duration;

use crate::files::WindowLayout;
use multirail::{Op, Pages, Peer, Region, RemoteRegion};

use crate::failure::CommandResult;

/// The limit of a wait. The fabric's deadline of an operation is shorter.
const LIMIT: Duration = Duration::from_secs(60);

/// A filled window.
#[derive(Debug, Clone, Copy)]
pub struct FilledWindow {
    /// The sequence number.
    pub sequence: u64,
    /// The bytes of the table.
    pub table: u32,
    /// The bytes of files.
    pub data: u32,
}

/// Writes windows of a local region to the same offsets of a remote region.
pub struct WindowWriter {
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
    layout: WindowLayout,
    /// The page lists of full windows.
    full: Vec<Pages>,
}

impl WindowWriter {
    /// A writer between two regions of the same layout.
    pub fn new(peer: &Peer, local: &Region, remote: RemoteRegion, layout: WindowLayout) -> Self {
        let full = (0..layout.windows)
            .map(|slot| pages(layout, layout.data_at(u64::from(slot)), layout.data as usize));
        Self { peer: peer.clone(), local: local.clone(), remote, layout, full: full.collect() }
    }

    /// Writes the bytes and the table of a window, and waits until they are delivered.
    pub fn write_window(&self, window: FilledWindow) -> CommandResult {
        let FilledWindow { sequence, table, data } = window;
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

/// The whole pages of `len` bytes at `offset`.
fn pages(layout: WindowLayout, offset: usize, len: usize) -> Pages {
    let page = layout.page as usize;
    let (first, count) = ((offset / page) as u32, (len / page) as u32);
    Pages::new((first..first + count).collect::<Vec<_>>())
}
