//! Frames on their way out, sent one after another while the task does other things.

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::pin::Pin;

use crate::bootstrap::SendHalf;
use multirail_spi::Result;

/// A send under way: it owns the half, and gives it back.
type Sending = Pin<Box<dyn Future<Output = (Box<dyn SendHalf>, Result<()>)> + Send>>;

/// A queue of frames before a sending half.
///
/// The send under way is kept here, not in whoever waits, so waiting may be cancelled.
pub(crate) struct SendQueue {
    idle: Option<Box<dyn SendHalf>>,
    sending: Option<Sending>,
    queue: VecDeque<Vec<u8>>,
    queued_bytes: usize,
    sent: u64,
}

impl SendQueue {
    pub fn new(half: Box<dyn SendHalf>) -> Self {
        Self { idle: Some(half), sending: None, queue: VecDeque::new(), queued_bytes: 0, sent: 0 }
    }

    /// Queues a frame. [`SendQueue::progress`] sends it.
    pub fn push(&mut self, frame: Vec<u8>) {
        // With neither half nor send left, the connection is broken: the reader reports it.
        if self.idle.is_some() || self.sending.is_some() {
            self.queued_bytes += frame.len();
            self.queue.push_back(frame);
            self.start();
        }
    }

    /// Sends until the queue is empty, then waits for ever. Cancel-safe.
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

    /// Whether all frames were handed to the network.
    pub fn is_empty(&self) -> bool {
        self.sending.is_none()
    }

    /// Bytes that wait behind the send under way.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Frames handed to the network so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    async fn step(&mut self) {
        let Some(sending) = &mut self.sending else { return };
        let (half, result) = sending.as_mut().await;
        self.sending = None;
        if let Err(error) = result {
            tracing::debug!(%error, "the control connection takes no more");
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
