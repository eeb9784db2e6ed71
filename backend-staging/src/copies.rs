//! Copies between slots and regions: the processor's are done at once, GPUs' are on their way for a while.

use std::collections::VecDeque;

use cuda::{Device, Mover, Reach};
use multirail_spi::{
    ErrorKind, Result,
    copy::{self, CopyStrategy},
};

use crate::region::Place;
use crate::ring::Ring;

/// Processors of a GPU that a copy takes at once: loopback's default.
const BLOCKS: u32 = 32;

/// Copies, each with a name by which its end is told.
pub(crate) struct Copies<T> {
    gpus: Vec<Gpu<T>>,
    ended: VecDeque<(T, Result<(), ErrorKind>)>,
}

struct Gpu<T> {
    /// Dropped first: it waits for what is on its way.
    mover: Mover,
    open: Vec<T>,
    flying: VecDeque<Batch<T>>,
}

struct Batch<T> {
    names: Vec<T>,
    /// Why it was not launched.
    refused: Option<ErrorKind>,
}

impl<T> Copies<T> {
    pub(crate) fn new() -> Self {
        Self { gpus: Vec::new(), ended: VecDeque::new() }
    }

    /// Copies `len` bytes between memory at `place` and `ring`'s, or other memory of the host's without one. `false`
    /// where there is no room now: then it has not begun.
    ///
    /// # Safety
    /// Both ranges are valid until the copy has ended, and nobody holds references into them.
    pub(crate) unsafe fn begin(
        &mut self,
        place: Place,
        ring: Option<&Ring>,
        (to, from, len): (*mut u8, *const u8, u64),
        name: T,
    ) -> bool
    where
        T: Copy,
    {
        let Place::Gpu(ordinal, reach) = place else {
            // SAFETY: by the caller.
            unsafe { copy::copy(CopyStrategy::Plain, to, from, len as usize) };
            self.ended.push_back((name, Ok(())));
            return true;
        };
        let gpu = match self.gpu(ordinal) {
            Ok(gpu) => gpu,
            Err(why) => {
                tracing::error!(%why, gpu = ordinal, "staging: a GPU cannot copy");
                self.ended.push_back((name, Err(why.kind())));
                return true;
            }
        };
        if gpu.mover.room() == 0 {
            return false;
        }
        let slots = ring.map_or(Reach::Driver, |ring| ring.reach(gpu.mover.device()));
        let reach = if slots == Reach::Kernel { reach } else { Reach::Driver };
        gpu.mover.divide();
        // SAFETY: by the caller; `reach` is the lesser of both ends'.
        unsafe { gpu.mover.add(std::iter::once((to as u64, from as u64, len)), reach) };
        gpu.open.push(name);
        true
    }

    fn gpu(&mut self, ordinal: u32) -> Result<&mut Gpu<T>> {
        let known = self.gpus.iter().position(|gpu| gpu.mover.device().ordinal() == ordinal);
        let at = match known {
            Some(at) => at,
            None => {
                let mover = Mover::new(&Device::open(ordinal)?, BLOCKS)?;
                self.gpus.push(Gpu { mover, open: Vec::new(), flying: VecDeque::new() });
                self.gpus.len() - 1
            }
        };
        Ok(&mut self.gpus[at])
    }

    /// Launches what was begun, as far as it may be, and sees what has landed.
    pub(crate) fn launch(&mut self) {
        for gpu in &mut self.gpus {
            gpu.advance(&mut self.ended);
        }
    }

    /// Launches what was begun, and gives one copy that has ended.
    pub(crate) fn ended(&mut self) -> Option<(T, Result<(), ErrorKind>)> {
        self.launch();
        self.ended.pop_front()
    }

    /// Whether there are any that were not told of.
    pub(crate) fn is_busy(&self) -> bool {
        !self.ended.is_empty() || self.gpus.iter().any(|gpu| !gpu.open.is_empty() || !gpu.flying.is_empty())
    }
}

impl<T> Gpu<T> {
    fn advance(&mut self, ended: &mut VecDeque<(T, Result<(), ErrorKind>)>) {
        if !self.open.is_empty() && self.mover.may_launch() {
            let launched = self.mover.launch().map_err(|why| self.told(&why));
            self.flying.push_back(Batch { names: std::mem::take(&mut self.open), refused: launched.err() });
        }
        while let Some(batch) = self.flying.front() {
            let outcome = match batch.refused {
                Some(kind) => Err(kind),
                None => match self.mover.landed() {
                    None => return,
                    Some(landed) => landed.map_err(|why| self.told(&why)),
                },
            };
            let names = self.flying.pop_front().map_or(Vec::new(), |batch| batch.names);
            ended.extend(names.into_iter().map(|name| (name, outcome)));
        }
    }

    #[cold]
    fn told(&self, why: &multirail_spi::Error) -> ErrorKind {
        tracing::error!(%why, gpu = self.mover.device().ordinal(), "staging: a GPU's copies failed");
        why.kind()
    }
}
