//! Copies between slots and regions. The processor's copies complete at once; GPU copies complete later.

use std::collections::VecDeque;

use cuda::{CopyQueue, Device, Reach};
use multirail_spi::{
    Error, ErrorKind, Memory, MemoryKind, PeerSlot, Result,
    copy::{self, CopyStrategy},
};

use crate::page_table::SlotLimit;
use crate::staging_buffer::StagingBuffer;

/// The most multiprocessors of a GPU that a copy uses: loopback's default.
const BLOCKS: u32 = 32;

/// The bytes that the processor copies before the endpoint posts what the copies are for, and polls the device: those
/// that it puts into a slot. So the device and the peer work on one slot while the processor copies the next one.
const MAX_COPIED: u64 = SlotLimit::HOST.bytes;

/// Where memory lies. The location decides what copies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryLocation {
    /// In host memory: the processor copies it.
    Host,
    /// On the GPU with this ordinal, which copies it.
    Gpu(u32, Reach),
}

impl MemoryLocation {
    /// The location of memory that is to be registered.
    ///
    /// # Errors
    /// `Unsupported` if the memory's own GPU has no access to it.
    pub(crate) fn of(memory: &dyn Memory) -> Result<Self> {
        let MemoryKind::Cuda { device } = memory.kind() else { return Ok(Self::Host) };
        let device = Device::open(device)?;
        let reach = Reach::of_gpu(&device, &device, memory.as_ptr() as u64, memory.len() as u64);
        let no_access = || {
            let why = "the memory's own GPU has no access to it: call cuMemSetAccess or cuMemPoolSetAccess";
            Error::new(ErrorKind::Unsupported, "register", why)
        };
        Ok(Self::Gpu(device.ordinal(), reach.ok_or_else(no_access)?))
    }
}

/// How far a copy is once [`Copies::begin`] has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyStart {
    /// It is complete: the processor has copied the bytes, or the GPU cannot copy.
    Complete(Result<(), ErrorKind>),
    /// A GPU copies the bytes.
    UnderWay,
    /// There is no room for the copy now: it has not begun.
    NoRoom,
}

/// What a copy of a GPU is for. The caller marks each copy with a tag, and gets the tag back when the copy has
/// completed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CopyTag {
    /// Pages of a slot of this process as initiator: so many, from this page on.
    Initiator { peer: PeerSlot, slot: usize, page: usize, count: usize },
    /// Copies of a slot of this process as target: so many, from this copy on.
    Target { peer: PeerSlot, slot: usize, copy: usize, count: usize },
    /// The receive with this ID.
    Receive { id: u64 },
}

/// The copies of an endpoint. Those of GPUs take their time.
#[derive(Default)]
pub(crate) struct Copies {
    gpus: Vec<GpuCopies>,
    /// Bytes that the processor has copied since [`make_room`](Self::make_room).
    copied: u64,
    /// Whether a copy of the processor has found no room.
    has_refused: bool,
    completed: VecDeque<(CopyTag, Result<(), ErrorKind>)>,
}

/// The copies of one GPU.
struct GpuCopies {
    /// The launched batches, and the copies of each.
    batches: CopyQueue<Vec<CopyTag>>,
    /// The copies of the open batch, which is not launched yet.
    open: Vec<CopyTag>,
}

impl Copies {
    /// Begins a copy of `len` bytes. The memory at one end lies at `location`; the other end is in `buffer`, or in
    /// plain host memory if `buffer` is `None`. [`take_completed`](Self::take_completed) returns the tag of a copy that
    /// is under way.
    ///
    /// # Safety
    /// Both ranges are valid until the copy has completed, and there are no references into them.
    pub(crate) unsafe fn begin(
        &mut self,
        location: MemoryLocation,
        buffer: Option<&StagingBuffer>,
        (to, from, len): (*mut u8, *const u8, u64),
        tag: CopyTag,
    ) -> CopyStart {
        let MemoryLocation::Gpu(ordinal, reach) = location else {
            if !self.take_room(len) {
                return CopyStart::NoRoom;
            }
            // SAFETY: by the caller.
            unsafe { copy::copy(CopyStrategy::Plain, to, from, len as usize) };
            return CopyStart::Complete(Ok(()));
        };
        // SAFETY: by the caller.
        unsafe { self.begin_each((ordinal, reach), buffer, (1, std::iter::once((to, from, len))), tag) }
    }

    /// Begins copies of a GPU that complete together: so many, each with its two ends and its bytes. One end of each
    /// lies in one region, which the GPU reaches as `gpu` says; the other end as for [`begin`](Self::begin). So the
    /// copies of a slot's pages cost little more than their entries in the table of the GPU's kernel.
    ///
    /// # Safety
    /// As [`begin`](Self::begin).
    pub(crate) unsafe fn begin_each(
        &mut self,
        (ordinal, reach): (u32, Reach),
        buffer: Option<&StagingBuffer>,
        (count, copies): (usize, impl Iterator<Item = (*mut u8, *const u8, u64)>),
        tag: CopyTag,
    ) -> CopyStart {
        let gpu = match self.gpu(ordinal) {
            Ok(gpu) => gpu,
            Err(why) => {
                tracing::error!(%why, gpu = ordinal, "staging: a GPU cannot copy");
                return CopyStart::Complete(Err(why.kind()));
            }
        };
        if gpu.batches.copier().room() < count.max(1) {
            return CopyStart::NoRoom;
        }
        let host_reach = buffer.map_or(Reach::Driver, |buffer| buffer.reach(gpu.batches.copier().device()));
        let reach = if host_reach == Reach::Kernel { reach } else { Reach::Driver };
        gpu.batches.end_piece();
        // SAFETY: by the caller; `reach` is `Reach::Kernel` only if the GPU's copy kernel reaches both ends.
        unsafe { gpu.batches.add(copies.map(|(to, from, len)| (to as u64, from as u64, len)), reach) };
        gpu.open.push(tag);
        CopyStart::UnderWay
    }

    /// The copies of a GPU. The first copy opens the GPU.
    fn gpu(&mut self, ordinal: u32) -> Result<&mut GpuCopies> {
        let is_same = |gpu: &GpuCopies| gpu.batches.copier().device().ordinal() == ordinal;
        let index = match self.gpus.iter().position(is_same) {
            Some(index) => index,
            None => {
                let batches = CopyQueue::new(&Device::open(ordinal)?, BLOCKS)?;
                self.gpus.push(GpuCopies { batches, open: Vec::new() });
                self.gpus.len() - 1
            }
        };
        Ok(&mut self.gpus[index])
    }

    /// Makes room for copies of the processor: a role of a connection copies [`MAX_COPIED`] bytes, and at most one slot
    /// more, in one poll.
    pub(crate) fn make_room(&mut self) {
        self.copied = 0;
    }

    /// Takes room for copies of the processor of `len` bytes together. Returns whether there is any.
    pub(crate) fn take_room(&mut self, len: u64) -> bool {
        let has_room = self.copied < MAX_COPIED;
        self.copied += if has_room { len } else { 0 };
        self.has_refused |= !has_room;
        has_room
    }

    /// Whether a copy of the processor has found no room since the last call. The caller then polls again at once.
    pub(crate) fn take_refused(&mut self) -> bool {
        std::mem::take(&mut self.has_refused)
    }

    /// Launches the GPU copies that have begun, as far as the GPUs have room, and notices those that have completed.
    pub(crate) fn launch(&mut self) {
        for gpu in &mut self.gpus {
            gpu.advance(&mut self.completed);
        }
    }

    /// Takes one completed copy: its tag and its result. [`launch`](Self::launch) finds those of GPUs.
    pub(crate) fn take_completed(&mut self) -> Option<(CopyTag, Result<(), ErrorKind>)> {
        self.completed.pop_front()
    }

    /// Whether there are copies that [`take_completed`](Self::take_completed) has not returned.
    pub(crate) fn is_busy(&self) -> bool {
        let is_busy = |gpu: &GpuCopies| !gpu.open.is_empty() || gpu.batches.tags().next().is_some();
        !self.completed.is_empty() || self.gpus.iter().any(is_busy)
    }
}

impl GpuCopies {
    fn advance(&mut self, completed: &mut VecDeque<(CopyTag, Result<(), ErrorKind>)>) {
        if !self.open.is_empty() && self.batches.copier().can_launch() {
            // `take_completed` reports a launch that failed, too.
            let _ = self.batches.launch(std::mem::take(&mut self.open));
        }
        while let Some((tags, result)) = self.batches.take_completed() {
            completed.extend(tags.into_iter().map(|tag| (tag, result)));
        }
    }
}
