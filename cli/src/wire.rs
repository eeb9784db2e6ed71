//! Small messages between two commands: postcard over SEND and pre-posted receives.

use std::time::Duration;

use multirail::{Access, Fabric, Peer, RecvPool, Region, wait};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::until_closed;
use crate::failure::{CommandResult, Failure};

/// Largest message: a descriptor with many transports fits many times over.
pub const MESSAGE_BYTES: usize = 16 << 10;

/// Receives kept posted; no conversation has that many messages under way.
pub const RECEIVES: usize = 32;

/// How long an answer may take that needs no work on the other side.
pub const RESPONSE_LIMIT: Duration = Duration::from_secs(20);

/// Says messages to one peer.
pub struct MessageSender {
    peer: Peer,
    buffer: Region,
}

impl MessageSender {
    /// An outbox to `peer`, with its own registered buffer.
    pub fn new(fabric: &Fabric, peer: &Peer) -> CommandResult<Self> {
        Ok(Self { peer: peer.clone(), buffer: fabric.alloc(MESSAGE_BYTES, Access::LOCAL)? })
    }

    /// Sends `message` and waits until it has been taken.
    pub fn send(&mut self, message: &impl Serialize) -> CommandResult {
        let bytes = encode(message)?;
        self.buffer.copy_in(0, &bytes)?;
        self.peer.send(&self.buffer, 0..bytes.len())?.wait(RESPONSE_LIMIT)?;
        Ok(())
    }
}

/// Hears messages on a fabric that has one peer.
pub struct MessageReceiver {
    peer: Peer,
    pool: RecvPool,
}

impl MessageReceiver {
    /// An inbox for `peer`, out of the fabric's receives.
    pub fn new(pool: RecvPool, peer: &Peer) -> Self {
        Self { peer: peer.clone(), pool }
    }

    /// The next message, at most `limit` from now.
    pub fn receive<T: DeserializeOwned>(&mut self, limit: Duration) -> CommandResult<T> {
        decode(&self.next(limit)?.to_vec())
    }

    /// The next message as it came.
    pub fn next(&mut self, limit: Duration) -> CommandResult<multirail::Message> {
        match wait(until_closed(&self.peer, self.pool.next()), limit) {
            Ok(message) => Ok(message?),
            Err(_) => Err(Failure::new(format!(
                "the other side is connected but said nothing for {} s; restart it",
                limit.as_secs()
            ))),
        }
    }

    /// Replaces the receives, when nothing is under way.
    pub fn replace(&mut self, pool: RecvPool) {
        self.pool = pool;
    }
}

/// A message of ours as bytes.
pub fn encode(message: &impl Serialize) -> CommandResult<Vec<u8>> {
    let bytes =
        postcard::to_stdvec(message).map_err(|e| Failure::new(format!("cannot encode a message: {e}")))?;
    match bytes.len() <= MESSAGE_BYTES {
        true => Ok(bytes),
        false => Err(Failure::new(format!(
            "a message of {} bytes is over the limit of {MESSAGE_BYTES}",
            bytes.len()
        ))),
    }
}

/// Parses a message of ours; anything else, or anything after it, is refused.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> CommandResult<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(Failure::new(
            "the other side speaks another protocol; run the same multirail version and command there",
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
