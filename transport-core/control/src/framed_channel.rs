//! A channel in use: frames in both directions at once.

use std::time::Duration;

use tokio::time::timeout;

use crate::bootstrap::{Channel, RecvHalf};
use crate::frame::Frame;
use crate::send_queue::SendQueue;
use multirail_spi::Result;

/// How long a side that ends the conversation tries to say so.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_millis(200);

/// Sends and receives frames; receiving also moves what is to be sent.
pub(crate) struct FramedChannel {
    send_queue: SendQueue,
    receiver: Box<dyn RecvHalf>,
}

impl FramedChannel {
    pub fn new(channel: Channel) -> Self {
        let (sender, receiver) = channel.split();
        Self { send_queue: SendQueue::new(sender), receiver }
    }

    /// Queues a frame; an error if it is larger than the peer takes.
    pub fn push(&mut self, frame: &Frame) -> Result<()> {
        self.send_queue.push(frame.encode()?);
        Ok(())
    }

    /// Queues a frame that is encoded already.
    pub fn push_bytes(&mut self, frame: Vec<u8>) {
        self.send_queue.push(frame);
    }

    /// The next frame as bytes. Cancel-safe.
    pub async fn recv_bytes(&mut self) -> Result<Vec<u8>> {
        // Receiving first: a connection that takes nothing more may still hold the reason.
        tokio::select! {
            biased;
            frame = self.receiver.recv() => frame,
            () = self.send_queue.progress() => unreachable!("progress never ends"),
        }
    }

    /// The next frame. Cancel-safe.
    pub async fn recv(&mut self) -> Result<Frame> {
        Frame::decode(&self.recv_bytes().await?)
    }

    /// Holds the peer to frames of at most `bytes`.
    pub fn limit(&mut self, bytes: usize) {
        self.receiver.limit(bytes);
    }

    /// What is on its way out.
    pub fn send_queue(&self) -> &SendQueue {
        &self.send_queue
    }

    /// Hands what is queued to the network, for at most `limit`.
    pub async fn flush(&mut self, limit: Duration) {
        let _ = timeout(limit, self.send_queue.flush()).await;
    }

    /// Ends the connection so that the peer can read what was said last.
    pub async fn close(mut self) {
        self.flush(CLOSE_LIMIT).await;
        drop(self.send_queue);
        // A socket closed with unread bytes is reset, and a reset may overtake the
        // final_frame: read until the peer ends its side too.
        let _ = timeout(CLOSE_LIMIT, async { while self.receiver.recv().await.is_ok() {} }).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{duplex, split};

    use super::*;
    use crate::framing::{StreamReceiver, StreamSender};

    fn wires(room: usize) -> (FramedChannel, FramedChannel) {
        let (a, b) = duplex(room);
        let wire = |stream| {
            let (read, write) = split(stream);
            FramedChannel::new(Channel::new("memory", StreamSender::new(write), StreamReceiver::new(read)))
        };
        (wire(a), wire(b))
    }

    #[tokio::test]
    async fn both_may_speak_at_length_at_once() {
        let (mut a, mut b) = wires(64);
        let long = Frame::Found { id: 1, descriptor: Some(vec![7; 100 << 10]) };
        for wire in [&mut a, &mut b] {
            wire.push(&long).unwrap();
            wire.push(&Frame::Ready).unwrap();
        }
        let read = async |wire: &mut FramedChannel| (wire.recv().await.unwrap(), wire.recv().await.unwrap());
        // Cancelled again and again, by a timer in place of the session's other branches.
        let mut got = Vec::new();
        let patient = async {
            while got.len() < 2 {
                if let Ok(frame) = timeout(Duration::from_micros(50), a.recv()).await {
                    got.push(frame.unwrap());
                }
            }
            a.flush(CLOSE_LIMIT).await;
        };
        let (other, ()) = tokio::join!(read(&mut b), patient);
        assert_eq!(other, (long.clone(), Frame::Ready));
        assert_eq!(got, [long, Frame::Ready]);
    }

    #[tokio::test]
    async fn a_farewell_is_read_before_the_end() {
        let (mut a, mut b) = wires(1 << 10);
        b.push(&Frame::Ready).unwrap();
        a.push(&Frame::Goodbye).unwrap();
        let ((), told) = tokio::join!(a.close(), async {
            let told = b.recv().await.unwrap();
            let end = b.recv().await.unwrap_err();
            b.close().await;
            (told, end.kind())
        });
        assert_eq!(told, (Frame::Goodbye, multirail_spi::ErrorKind::PeerDied));
    }
}
