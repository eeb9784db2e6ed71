//! The messages between sender and server.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{FilePiece, WindowLayout};

/// The start of a server's first message, by which a sender recognises a server.
pub const PROTOCOL: [u8; 8] = *b"mr-files";

/// The protocol version. Every change of messages, tables or hashes increases it.
pub const VERSION: u16 = 3;

/// The longest message. It is many times larger than a descriptor with many transports.
pub const MESSAGE_BYTES: usize = 16 << 10;

/// The maximum number of actions in a message.
pub const MAX_ACTIONS: usize = 128;

/// The maximum number of pieces in a [`ReceiverMessage::Have`].
pub const MAX_HAVE_PIECES: usize = 64;

/// A message from the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SenderMessage {
    /// The first message.
    Hello {
        /// The bytes of all files, without holes.
        total: u64,
        /// True if the server uses what an earlier attempt stored.
        resume: bool,
    },
    /// The table of a window has the entries of the next group.
    Offer {
        /// The window, counted from 0 in the session.
        sequence: u64,
        /// The bytes of the table.
        table: u32,
    },
    /// Asks which pieces of a partial file the server has. The response is [`ReceiverMessage::Have`].
    Resume {
        /// The index in the group's entries.
        index: u32,
        /// The first requested piece.
        first: u64,
    },
    /// A window has items and their bytes.
    Filled {
        /// The window.
        sequence: u64,
        /// The bytes of the table.
        table: u32,
        /// The bytes of files.
        data: u32,
    },
    /// The group is complete. The response is [`ReceiverMessage::Stored`].
    Commit {
        /// The next window. All windows before it belong to the group.
        next: u64,
        /// The number of complete entries of the group. The sender offers the others again, because the first of them
        /// changed. That one may have begun.
        entries: u32,
    },
    /// The sender gives up for this reason.
    Abandon(String),
    /// No more groups.
    Bye,
    /// The sender is alive: it reads or compares files.
    Working,
}

/// What the sender has to do with an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryAction {
    /// Send the entry.
    Send,
    /// Do not send the entry: the server keeps another file with its name.
    Skip,
    /// Do not send the entry: the server has it already.
    Have,
    /// The server has a file of the same size. If its content differs, skip the entry or send it. The server may have a
    /// part of it: ask with [`SenderMessage::Resume`].
    Compare {
        /// The digest of the server's file.
        digest: [u8; 32],
        /// True to skip the entry if the digests differ.
        skip: bool,
    },
    /// The server has a part of the file: ask with [`SenderMessage::Resume`].
    Partial,
}

/// A message from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReceiverMessage {
    /// The first message.
    Welcome {
        /// [`PROTOCOL`].
        protocol: [u8; 8],
        /// [`VERSION`].
        version: u16,
        /// The layout of the region.
        layout: WindowLayout,
        /// The region's descriptor.
        region: Vec<u8>,
        /// The silence in milliseconds after which the server drops a sender that it waits for.
        silence_ms: u64,
    },
    /// The response to `Hello`: the sender may begin.
    Ready,
    /// The response to `Offer`, in several messages.
    Actions {
        /// The entry of the first action.
        first: u32,
        /// At most [`MAX_ACTIONS`].
        actions: Vec<EntryAction>,
    },
    /// The response to `Resume`.
    Have {
        /// At most [`MAX_HAVE_PIECES`], in ascending order.
        pieces: Vec<FilePiece>,
        /// True if these are the last pieces.
        last: bool,
        /// The bytes of all pieces, including those not listed.
        bytes: u64,
    },
    /// The sender may write this window again.
    Free {
        /// The sequence number of the `Filled` or `Offer`.
        sequence: u64,
    },
    /// The group is durable under its final names.
    Stored,
    /// The server refuses for this reason, and the session ends.
    Refused(String),
    /// The response to `Bye`.
    Farewell,
}

impl SenderMessage {
    /// Parses a message from the wire.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        decode(bytes)
    }
}

impl ReceiverMessage {
    /// Parses a message from the wire.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        match decode(bytes)? {
            Self::Actions { actions, .. } if actions.len() > MAX_ACTIONS => Err(other_protocol()),
            Self::Have { pieces, .. } if pieces.len() > MAX_HAVE_PIECES => Err(other_protocol()),
            message => Ok(message),
        }
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) if bytes.len() <= MESSAGE_BYTES => Ok(message),
        _ => Err(other_protocol()),
    }
}

fn other_protocol() -> String {
    "the other side uses another protocol; run the same multirail version and command there".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_exact() {
        let message = SenderMessage::Abandon("why".to_owned());
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert_eq!(SenderMessage::decode(&bytes), Ok(message));
        assert!(SenderMessage::decode(&bytes[..2]).is_err());
        assert!(SenderMessage::decode(&[&bytes[..], &[0]].concat()).is_err());
        assert!(SenderMessage::decode(&[77]).is_err());
        let most = |count| {
            let message = ReceiverMessage::Actions { first: 0, actions: vec![EntryAction::Send; count] };
            ReceiverMessage::decode(&postcard::to_stdvec(&message).unwrap())
        };
        assert!(most(MAX_ACTIONS).is_ok() && most(MAX_ACTIONS + 1).is_err());
        let digest = EntryAction::Compare { digest: [255; 32], skip: true };
        let full = ReceiverMessage::Actions { first: u32::MAX, actions: vec![digest; MAX_ACTIONS] };
        assert!(postcard::to_stdvec(&full).unwrap().len() <= MESSAGE_BYTES);
        let piece = FilePiece { offset: u64::MAX, len: u32::MAX, hash: [255; 32] };
        let full =
            ReceiverMessage::Have { pieces: vec![piece; MAX_HAVE_PIECES], last: true, bytes: u64::MAX };
        assert!(postcard::to_stdvec(&full).unwrap().len() <= MESSAGE_BYTES);
    }
}
