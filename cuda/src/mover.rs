//! Copies on one GPU, in batches, without waiting for them.
//!
//! What is added is gathered in an open batch. Pages go into a table, for the kernel; large pieces go to the copy
//! engine, which leaves the GPU's processors alone, and so does what the kernel cannot reach. Batches take turns on
//! four streams: a kernel takes 7 µs to begin and to end (H200), in which those of the other streams keep the line
//! busy.

use std::collections::VecDeque;

use multirail_spi::{ErrorKind, Result};

use crate::batch::Batch;
use crate::kernel::{UNIT, WARPS};
use crate::stream::Stream;
use crate::tables::{TABLES, Tables};
use crate::{Device, Reach};

/// Streams that batches take turns on, at most. With one, pages of 64 KiB moved between two H200s at 0.60, 0.81 and
/// 0.86 of one large copy in batches of 4, 16 and 32 MiB; with three at 0.83, 0.90 and more.
const STREAMS: usize = 4;
/// Blocks of a launch where there are enough for several: eight carry 0.87 of the line alone. With fewer the last
/// batch would be alone for long.
const BLOCKS: usize = 8;
/// Looks at an answer that has not come until the driver is asked what is wrong.
const PATIENCE: u32 = 1 << 14;

/// Copies on one GPU. One thread drives it.
pub struct Mover {
    streams: Vec<Stream>,
    tables: Tables,
    /// Of each launch of the kernel.
    blocks: u32,
    /// What is being gathered.
    open: Batch,
    /// The table of its entries. No flight has it: of what has landed it was read (the word comes after that), of what
    /// was refused nothing moves.
    table: usize,
    /// Launched and not landed, the first first.
    flying: VecDeque<Flight>,
    /// Bytes on their way, by stream.
    busy: Vec<u64>,
    launched: u32,
    looks: u32,
    /// Dropped last: the streams go with its context.
    device: Device,
}

#[derive(Clone, Copy)]
struct Flight {
    table: usize,
    stream: usize,
    value: u32,
    bytes: u64,
}

impl Mover {
    /// A mover on `device` whose kernels have `blocks` blocks together, at least one; each takes a processor.
    ///
    /// # Errors
    /// `Unsupported` where the GPU cannot run the kernel, `Exhausted` without memory for tables.
    pub fn new(device: &Device, blocks: u32) -> Result<Self> {
        device.kernel()?;
        let streams = (blocks as usize / BLOCKS).clamp(1, STREAMS);
        let streams = (0..streams).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            device: device.clone(),
            blocks: (blocks / streams.len() as u32).max(1),
            busy: vec![0; streams.len()],
            streams,
            tables: Tables::new(device)?,
            open: Batch::default(),
            table: 0,
            flying: VecDeque::with_capacity(TABLES),
            launched: 0,
            looks: 0,
        })
    }

    /// Its GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Pieces that may be added before the next launch.
    #[inline]
    pub fn room(&self) -> usize {
        self.open.room()
    }

    /// Bytes that wait for the next launch.
    #[inline]
    pub fn waiting(&self) -> u64 {
        self.open.bytes
    }

    /// Whether what waits is one piece that may still grow, for the copy engine in the end.
    #[inline]
    pub fn is_growing(&self) -> bool {
        self.open.is_growing()
    }

    /// Batches that were launched and have not landed.
    #[inline]
    pub fn flying(&self) -> usize {
        self.flying.len()
    }

    /// Whether one more may be launched.
    #[inline]
    pub fn may_launch(&self) -> bool {
        self.flying.len() < TABLES - 1
    }

    /// Adds pieces to the open batch, `(to, from, bytes)` each; there must be [`room`](Self::room). Pieces of a
    /// batch move in no order.
    ///
    /// # Safety
    /// Both ends are memory that the GPU reaches as `reach` says, and stay until the batch has landed.
    #[inline]
    pub unsafe fn add(&mut self, pieces: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: no flight has the table.
        self.open.add(unsafe { self.tables.fill(self.table) }, pieces, reach);
    }

    /// What is added from now on is not joined to what was added before: it belongs to other memory.
    pub fn divide(&mut self) {
        // SAFETY: no flight has the table.
        self.open.divide(unsafe { self.tables.fill(self.table) });
    }

    /// Starts moving the open batch, if there is anything in it; it has to be
    /// [allowed](Self::may_launch).
    ///
    /// # Errors
    /// The driver's. Then nothing of the batch moves any more.
    pub fn launch(&mut self) -> Result<()> {
        assert!(self.may_launch());
        self.divide();
        if self.open.is_empty() {
            return Ok(());
        }
        self.launched = self.launched.wrapping_add(1);
        // The one with the least to do: all end together then, however unequal batches are.
        let stream = (0..self.busy.len()).min_by_key(|stream| self.busy[*stream]).unwrap_or(0);
        let flight = Flight { table: self.table, stream, value: self.launched, bytes: self.open.bytes };
        let started = self.start(flight);
        match &started {
            Ok(()) => {
                self.busy[flight.stream] += flight.bytes;
                self.flying.push_back(flight);
            }
            Err(_) => self.quiesce(flight.stream),
        }
        let taken = |table: &usize| self.flying.iter().any(|flight| flight.table == *table);
        self.table = (0..TABLES).find(|table| !taken(table)).expect("there are more tables than may fly");
        self.open.clear();
        started
    }

    fn start(&self, flight: Flight) -> Result<()> {
        let (stream, open) = (&self.streams[flight.stream], &self.open);
        let device = &self.device;
        device.within("copy", || {
            for piece in &open.copies {
                // SAFETY: as `add` was promised.
                unsafe { stream.copy(piece.to, piece.from, piece.len) }?;
            }
            if open.entries == 0 {
                // SAFETY: the tables outlive what is queued: `drop` waits.
                return unsafe { stream.write(self.tables.word(flight.table), flight.value) };
            }
            let (entries, units) = (open.entries as u32, open.longest.div_ceil(UNIT));
            let launch = self.tables.launch(flight.table, entries, units, open.each, flight.value);
            let blocks = (entries * units).div_ceil(WARPS).min(self.blocks);
            // SAFETY: the table was filled, and is not touched until it has landed; its entries are as `add`
            // was promised.
            unsafe { device.kernel()?.launch(stream, blocks, launch) }
        })
    }

    /// Takes the oldest batch that was launched, if it has landed: its bytes are visible to every GPU and
    /// the host.
    ///
    /// # Errors
    /// The driver's, once for each batch: it moves no more bytes then.
    #[inline]
    pub fn landed(&mut self) -> Option<Result<()>> {
        let flight = *self.flying.front()?;
        let outcome =
            if self.tables.answer(flight.table) == flight.value { Ok(()) } else { Err(self.ask(flight)?) };
        self.looks = 0;
        self.busy[flight.stream] -= flight.bytes;
        self.flying.pop_front();
        Some(outcome)
    }

    /// What is wrong with a batch that has not landed: asked now and then.
    fn ask(&mut self, flight: Flight) -> Option<multirail_spi::Error> {
        self.looks += 1;
        if self.looks < PATIENCE {
            return None;
        }
        self.looks = 0;
        let asked = self.device.within("copy", || self.streams[flight.stream].is_done());
        // Any other refusal says nothing of the batch.
        asked.err().filter(|why| why.kind() == ErrorKind::DeviceLost)
    }

    /// Waits until nothing that was queued on a stream moves any more, whatever became of it.
    fn quiesce(&self, stream: usize) {
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

impl Drop for Mover {
    fn drop(&mut self) {
        (0..self.streams.len()).for_each(|stream| self.quiesce(stream));
    }
}
