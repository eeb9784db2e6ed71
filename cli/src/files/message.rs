//! What sender and server say to each other.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Layout, Piece};

/// First words of a server, so that a sender knows whom it reached.
pub const PROTOCOL: [u8; 8] = *b"mr-files";

/// Raised with every change of messages, tables or hashes.
pub const VERSION: u16 = 3;

/// Longest message: a descriptor with many transports fits many times over.
pub const MESSAGE_BYTES: usize = 16 << 10;

/// Most verdicts in a message.
pub const MAX_ACTIONS: usize = 128;

/// Most pieces in a [`ToSender::Have`].
pub const MAX_HAVE_PIECES: usize = 64;

/// From the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServer {
    /// First message.
    Hello {
        /// Bytes of all files that are no hole.
        total: u64,
        /// Whether what an earlier attempt stored is to be used.
        resume: bool,
    },
    /// A window's table holds the entries of the next group.
    Offer {
        /// The window, counted from 0 in the conversation.
        sequence: u64,
        /// Bytes of the table.
        table: u32,
    },
    /// Which pieces of a partial file are there? Answered by [`ToSender::Have`].
    Resume {
        /// Of the group's entries.
        index: u32,
        /// The first piece that is wanted.
        first: u64,
    },
    /// A window holds items and their bytes.
    Filled {
        /// The window.
        sequence: u64,
        /// Bytes of the table.
        table: u32,
        /// Bytes of files.
        data: u32,
    },
    /// The group is complete. Answered by [`ToSender::Stored`].
    Commit {
        /// The next window: all before it belong to the group.
        next: u64,
        /// So many of the group's entries are done. The others are offered again, since the
        /// first of them changed; it may have begun.
        entries: u32,
    },
    /// The rest will not come, because of this.
    Abandon(String),
    /// No more groups.
    Bye,
    /// The sender reads or compares files, and has nothing else to say for now.
    Working,
}

/// What the server wants with an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryAction {
    /// Send it.
    Send,
    /// Do not: something of that name exists and stays.
    Skip,
    /// Do not: it is here already.
    Have,
    /// A file of that size is here. If it has another content, skip or send yours; of that,
    /// a part may be here too: ask for it by [`ToServer::Resume`].
    Compare {
        /// Its content digest.
        digest: [u8; 32],
        /// What to do if it differs.
        skip: bool,
    },
    /// A part is here: ask for it by [`ToServer::Resume`].
    Partial,
}

/// From the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSender {
    /// First message.
    Welcome {
        /// [`PROTOCOL`].
        protocol: [u8; 8],
        /// [`VERSION`].
        version: u16,
        /// How the region is divided.
        layout: Layout,
        /// The region's descriptor.
        region: Vec<u8>,
        /// The server drops a sender that it waits for and that says nothing for so long, in
        /// milliseconds.
        silence_ms: u64,
    },
    /// The answer to `Hello`: begin.
    Ready,
    /// The answer to `Offer`, in several messages.
    Actions {
        /// Which entry the first is about.
        first: u32,
        /// At most [`VERDICTS`].
        actions: Vec<EntryAction>,
    },
    /// The answer to `Resume`.
    Have {
        /// At most [`HAVE_PIECES`], ascending.
        pieces: Vec<Piece>,
        /// Whether these are the last.
        last: bool,
        /// Bytes of all pieces, also of those that are not listed.
        bytes: u64,
    },
    /// This window may be written again.
    Free {
        /// The `Filled` or `Offer` it answers.
        sequence: u64,
    },
    /// The group is durable under its final names.
    Stored,
    /// It cannot be done, and the conversation ends.
    Refused(String),
    /// The answer to `Bye`.
    Farewell,
}

impl ToServer {
    /// Parses a message from the wire.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        decode(bytes)
    }
}

impl ToSender {
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
    "the other side speaks another protocol; run the same multirail version and command there".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_exact() {
        let message = ToServer::Abandon("why".to_owned());
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert_eq!(ToServer::decode(&bytes), Ok(message));
        assert!(ToServer::decode(&bytes[..2]).is_err());
        assert!(ToServer::decode(&[&bytes[..], &[0]].concat()).is_err());
        assert!(ToServer::decode(&[77]).is_err());
        let most = |count| {
            let message = ToSender::Actions { first: 0, actions: vec![EntryAction::Send; count] };
            ToSender::decode(&postcard::to_stdvec(&message).unwrap())
        };
        assert!(most(MAX_ACTIONS).is_ok() && most(MAX_ACTIONS + 1).is_err());
        let digest = EntryAction::Compare { digest: [255; 32], skip: true };
        let full = ToSender::Actions { first: u32::MAX, actions: vec![digest; MAX_ACTIONS] };
        assert!(postcard::to_stdvec(&full).unwrap().len() <= MESSAGE_BYTES);
        let piece = Piece { offset: u64::MAX, len: u32::MAX, hash: [255; 32] };
        let full = ToSender::Have { pieces: vec![piece; MAX_HAVE_PIECES], last: true, bytes: u64::MAX };
        assert!(postcard::to_stdvec(&full).unwrap().len() <= MESSAGE_BYTES);
    }
}
