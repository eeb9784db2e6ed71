//! The traits through which two fabrics connect. Users implement them to replace TCP.

use std::future::{Future, ready};
use std::pin::Pin;

use async_trait::async_trait;

use multirail_spi::Result;

/// The longest frame that a channel must carry, and may accept: 1 MiB.
///
/// The offers of 64 transports with all their rails stay well below this limit. A sender
/// that announces a longer frame is not a multirail fabric.
pub const MAX_FRAME: usize = 1 << 20;

/// Finds peers and opens channels to them.
///
/// The fabric calls a bootstrap from its control thread, inside that thread's tokio runtime, or from the runtime of
/// `FabricBuilder::control_on`. An implementation must not block that thread.
/// [`TcpBootstrap`](crate::TcpBootstrap) is the default. A bootstrap need not authenticate peers: a
/// [`Token`](crate::Token) authenticates them above it, on any channel.
#[async_trait]
pub trait Bootstrap: Send + Sync {
    /// Starts to accept channels at `address`. The bootstrap defines the format of addresses.
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>>;

    /// Opens a channel to the fabric that listens at `address`.
    ///
    /// Dropping the future cancels the attempt. The message of an error says what to check.
    async fn connect(&self, address: &str) -> Result<Channel>;
}

/// Accepts incoming channels until it is dropped.
#[async_trait]
pub trait Acceptor: Send {
    /// The address that a peer connects to. If the system chose a port, the address contains it.
    fn local_address(&self) -> String;

    /// Waits for the next client. Cancel-safe. An error of kind `Closed` ends the
    /// listener. After any other error the listener waits 100 ms and calls `accept` again.
    ///
    /// An implementation waits only until the client has connected, and reads nothing from it.
    /// A handshake of the channel itself, such as TLS, belongs in the [`Incoming`]: otherwise a
    /// silent client would block all others. Without such a handshake, return `Ok(channel.into())`.
    async fn accept(&mut self) -> Result<Incoming>;
}

/// A client that has connected. Its channel may still need a handshake of its own, such as TLS.
pub struct Incoming {
    peer_address: String,
    opening: Pin<Box<dyn Future<Output = Result<Channel>> + Send>>,
}

impl Incoming {
    /// A client whose channel is the output of `opening`. The listener awaits the futures of all
    /// clients concurrently, each within the handshake limit. It drops the oldest future when
    /// too many clients wait.
    pub fn new(
        peer_address: impl Into<String>,
        opening: impl Future<Output = Result<Channel>> + Send + 'static,
    ) -> Self {
        Self { peer_address: peer_address.into(), opening: Box::pin(opening) }
    }

    /// The client's address, for messages.
    pub fn peer_address(&self) -> &str {
        &self.peer_address
    }

    /// Waits until the channel is open and returns it.
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
    /// The caller starts a call only after the previous call has returned. After the caller has
    /// dropped an unfinished call, it makes no further call. Dropping the half tells the peer that
    /// no more frames follow.
    async fn send(&mut self, frame: &[u8]) -> Result<()>;
}

/// The receiving half of a channel.
#[async_trait]
pub trait RecvHalf: Send {
    /// Receives the next frame.
    ///
    /// Cancel-safe: dropping the future loses no byte.
    ///
    /// # Errors
    /// `PeerDied` if the connection was closed or reset, `Protocol` for bytes that are no frame.
    /// After an error the half receives nothing more.
    async fn recv(&mut self) -> Result<Vec<u8>>;

    /// Sets the longest frame to accept, in bytes. The half should refuse a longer frame with
    /// `Protocol` as soon as the peer announces it. The limit is small for unauthenticated clients.
    /// The initial limit is [`MAX_FRAME`].
    fn limit(&mut self, bytes: usize) {
        let _ = bytes;
    }
}

/// A reliable, ordered, bidirectional channel for frames, to one peer.
///
/// The channel has two halves so that a side can send and receive at once. A side whose send is
/// blocked must still read, or two such sides would deadlock.
pub struct Channel {
    peer_address: String,
    binding: Vec<u8>,
    sender: Box<dyn SendHalf>,
    receiver: Box<dyn RecvHalf>,
}

impl Channel {
    /// A channel of two halves. `peer_address` appears only in messages.
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

    /// Sets the channel binding: bytes that both ends of this channel know and that no other
    /// channel has, such as keying material exported from TLS. The proof of a token covers the
    /// binding, so an attacker between the two sides cannot relay the proof.
    pub fn bound_to(mut self, binding: impl Into<Vec<u8>>) -> Self {
        self.binding = binding.into();
        self
    }

    /// The channel binding; empty if there is none.
    pub fn binding(&self) -> &[u8] {
        &self.binding
    }

    /// The peer's address, for messages.
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

    /// Splits the channel into its halves, so that both can be used at once.
    pub fn split(self) -> (Box<dyn SendHalf>, Box<dyn RecvHalf>) {
        (self.sender, self.receiver)
    }
}
