//! Copies on one GPU, in batches that complete later.
//!
//! Pieces are collected in an open batch until it is launched. A kernel copies pages by a table. The GPU's copy engine
//! copies large pieces, because it leaves the multiprocessors free, and all pieces that the kernel cannot reach.
//! Batches are spread over up to four streams: a kernel takes 7 µs to begin and to end (H200), and meanwhile the
//! kernels of the other streams keep the line busy.

use std::collections::VecDeque;

use multirail_spi::{Error, ErrorKind, Result};

use crate::batch::CopyBatch;
use crate::kernels::{UNIT, WARPS};
use crate::stream::Stream;
use crate::tables::{TABLES, Tables};
use crate::{Device, Reach};

/// The most streams. With one, pages of 64 KiB moved between two H200s at 0.60, 0.81 and 0.86 of the speed of one large
/// copy, in batches of 4, 16 and 32 MiB; with three at 0.83, 0.90 and more.
const STREAMS: usize = 4;
/// The blocks that one stream needs before there is a further one. Eight blocks alone reach 0.87 of the line's speed.
/// With fewer blocks per stream, the last batch would run for long while the other streams are idle.
const BLOCKS_PER_STREAM: usize = 8;
/// The number of polls without a result after which the driver is asked whether the GPU has failed.
const POLLS_UNTIL_CHECK: u32 = 1 << 14;

/// Copies on one GPU. One thread drives it.
pub struct BatchCopier {
    streams: Vec<Stream>,
    tables: Tables,
    /// The blocks of each launch of the kernel.
    blocks: u32,
    /// The batch that is being filled.
    open: CopyBatch,
    /// The table of the open batch. No batch in flight has it. The kernel no longer reads the table of a batch that has
    /// completed, and a batch whose launch failed copies nothing.
    table: usize,
    /// The launched batches that have not completed, the oldest first.
    in_flight: VecDeque<LaunchedBatch>,
    /// Bytes in flight, by stream.
    stream_bytes: Vec<u64>,
    /// The number of launches, modulo 2^32.
    launched: u32,
    /// Polls since the last result, or since the driver was asked last.
    polls: u32,
    /// Dropped last: its context owns the streams.
    device: Device,
}

#[derive(Clone, Copy)]
struct LaunchedBatch {
    table: usize,
    stream: usize,
    /// What the table's word becomes when the batch has completed.
    value: u32,
    bytes: u64,
}

impl BatchCopier {
    /// A copier on `device` whose kernels have `blocks` blocks together, at least one. Each block takes a
    /// multiprocessor.
    ///
    /// # Errors
    /// `Unsupported` if the GPU cannot run the kernel, `Exhausted` if there is no memory for tables.
    pub fn new(device: &Device, blocks: u32) -> Result<Self> {
        device.page_kernel()?;
        let streams = (blocks as usize / BLOCKS_PER_STREAM).clamp(1, STREAMS);
        let streams = (0..streams).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            device: device.clone(),
            blocks: (blocks / streams.len() as u32).max(1),
            stream_bytes: vec![0; streams.len()],
            streams,
            tables: Tables::new(device)?,
            open: CopyBatch::default(),
            table: 0,
            in_flight: VecDeque::with_capacity(TABLES),
            launched: 0,
            polls: 0,
        })
    }

    /// The GPU that copies.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of pieces that the open batch still has room for.
    #[inline]
    pub fn room(&self) -> usize {
        self.open.room()
    }

    /// The bytes of the open batch.
    #[inline]
    pub fn open_bytes(&self) -> u64 {
        self.open.bytes
    }

    /// Whether the open batch is one large piece for the copy engine that may still grow.
    #[inline]
    pub fn is_growing(&self) -> bool {
        self.open.is_growing()
    }

    /// The number of launched batches that have not completed.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether one more batch may be launched.
    #[inline]
    pub fn can_launch(&self) -> bool {
        self.in_flight.len() < TABLES - 1
    }

    /// Adds pieces to the open batch, `(to, from, bytes)` each. There must be [`room`](Self::room) for them. The pieces
    /// of a batch are copied in any order.
    ///
    /// # Safety
    /// The GPU reaches both ends of each piece as `reach` says. Both stay allocated until the batch has completed.
    #[inline]
    pub unsafe fn add(&mut self, pieces: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: no batch in flight has the table.
        self.open.add(unsafe { self.tables.fill(self.table) }, pieces, reach);
    }

    /// Keeps later pieces from being joined to the last one. It is called where other memory begins.
    pub fn end_piece(&mut self) {
        // SAFETY: no batch in flight has the table.
        self.open.end_piece(unsafe { self.tables.fill(self.table) });
    }

    /// Launches the open batch. Does nothing if it is empty. The caller has checked [`can_launch`](Self::can_launch).
    ///
    /// # Errors
    /// The driver's error. No piece of the batch is being copied any more when it returns.
    pub fn launch(&mut self) -> Result<()> {
        self.launch_repeatedly(1)
    }

    /// As [`launch`](Self::launch), and copies the same pieces `times` times, at least once, one time after another. For
    /// measurements: the GPU's copies take as long as with other pieces, and nobody has to list those.
    ///
    /// # Errors
    /// As those of [`launch`](Self::launch).
    pub fn launch_repeatedly(&mut self, times: u32) -> Result<()> {
        assert!(self.can_launch());
        self.end_piece();
        if self.open.is_empty() {
            return Ok(());
        }
        self.launched = self.launched.wrapping_add(1);
        // The stream with the fewest bytes in flight: so all streams end at about the same time, even if batches differ
        // in size.
        let stream =
            (0..self.stream_bytes.len()).min_by_key(|stream| self.stream_bytes[*stream]).unwrap_or(0);
        let batch = LaunchedBatch { table: self.table, stream, value: self.launched, bytes: self.open.bytes };
        // The word must not have the batch's value before the last time has ended.
        let before = LaunchedBatch { value: batch.value.wrapping_sub(1), ..batch };
        let started = (1..times).try_for_each(|_| self.start(before)).and_then(|()| self.start(batch));
        match &started {
            Ok(()) => {
                self.stream_bytes[batch.stream] += batch.bytes;
                self.in_flight.push_back(batch);
            }
            Err(_) => self.wait_for_stream(batch.stream),
        }
        let is_taken = |table: &usize| self.in_flight.iter().any(|batch| batch.table == *table);
        self.table =
            (0..TABLES).find(|table| !is_taken(table)).expect("there are more tables than batches in flight");
        self.open.clear();
        started
    }

    /// Takes the oldest launched batch if it has completed: its bytes are visible to every GPU and the host.
    ///
    /// # Errors
    /// The driver's error, once for each batch. No piece of that batch is being copied any more.
    #[inline]
    pub fn take_completed(&mut self) -> Option<Result<()>> {
        let batch = *self.in_flight.front()?;
        let result = match self.tables.value(batch.table) == batch.value {
            true => Ok(()),
            false => Err(self.check_for_failure(batch)?),
        };
        self.polls = 0;
        self.stream_bytes[batch.stream] -= batch.bytes;
        self.in_flight.pop_front();
        Some(result)
    }

    fn start(&self, batch: LaunchedBatch) -> Result<()> {
        let (stream, open) = (&self.streams[batch.stream], &self.open);
        let device = &self.device;
        device.within("copy", || {
            for piece in &open.copies {
                // SAFETY: by the contract of `add`.
                unsafe { stream.copy(piece.to, piece.from, piece.len) }?;
            }
            if open.entries == 0 {
                // SAFETY: the tables outlive all queued work, because `drop` waits for it.
                return unsafe { stream.write(self.tables.word(batch.table), batch.value) };
            }
            let (entries, units) = (open.entries as u32, open.longest.div_ceil(UNIT));
            let launch = self.tables.launch(batch.table, entries, units, open.each, batch.value);
            let blocks = (entries * units).div_ceil(WARPS).min(self.blocks);
            // SAFETY: the table is filled, and is not changed until the batch has completed. Its entries are as the
            // contract of `add` says.
            unsafe { device.page_kernel()?.launch(stream, blocks, launch) }
        })
    }

    /// Asks the driver now and then whether the GPU has failed, while a batch has not completed.
    fn check_for_failure(&mut self, batch: LaunchedBatch) -> Option<Error> {
        self.polls += 1;
        if self.polls < POLLS_UNTIL_CHECK {
            return None;
        }
        self.polls = 0;
        let checked = self.device.within("copy", || self.streams[batch.stream].is_done());
        // Any other error says nothing about the batch.
        checked.err().filter(|why| why.kind() == ErrorKind::DeviceLost)
    }

    /// Waits until all queued work of a stream has ended, whether it succeeded or not.
    fn wait_for_stream(&self, stream: usize) {
        let stream = &self.streams[stream];
        loop {
            match self.device.within("copy", || stream.is_done()) {
                Ok(true) => return,
                Err(why) if why.kind() == ErrorKind::DeviceLost => return,
                _ => std::hint::spin_loop(),
            }
        }
    }
}

impl Drop for BatchCopier {
    fn drop(&mut self) {
        (0..self.streams.len()).for_each(|stream| self.wait_for_stream(stream));
    }
}
