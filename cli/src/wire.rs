//! Small messages between two commands: postcard over SEND, with pre-posted receives.

use std::time::Duration;

use multirail::{Access, Fabric, Peer, PeerId, RecvPool, Region, wait};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::until_closed;
use crate::failure::{CommandFailure, CommandResult};

/// The largest message. It is many times larger than a descriptor with many transports.
pub const MESSAGE_BYTES: usize = 16 << 10;

/// The number of posted receives, which is more than the outstanding messages of any protocol.
pub const RECEIVES: usize = 32;

/// The limit for a response that needs no work on the other side.
pub const RESPONSE_LIMIT: Duration = Duration::from_secs(20);

/// Sends messages to one peer.
pub struct MessageSender {
    peer: Peer,
    buffer: Region,
}

impl MessageSender {
    /// A sender to `peer` with its own registered buffer.
    pub fn new(fabric: &Fabric, peer: &Peer) -> CommandResult<Self> {
        Ok(Self { peer: peer.clone(), buffer: fabric.alloc(MESSAGE_BYTES, Access::LOCAL)? })
    }

    /// Sends `message` and waits until the operation has completed.
    pub fn send(&mut self, message: &impl Serialize) -> CommandResult {
        let bytes = encode(message)?;
        self.buffer.copy_in(0, &bytes)?;
        self.peer.send(&self.buffer, 0..bytes.len())?.wait(RESPONSE_LIMIT)?;
        Ok(())
    }
}

/// Receives messages on a fabric that has one peer.
pub struct MessageReceiver {
    peer: Peer,
    pool: RecvPool,
}

impl MessageReceiver {
    /// A receiver of messages from `peer`, with the receives of `pool`.
    pub fn new(pool: RecvPool, peer: &Peer) -> Self {
        Self { peer: peer.clone(), pool }
    }

    /// Waits for the next message for at most `limit`, and decodes it.
    pub fn receive<T: DeserializeOwned>(&mut self, limit: Duration) -> CommandResult<T> {
        decode(&self.next(limit)?.to_vec())
    }

    /// Waits for the next message for at most `limit`.
    pub fn next(&mut self, limit: Duration) -> CommandResult<multirail::Message> {
        match wait(until_closed(&self.peer, self.pool.next()), limit) {
            Ok(message) => Ok(message?),
            Err(_) => Err(CommandFailure::new(format!(
                "the other side is connected but sent no message for {} s; restart it",
                limit.as_secs()
            ))),
        }
    }

    /// The peer whose end ends a wait.
    pub fn peer(&self) -> PeerId {
        self.peer.id()
    }

    /// Goes on with another connection. The receives stay.
    pub fn set_peer(&mut self, peer: &Peer) {
        self.peer = peer.clone();
    }

    /// Replaces the receives. No message may be outstanding.
    pub fn replace(&mut self, pool: RecvPool) {
        self.pool = pool;
    }
}

/// Encodes a message.
pub fn encode(message: &impl Serialize) -> CommandResult<Vec<u8>> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|e| CommandFailure::new(format!("cannot encode a message: {e}")))?;
    match bytes.len() <= MESSAGE_BYTES {
        true => Ok(bytes),
        false => Err(CommandFailure::new(format!(
            "a message of {} bytes exceeds the limit of {MESSAGE_BYTES}",
            bytes.len()
        ))),
    }
}

/// Decodes a message. Other bytes, or bytes after the message, are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> CommandResult<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(CommandFailure::new(
            "the other side uses another protocol; run the same multirail version and command there",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_exact() {
        let bytes = encode(&(7_u32, "name")).unwrap();
        assert_eq!(decode::<(u32, String)>(&bytes).unwrap(), (7, "name".to_owned()));
        assert!(decode::<(u32, String)>(&bytes[..3]).is_err());
        assert!(decode::<u8>(&bytes).is_err());
        assert!(encode(&vec![0_u8; MESSAGE_BYTES]).is_err());
    }
}
