//! Frames on a byte stream. Each frame follows its length, four bytes in little-endian order.

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::bootstrap::{MAX_FRAME, RecvHalf, SendHalf};
use multirail_spi::{Error, ErrorKind, Result};

/// The room for a read: as much as is buffered, between these bounds. Most frames, and all of a silent peer's, fit into
/// the smallest. A process may have thousands of peers.
const ROOM: usize = 256;
const MAX_ROOM: usize = 8 << 10;
const PREFIX: usize = size_of::<u32>();

/// Converts an error of the stream to ours.
pub(crate) type DescribeError = fn(std::io::Error) -> Error;

/// Writes frames to a byte stream.
pub(crate) struct StreamSender<W>(W);

impl<W> StreamSender<W> {
    pub fn new(stream: W) -> Self {
        Self(stream)
    }

    /// Returns the stream.
    #[cfg(feature = "tls")]
    pub fn into_inner(self) -> W {
        self.0
    }
}

#[async_trait]
impl<W: AsyncWrite + Send + Unpin> SendHalf for StreamSender<W> {
    async fn send(&mut self, frame: &[u8]) -> Result<()> {
        let length =
            u32::try_from(frame.len()).ok().filter(|_| frame.len() <= MAX_FRAME).ok_or_else(|| {
                let why = format!("the frame has {} bytes; the limit is {MAX_FRAME}", frame.len());
                Error::new(ErrorKind::TooLarge, "send a control frame", why)
            })?;
        // One write sends length and frame, so that a small frame is one packet although TCP_NODELAY is set.
        let mut bytes = Vec::with_capacity(PREFIX + frame.len());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(frame);
        self.0.write_all(&bytes).await.map_err(connection_lost)?;
        self.0.flush().await.map_err(connection_lost)
    }
}

/// Reads frames from a byte stream. It keeps the bytes of a partly read frame between calls.
pub struct StreamReceiver<R> {
    stream: R,
    /// Bytes that were read and not returned yet. The buffer grows with the bytes that arrive, not with the announced
    /// length.
    buffered: Vec<u8>,
    limit: usize,
    describe: DescribeError,
}

impl<R> StreamReceiver<R> {
    /// Reads from `stream`, and accepts frames of at most [`MAX_FRAME`] bytes.
    pub fn new(stream: R) -> Self {
        Self { stream, buffered: Vec::new(), limit: MAX_FRAME, describe: connection_lost }
    }

    /// Converts errors of the stream with `describe`.
    #[cfg(feature = "tls")]
    pub(crate) fn with_describe_error(mut self, describe: DescribeError) -> Self {
        self.describe = describe;
        self
    }

    /// Takes the first whole frame out of the buffer; `None` if no frame is complete.
    fn take_frame(&mut self) -> Result<Option<Vec<u8>>> {
        let Some((prefix, rest)) = self.buffered.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > self.limit {
            let why = match prefix {
                // These bytes begin a TLS record: type and version (RFC 8446, 5.1).
                [20..=23, 3, 0..=4, _] => "the other side speaks TLS and this side does not: \
                     FabricBuilder::bootstrap with a TlsBootstrap, or --tls-ca"
                    .into(),
                _ => format!(
                    "a frame of {length} bytes was announced, the limit is {}: \
                     check that the other side is a multirail fabric",
                    self.limit
                ),
            };
            return Err(Error::new(ErrorKind::Protocol, "receive a control frame", why));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let frame = rest[..length].to_vec();
        self.buffered.drain(..PREFIX + length);
        if self.buffered.is_empty() && self.buffered.capacity() > 4 * ROOM {
            self.buffered = Vec::new();
        }
        Ok(Some(frame))
    }
}

#[async_trait]
impl<R: AsyncRead + Send + Unpin> RecvHalf for StreamReceiver<R> {
    async fn recv(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Some(frame) = self.take_frame()? {
                return Ok(frame);
            }
            self.buffered.reserve(self.buffered.len().clamp(ROOM, MAX_ROOM));
            // `read_buf` is cancel-safe: its bytes are in the buffer once it returns.
            let count = self.stream.read_buf(&mut self.buffered).await.map_err(self.describe)?;
            if count == 0 {
                return Err((self.describe)(std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    fn limit(&mut self, bytes: usize) {
        self.limit = bytes.min(MAX_FRAME);
    }
}

/// The error for a broken connection: the peer is dead, or it has closed the connection.
pub(crate) fn connection_lost(source: std::io::Error) -> Error {
    let why = "control connection lost: the peer's process, its host or the network is gone";
    Error::new(ErrorKind::PeerDied, "control", why).with_source(source)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::duplex;

    use super::*;

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test)
    }

    #[test]
    fn cancelled_recv_loses_nothing() {
        run(async {
            let (mut remote, local) = duplex(64);
            let mut receiver = StreamReceiver::new(local);
            let mut bytes = Vec::new();
            for frame in [&b"first"[..], b"", b"third"] {
                bytes.extend((frame.len() as u32).to_le_bytes());
                bytes.extend(frame);
            }
            let mut got = Vec::new();
            for byte in bytes {
                remote.write_all(&[byte]).await.unwrap();
                // Every call is cancelled when it would wait.
                while let Ok(frame) = tokio::time::timeout(Duration::ZERO, receiver.recv()).await {
                    got.push(frame.unwrap());
                }
            }
            assert_eq!(got, [&b"first"[..], b"", b"third"]);
        });
    }

    #[test]
    fn large_frames_pass_a_narrow_stream() {
        run(async {
            let (remote, local) = duplex(100);
            let (mut sender, mut receiver) = (StreamSender::new(remote), StreamReceiver::new(local));
            let frame: Vec<u8> = (0..MAX_FRAME).map(|i| i as u8).collect();
            let (sent, got) = tokio::join!(sender.send(&frame), receiver.recv());
            sent.unwrap();
            assert!(got.unwrap() == frame);
        });
    }

    #[test]
    fn a_silent_peer_takes_little_memory() {
        run(async {
            let (remote, local) = duplex(1 << 20);
            let (mut sender, mut receiver) = (StreamSender::new(remote), StreamReceiver::new(local));
            for len in [100, MAX_FRAME / 2, 5, 1500, 0] {
                sender.send(&vec![1; len]).await.unwrap();
                assert_eq!(receiver.recv().await.unwrap().len(), len);
                let waits = tokio::time::timeout(Duration::ZERO, receiver.recv()).await;
                assert!(waits.is_err() && receiver.buffered.capacity() <= 4 * ROOM, "after {len} bytes");
            }
        });
    }

    #[test]
    fn oversized_frames_are_refused_by_both_sides() {
        run(async {
            let (mut remote, local) = duplex(64);
            remote.write_all(&(MAX_FRAME as u32 + 1).to_le_bytes()).await.unwrap();
            let error = StreamReceiver::new(local).recv().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            assert!(error.context().contains("1048577") && error.context().contains("1048576"), "{error}");
            let error = StreamSender::new(remote).send(&vec![0; MAX_FRAME + 1]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TooLarge);
        });
    }

    #[test]
    fn a_lower_limit_is_enforced_and_tls_is_recognized() {
        run(async {
            for (bytes, why) in [([0, 8, 0, 0], "a frame of 2048 bytes"), ([0x15, 3, 3, 0], "speaks TLS")] {
                let (mut remote, local) = duplex(64);
                let mut receiver = StreamReceiver::new(local);
                receiver.limit(1024);
                remote.write_all(&bytes).await.unwrap();
                let error = receiver.recv().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Protocol);
                assert!(error.context().contains(why), "{error}");
            }
        });
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_a_lost_connection() {
        run(async {
            let (mut remote, local) = duplex(64);
            remote.write_all(&[9, 0, 0, 0, 1]).await.unwrap();
            drop(remote);
            let error = StreamReceiver::new(local).recv().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerDied);
        });
    }
}
