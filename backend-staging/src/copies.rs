//! Copies between slots and regions. The processor's copies complete at once; GPU copies complete later.

use std::collections::VecDeque;

use cuda::{BatchCopier, Device, Reach};
use multirail_spi::{
    Error, ErrorKind, Memory, MemoryKind, Result,
    copy::{self, CopyStrategy},
};

use crate::staging_buffer::StagingBuffer;

/// The most multiprocessors of a GPU that a copy uses: loopback's default.
const BLOCKS: u32 = 32;

/// Where memory lies, and so what copies it.
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

/// The copies of an endpoint. The caller marks each copy with a tag, and gets the tag back when the copy has completed.
pub(crate) struct Copies<T> {
    gpus: Vec<GpuCopies<T>>,
    completed: VecDeque<(T, Result<(), ErrorKind>)>,
}

/// The copies of one GPU.
struct GpuCopies<T> {
    /// Dropped first: its destructor waits for all copies that are under way.
    copier: BatchCopier,
    /// The tags of copies that are not launched yet.
    open: Vec<T>,
    /// The launched batches, the oldest first.
    in_flight: VecDeque<Batch<T>>,
}

struct Batch<T> {
    tags: Vec<T>,
    /// The error, if the batch could not be launched.
    launch_error: Option<ErrorKind>,
}

impl<T> Copies<T> {
    pub(crate) fn new() -> Self {
        Self { gpus: Vec::new(), completed: VecDeque::new() }
    }

    /// Begins a copy of `len` bytes. The memory at one end lies at `location`; the other end is in `buffer`, or in
    /// plain host memory if `buffer` is `None`. Returns false if there is no room for the copy now: it has not begun
    /// then.
    ///
    /// # Safety
    /// Both ranges are valid until the copy has completed, and there are no references into them.
    pub(crate) unsafe fn begin(
        &mut self,
        location: MemoryLocation,
        buffer: Option<&StagingBuffer>,
        (to, from, len): (*mut u8, *const u8, u64),
        tag: T,
    ) -> bool
    where
        T: Copy,
    {
        let MemoryLocation::Gpu(ordinal, reach) = location else {
            // SAFETY: by the caller.
            unsafe { copy::copy(CopyStrategy::Plain, to, from, len as usize) };
            self.completed.push_back((tag, Ok(())));
            return true;
        };
        let gpu = match self.gpu(ordinal) {
            Ok(gpu) => gpu,
            Err(why) => {
                tracing::error!(%why, gpu = ordinal, "staging: a GPU cannot copy");
                self.completed.push_back((tag, Err(why.kind())));
                return true;
            }
        };
        if gpu.copier.room() == 0 {
            return false;
        }
        let host_reach = buffer.map_or(Reach::Driver, |buffer| buffer.reach(gpu.copier.device()));
        let reach = if host_reach == Reach::Kernel { reach } else { Reach::Driver };
        gpu.copier.end_piece();
        // SAFETY: by the caller; `reach` is `Kernel` only if the kernel reaches both ends.
        unsafe { gpu.copier.add(std::iter::once((to as u64, from as u64, len)), reach) };
        gpu.open.push(tag);
        true
    }

    /// The copies of a GPU, which is opened at its first copy.
    fn gpu(&mut self, ordinal: u32) -> Result<&mut GpuCopies<T>> {
        let known = self.gpus.iter().position(|gpu| gpu.copier.device().ordinal() == ordinal);
        let index = match known {
            Some(index) => index,
            None => {
                let copier = BatchCopier::new(&Device::open(ordinal)?, BLOCKS)?;
                self.gpus.push(GpuCopies { copier, open: Vec::new(), in_flight: VecDeque::new() });
                self.gpus.len() - 1
            }
        };
        Ok(&mut self.gpus[index])
    }

    /// Launches the GPU copies that have begun, as far as the GPUs have room, and notices those that have completed.
    pub(crate) fn launch(&mut self) {
        for gpu in &mut self.gpus {
            gpu.advance(&mut self.completed);
        }
    }

    /// Launches as [`launch`](Self::launch), and takes one completed copy: its tag and its result.
    pub(crate) fn take_completed(&mut self) -> Option<(T, Result<(), ErrorKind>)> {
        self.launch();
        self.completed.pop_front()
    }

    /// Whether there are copies that [`take_completed`](Self::take_completed) has not returned.
    pub(crate) fn is_busy(&self) -> bool {
        !self.completed.is_empty()
            || self.gpus.iter().any(|gpu| !gpu.open.is_empty() || !gpu.in_flight.is_empty())
    }
}

impl<T> GpuCopies<T> {
    fn advance(&mut self, completed: &mut VecDeque<(T, Result<(), ErrorKind>)>) {
        if !self.open.is_empty() && self.copier.can_launch() {
            let launched = self.copier.launch().map_err(|why| self.log(&why));
            let batch = Batch { tags: std::mem::take(&mut self.open), launch_error: launched.err() };
            self.in_flight.push_back(batch);
        }
        while let Some(batch) = self.in_flight.front() {
            let result = match batch.launch_error {
                Some(kind) => Err(kind),
                None => match self.copier.take_completed() {
                    None => return,
                    Some(landed) => landed.map_err(|why| self.log(&why)),
                },
            };
            let tags = self.in_flight.pop_front().map_or(Vec::new(), |batch| batch.tags);
            completed.extend(tags.into_iter().map(|tag| (tag, result)));
        }
    }

    #[cold]
    fn log(&self, why: &Error) -> ErrorKind {
        tracing::error!(%why, gpu = self.copier.device().ordinal(), "staging: the copies of a GPU failed");
        why.kind()
    }
}
