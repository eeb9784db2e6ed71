//! A queue of outgoing frames. The frames are sent one after another while the task does other work.

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::pin::Pin;

use crate::bootstrap::SendHalf;
use multirail_spi::Result;

/// A send in progress. The future owns the sending half and returns it.
type Sending = Pin<Box<dyn Future<Output = (Box<dyn SendHalf>, Result<()>)> + Send>>;

/// A queue of frames in front of a sending half.
///
/// The queue owns the send in progress, so a caller that waits for it may cancel its wait.
pub(crate) struct FrameQueue {
    idle: Option<Box<dyn SendHalf>>,
    sending: Option<Sending>,
    queue: VecDeque<Vec<u8>>,
    queued_bytes: usize,
    sent: u64,
}

impl FrameQueue {
    pub fn new(half: Box<dyn SendHalf>) -> Self {
        Self { idle: Some(half), sending: None, queue: VecDeque::new(), queued_bytes: 0, sent: 0 }
    }

    /// Queues a frame. [`FrameQueue::progress`] sends it.
    pub fn push(&mut self, frame: Vec<u8>) {
        // If neither the half nor a send is left, the connection is broken. The receiving half reports that.
        if self.idle.is_some() || self.sending.is_some() {
            self.queued_bytes += frame.len();
            self.queue.push_back(frame);
            self.start();
        }
    }

    /// Sends until the queue is empty, then never returns. Cancel-safe.
    pub async fn progress(&mut self) {
        while !self.is_empty() {
            self.step().await;
        }
        pending().await
    }

    /// Sends until the queue is empty. Cancel-safe.
    pub async fn flush(&mut self) {
        while !self.is_empty() {
            self.step().await;
        }
    }

    /// Whether the network has taken all frames.
    pub fn is_empty(&self) -> bool {
        self.sending.is_none()
    }

    /// Bytes of the frames that wait behind the send in progress.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Number of frames that the network has taken so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    async fn step(&mut self) {
        let Some(sending) = &mut self.sending else { return };
        let (half, result) = sending.as_mut().await;
        self.sending = None;
        if let Err(error) = result {
            tracing::debug!(%error, "the control connection accepts no more frames");
            self.queue.clear();
            self.queued_bytes = 0;
            return;
        }
        self.sent += 1;
        self.idle = Some(half);
        self.start();
    }

    fn start(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let Some(mut half) = self.idle.take() else { return };
        let Some(frame) = self.queue.pop_front() else { return };
        self.queued_bytes -= frame.len();
        self.sending = Some(Box::pin(async move {
            let result = half.send(&frame).await;
            (half, result)
        }));
    }
}
