//! Sends and receives frames on a channel, in both directions at once.

use std::time::Duration;

use tokio::time::timeout;

use crate::bootstrap::{Channel, RecvHalf};
use crate::frame::Frame;
use crate::frame_queue::FrameQueue;
use multirail_spi::Result;

/// How long a side that closes the connection tries to send its final frame, and then waits for the peer to close.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_millis(200);

/// A channel that sends and receives frames. A call that receives also sends queued frames meanwhile.
pub(crate) struct FramedChannel {
    frame_queue: FrameQueue,
    receiver: Box<dyn RecvHalf>,
}

impl FramedChannel {
    pub fn new(channel: Channel) -> Self {
        let (sender, receiver) = channel.split();
        Self { frame_queue: FrameQueue::new(sender), receiver }
    }

    /// Queues a frame. Returns an error if the frame is larger than the peer accepts.
    pub fn push(&mut self, frame: &Frame) -> Result<()> {
        self.frame_queue.push(frame.encode()?);
        Ok(())
    }

    /// Queues a frame that is encoded already.
    pub fn push_bytes(&mut self, frame: Vec<u8>) {
        self.frame_queue.push(frame);
    }

    /// Receives the next frame as bytes. Cancel-safe.
    pub async fn recv_bytes(&mut self) -> Result<Vec<u8>> {
        // Receiving is polled first: a connection that accepts no more frames may still hold the peer's close reason.
        tokio::select! {
            biased;
            frame = self.receiver.recv() => frame,
            () = self.frame_queue.progress() => unreachable!("progress never ends"),
        }
    }

    /// Receives the next frame. Cancel-safe.
    pub async fn recv(&mut self) -> Result<Frame> {
        Frame::decode(&self.recv_bytes().await?)
    }

    /// Limits the peer's frames to at most `bytes` bytes.
    pub fn set_frame_limit(&mut self, bytes: usize) {
        self.receiver.limit(bytes);
    }

    /// The queue of outgoing frames.
    pub fn frame_queue(&self) -> &FrameQueue {
        &self.frame_queue
    }

    /// Sends the queued frames, for at most `limit`.
    pub async fn flush(&mut self, limit: Duration) {
        let _ = timeout(limit, self.frame_queue.flush()).await;
    }

    /// Closes the connection in such a way that the peer can read the final frame.
    pub async fn close(mut self) {
        self.flush(CLOSE_LIMIT).await;
        drop(self.frame_queue);
        // Closing a socket with unread bytes resets the connection, and the reset may overtake the
        // final frame. Therefore this side reads until the peer closes its side too.
        let _ = timeout(CLOSE_LIMIT, async { while self.receiver.recv().await.is_ok() {} }).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{duplex, split};

    use super::*;
    use crate::framing::{StreamReceiver, StreamSender};

    fn connected(buffer: usize) -> (FramedChannel, FramedChannel) {
        let (a, b) = duplex(buffer);
        let framed = |stream| {
            let (read, write) = split(stream);
            FramedChannel::new(Channel::new("memory", StreamSender::new(write), StreamReceiver::new(read)))
        };
        (framed(a), framed(b))
    }

    #[tokio::test]
    async fn both_sides_may_send_large_frames_at_once() {
        let (mut a, mut b) = connected(64);
        let long = Frame::Found { id: 1, descriptor: Some(vec![7; 100 << 10]) };
        for channel in [&mut a, &mut b] {
            channel.push(&long).unwrap();
            channel.push(&Frame::Ready).unwrap();
        }
        let read = async |channel: &mut FramedChannel| {
            (channel.recv().await.unwrap(), channel.recv().await.unwrap())
        };
        // A timer cancels every receive, in place of the other branches of a session.
        let mut got = Vec::new();
        let patient = async {
            while got.len() < 2 {
                if let Ok(frame) = timeout(Duration::from_micros(50), a.recv()).await {
                    got.push(frame.unwrap());
                }
            }
            a.flush(limit::HANG).await;
        };
        let (other, ()) = tokio::join!(read(&mut b), patient);
        assert_eq!(other, (long.clone(), Frame::Ready));
        assert_eq!(got, [long, Frame::Ready]);
    }

    #[tokio::test]
    async fn the_final_frame_is_read_before_the_close() {
        let (mut a, mut b) = connected(1 << 10);
        b.push(&Frame::Ready).unwrap();
        a.push(&Frame::Goodbye).unwrap();
        let ((), received) = tokio::join!(a.close(), async {
            let frame = b.recv().await.unwrap();
            let end = b.recv().await.unwrap_err();
            b.close().await;
            (frame, end.kind())
        });
        assert_eq!(received, (Frame::Goodbye, multirail_spi::ErrorKind::PeerDied));
    }
}
