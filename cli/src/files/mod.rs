//! The protocol of `multirail send` and `multirail serve`: plain values and their
//! decoders. It is not part of the API. The command, its tests and fuzzers share it.
//!
//! After the server's [`ReceiverMessage::Welcome`] and the sender's [`SenderMessage::Hello`],
//! entries (files, directories, links) are sent in *groups*. The sender offers a table of
//! entries, and the server answers with an action for each. The sender fills *windows* with
//! items and their bytes, and the server frees windows. A commit makes the group durable.
//!
//! The sender writes window `sequence % windows` of the server's region and sends `Filled`
//! (or `Offer`). It may write the window again after the server's `Free`. Messages may
//! overtake each other; sequence numbers give their order.
//!
//! - [`TreePath`], [`check_link`]: names and links that stay inside a directory.
//! - [`OfferedEntry`], [`TableItem`]: the content of tables in windows; [`decode_entries`], [`decode_items`].
//! - [`SenderMessage`], [`ReceiverMessage`]: messages.
//! - [`FilePiece`], [`PieceHash`], [`FileHash`]: pieces of large files and their checksums.

mod layout;
mod message;
mod path;
mod piece;
mod table;

pub use layout::WindowLayout;
pub use message::{
    EntryAction, MAX_ACTIONS, MAX_HAVE_PIECES, MESSAGE_BYTES, PROTOCOL, ReceiverMessage, SenderMessage,
    VERSION,
};
pub use path::{STAGING, TreePath, check_link};
pub use piece::{CHUNK, FileHash, FilePiece, PieceHash, next_piece};
pub use table::{EntryKind, Mtime, OfferedEntry, TableItem, decode_entries, decode_items, encode};
