//! Batches of copies on one GPU, with what completes with each of them.

use std::collections::VecDeque;

use multirail_spi::{Error, ErrorKind, Result};

use crate::{BatchCopier, Device, Reach};

/// A [`BatchCopier`] that keeps a tag with each launched batch. The tag says what completes with the batch. One thread
/// drives the queue.
pub struct CopyQueue<T> {
    /// Dropped first: its destructor waits for all copies that are under way. A tag may keep the memory allocated that
    /// its batch uses.
    copier: BatchCopier,
    /// The launched batches that the caller has not taken, the oldest first.
    launched: VecDeque<TaggedBatch<T>>,
}

struct TaggedBatch<T> {
    tag: T,
    /// The error, if the batch could not be launched: the copier knows nothing of the batch then.
    launch_error: Option<ErrorKind>,
}

impl<T> CopyQueue<T> {
    /// A queue on `device` whose kernels have `blocks` blocks together, as [`BatchCopier::new`].
    ///
    /// # Errors
    /// As [`BatchCopier::new`].
    pub fn new(device: &Device, blocks: u32) -> Result<Self> {
        Ok(Self { copier: BatchCopier::new(device, blocks)?, launched: VecDeque::new() })
    }

    /// The copier, which has the open batch.
    #[inline]
    pub fn copier(&self) -> &BatchCopier {
        &self.copier
    }

    /// Adds pieces to the open batch, as [`BatchCopier::add`].
    ///
    /// # Safety
    /// As [`BatchCopier::add`].
    #[inline]
    pub unsafe fn add(&mut self, pieces: impl Iterator<Item = (u64, u64, u64)>, reach: Reach) {
        // SAFETY: by the caller.
        unsafe { self.copier.add(pieces, reach) };
    }

    /// Keeps later pieces from being joined to the last one, as [`BatchCopier::end_piece`].
    pub fn end_piece(&mut self) {
        self.copier.end_piece();
    }

    /// Launches the open batch, which has at least one piece. The caller has checked [`BatchCopier::can_launch`].
    ///
    /// # Errors
    /// The kind of the driver's error. The batch is in the queue nevertheless: [`take_completed`](Self::take_completed)
    /// returns its tag and the same error, after the batches that were launched before.
    pub fn launch(&mut self, tag: T) -> Result<(), ErrorKind> {
        let launched = self.copier.launch().map_err(|why| self.log(&why));
        self.launched.push_back(TaggedBatch { tag, launch_error: launched.err() });
        launched
    }

    /// Takes the tag and the result of the oldest launched batch, if that batch has completed.
    #[inline]
    pub fn take_completed(&mut self) -> Option<(T, Result<(), ErrorKind>)> {
        let result = match self.launched.front()?.launch_error {
            Some(kind) => Err(kind),
            None => self.copier.take_completed()?.map_err(|why| self.log(&why)),
        };
        self.launched.pop_front().map(|batch| (batch.tag, result))
    }

    /// The tags of the launched batches that have not been taken.
    pub fn tags(&self) -> impl Iterator<Item = &T> {
        self.launched.iter().map(|batch| &batch.tag)
    }

    /// The same tags, to be changed.
    pub fn tags_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.launched.iter_mut().map(|batch| &mut batch.tag)
    }

    #[cold]
    fn log(&self, why: &Error) -> ErrorKind {
        tracing::error!(%why, gpu = self.copier.device().ordinal(), "the copies of a GPU failed");
        why.kind()
    }
}
