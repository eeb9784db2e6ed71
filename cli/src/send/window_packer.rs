//! Fills free windows with items and their bytes.

use std::sync::mpsc::SyncSender;

use crate::files::{FilePiece, PieceHash, TableItem, WindowLayout, encode};
use multirail::Region;

use super::server_channel::{KeepAliveTimer, SendError, ServerChannel};
use super::source::SourceFile;
use super::window_writer::FilledWindow;
use crate::failure::CommandFailure;

/// The longest encoded item is shorter than this.
const ITEM: usize = 64;

/// A message to the thread that writes windows to the server.
pub enum Filled {
    /// A window to write.
    Window(FilledWindow),
    /// No window is full yet, and the server needs a sign of life.
    Working,
}

/// Fills one window after the other.
pub struct WindowPacker<'a> {
    channel: &'a mut ServerChannel,
    region: &'a Region,
    layout: WindowLayout,
    /// The channel to the thread that writes windows.
    filled: SyncSender<Filled>,
    keep_alive: &'a mut KeepAliveTimer,
    table: Vec<u8>,
    data: usize,
    part: Vec<u8>,
}

impl<'a> WindowPacker<'a> {
    /// Fills the windows of `region`.
    pub fn new(
        channel: &'a mut ServerChannel,
        region: &'a Region,
        filled: SyncSender<Filled>,
        keep_alive: &'a mut KeepAliveTimer,
    ) -> Self {
        let layout = channel.layout;
        Self { channel, region, layout, filled, keep_alive, table: Vec::new(), data: 0, part: Vec::new() }
    }

    /// Adds an item that has no bytes.
    pub fn item(&mut self, item: &TableItem) -> Result<(), SendError> {
        self.reserve(0)?;
        self.add(item)
    }

    /// Adds a whole file of `len` bytes.
    pub fn whole(&mut self, index: u32, source: &SourceFile, len: usize) -> Result<blake3::Hash, SendError> {
        self.reserve(len)?;
        let (mut hasher, to) = (blake3::Hasher::new(), self.at());
        source.fill(0, len, &mut self.part, self.region, to, |bytes| {
            hasher.update(bytes);
        })?;
        source.ensure_unchanged()?;
        let hash = hasher.finalize();
        self.data += len;
        self.add(&TableItem::Whole { index, hash: hash.into() })?;
        Ok(hash)
    }

    /// Adds a piece of a file.
    pub fn piece(
        &mut self,
        source: &SourceFile,
        range: std::ops::Range<u64>,
    ) -> Result<FilePiece, SendError> {
        let len = (range.end - range.start) as usize;
        self.reserve(len)?;
        let (mut hash, to) = (PieceHash::new(range.start), self.at());
        source.fill(range.start, len, &mut self.part, self.region, to, |bytes| hash.update(bytes))?;
        source.ensure_unchanged()?;
        self.data += len;
        let piece = FilePiece { offset: range.start, len: len as u32, hash: hash.finish() };
        self.add(&TableItem::Piece(piece))?;
        Ok(piece)
    }

    /// Passes the last window on.
    pub fn finish(mut self) -> Result<(), SendError> {
        self.flush()
    }

    fn at(&self) -> usize {
        self.layout.data_at(self.channel.next) + self.data
    }

    fn add(&mut self, item: &TableItem) -> Result<(), SendError> {
        encode(item, &mut self.table).map_err(|why| SendError::Failed(CommandFailure::new(why)))
    }

    /// Waits until the window is free and has space for `len` bytes and an item.
    ///
    /// Passes the window on if it has no space.
    fn reserve(&mut self, len: usize) -> Result<(), SendError> {
        let full = self.data + len > self.layout.data as usize
            || self.table.len() + ITEM > self.layout.table as usize;
        if full {
            self.flush()?;
        }
        if self.keep_alive.is_due() {
            // If the channel is full, the server gets enough messages anyway.
            let _ = self.filled.try_send(Filled::Working);
        }
        if self.table.is_empty() { self.channel.wait_until_free() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), SendError> {
        if self.table.is_empty() {
            return Ok(());
        }
        let sequence = self.channel.next;
        self.region.copy_in(self.layout.table_at(sequence), &self.table).map_err(CommandFailure::from)?;
        let window = FilledWindow { sequence, table: self.table.len() as u32, data: self.data as u32 };
        self.channel.take_window();
        (self.data, self.table) = (0, Vec::new());
        self.filled
            .send(Filled::Window(window))
            .map_err(|_| SendError::Failed(CommandFailure::new("the thread that writes windows ended early")))
    }
}
