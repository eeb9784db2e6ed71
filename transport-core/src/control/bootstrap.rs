//! How two fabrics find each other: the seam at which users plug in their own way.

use async_trait::async_trait;

use crate::Result;

/// The longest frame that a channel must carry, and may accept: 1 MiB.
///
/// The offers of 64 transports with all their rails stay well below it; a peer
/// that announces more is not one of ours.
pub const MAX_FRAME: usize = 1 << 20;

/// Finds peers and opens channels to them.
///
/// All calls come from the fabric's control thread, inside its tokio runtime; an
/// implementation must not block it. [`TcpBootstrap`](crate::TcpBootstrap) is the default.
#[async_trait]
pub trait Bootstrap: Send + Sync {
    /// Starts to take channels at `address`, in whatever form this bootstrap knows.
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>>;

    /// Opens a channel to the fabric that listens at `address`.
    ///
    /// Dropping the future gives up. An error says what to check.
    async fn connect(&self, address: &str) -> Result<Channel>;
}

/// Takes incoming channels until it is dropped.
#[async_trait]
pub trait Acceptor: Send {
    /// The address a peer connects to, with what the system chose filled in.
    fn local_address(&self) -> String;

    /// The next channel. Cancel-safe. An error of kind `Closed` ends the
    /// listener; after any other it is called again a moment later.
    async fn accept(&mut self) -> Result<Channel>;
}

/// The sending half of a channel.
#[async_trait]
pub trait SendHalf: Send {
    /// Sends one frame of at most [`MAX_FRAME`] bytes, whole and in order.
    ///
    /// Called again only after the last call ended; a call that was dropped half
    /// way is the last one. Dropping the half tells the peer that no more comes.
    async fn send(&mut self, frame: &[u8]) -> Result<()>;
}

/// The receiving half of a channel.
#[async_trait]
pub trait RecvHalf: Send {
    /// The next frame.
    ///
    /// Cancel-safe: dropping the future loses no byte. Errors are final: `PeerDied`
    /// for an end or a reset of the connection, `Protocol` for bytes that are no frame.
    async fn recv(&mut self) -> Result<Vec<u8>>;
}

/// A reliable, ordered way to exchange frames with one peer.
///
/// The two halves are apart because both are busy at once: a side that is stuck
/// sending must still read, or two of them would wait for each other.
pub struct Channel {
    peer_address: String,
    sender: Box<dyn SendHalf>,
    receiver: Box<dyn RecvHalf>,
}

impl Channel {
    /// A channel of two halves; `peer_address` is for people to read.
    pub fn new(
        peer_address: impl Into<String>,
        sender: impl SendHalf + 'static,
        receiver: impl RecvHalf + 'static,
    ) -> Self {
        Self { peer_address: peer_address.into(), sender: Box::new(sender), receiver: Box::new(receiver) }
    }

    /// Who is at the other end, for messages.
    pub fn peer_address(&self) -> &str {
        &self.peer_address
    }

    /// Sends one frame; see [`SendHalf::send`].
    pub async fn send(&mut self, frame: &[u8]) -> Result<()> {
        self.sender.send(frame).await
    }

    /// Receives one frame; see [`RecvHalf::recv`].
    pub async fn recv(&mut self) -> Result<Vec<u8>> {
        self.receiver.recv().await
    }

    /// The two halves, to be used at once.
    pub fn split(self) -> (Box<dyn SendHalf>, Box<dyn RecvHalf>) {
        (self.sender, self.receiver)
    }
}
