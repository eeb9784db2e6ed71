//! How two fabrics find each other: the seam at which users plug in their own way.

use std::future::{Future, ready};
use std::pin::Pin;

use async_trait::async_trait;

use multirail_spi::Result;

/// The longest frame that a channel must carry, and may accept: 1 MiB.
///
/// The offers of 64 transports with all their rails stay well below it; a peer
/// that announces more is not one of ours.
pub const MAX_FRAME: usize = 1 << 20;

/// Finds peers and opens channels to them.
///
/// All calls come from the fabric's control thread, inside its tokio runtime, or from that of
/// `FabricBuilder::control_on`; an implementation must not block it. [`TcpBootstrap`](crate::TcpBootstrap) is the
/// default. A bootstrap need not authenticate anyone: a [`Token`](crate::Token) does
/// that above it, on any channel.
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

    /// The next client. Cancel-safe. An error of kind `Closed` ends the
    /// listener; after any other it is called again a moment later.
    ///
    /// This waits for the client to arrive and for nothing it says: a handshake of
    /// the channel itself, such as TLS, belongs into the [`Incoming`], or a silent
    /// client would keep all others out. Without one, return `Ok(channel.into())`.
    async fn accept(&mut self) -> Result<Incoming>;
}

/// A client that has arrived; its channel may take a handshake yet.
pub struct Incoming {
    peer_address: String,
    opening: Pin<Box<dyn Future<Output = Result<Channel>> + Send>>,
}

impl Incoming {
    /// A client whose channel `opening` gives. That future is awaited beside those of
    /// other clients, within the handshake limit, and dropped when room is needed.
    pub fn new(
        peer_address: impl Into<String>,
        opening: impl Future<Output = Result<Channel>> + Send + 'static,
    ) -> Self {
        Self { peer_address: peer_address.into(), opening: Box::pin(opening) }
    }

    /// Who has arrived, for messages.
    pub fn peer_address(&self) -> &str {
        &self.peer_address
    }

    /// The channel, once it is open.
    pub async fn open(self) -> Result<Channel> {
        self.opening.await
    }
}

impl From<Channel> for Incoming {
    fn from(channel: Channel) -> Self {
        Self::new(channel.peer_address.clone(), ready(Ok(channel)))
    }
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

    /// From now on frames of more than `bytes` should be refused as `Protocol`, when
    /// they are announced: strangers are held to little. At first it is [`MAX_FRAME`].
    fn limit(&mut self, bytes: usize) {
        let _ = bytes;
    }
}

/// A reliable, ordered way to exchange frames with one peer.
///
/// The two halves are apart because both are busy at once: a side that is stuck
/// sending must still read, or two of them would wait for each other.
pub struct Channel {
    peer_address: String,
    binding: Vec<u8>,
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
        Self {
            peer_address: peer_address.into(),
            binding: Vec::new(),
            sender: Box::new(sender),
            receiver: Box::new(receiver),
        }
    }

    /// Bytes that both ends of this channel know and that no other channel has, such
    /// as keying material exported from TLS. The proof of a token covers them, so
    /// that nobody between the two can pass it on.
    pub fn bound_to(mut self, binding: impl Into<Vec<u8>>) -> Self {
        self.binding = binding.into();
        self
    }

    /// What it is bound to; empty if to nothing.
    pub fn binding(&self) -> &[u8] {
        &self.binding
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
