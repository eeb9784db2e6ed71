//! The protocol of `multirail send` and `multirail serve`: pure values and their
//! decoders. It is no part of the API; the command, its tests and fuzzers share it.
//!
//! After the server's [`ToSender::Welcome`] and the sender's [`ToServer::Hello`],
//! entries (files, directories, links) go in *groups*: the sender offers a table of
//! entries, the server gives a verdict on each, the sender fills *windows* with items
//! and their bytes, the server frees windows, and a commit makes the group durable.
//!
//! The sender writes window `sequence % windows` of the server's region, says `Filled`
//! (or `Offer`), and may write it again once the server said `Free`. Messages may
//! overtake each other; sequence numbers put them in order.
//!
//! - [`TreePath`], [`check_link`]: names that stay inside.
//! - [`Entry`], [`Item`]: what tables in windows hold; [`decode_entries`], [`decode_items`].
//! - [`ToServer`], [`ToSender`]: messages.
//! - [`Piece`], [`PieceHash`], [`FileHash`]: bytes of large files and their checksums.

mod layout;
mod message;
mod path;
mod piece;
mod table;

pub use layout::Layout;
pub use message::{
    EntryAction, MAX_ACTIONS, MAX_HAVE_PIECES, MESSAGE_BYTES, PROTOCOL, ToSender, ToServer, VERSION,
};
pub use path::{STAGING, TreePath, check_link};
pub use piece::{CHUNK, FileHash, Piece, PieceHash, next_piece};
pub use table::{Entry, Item, Kind, Mtime, decode_entries, decode_items, encode};
