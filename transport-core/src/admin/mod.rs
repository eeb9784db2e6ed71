//! The admin socket of a fabric: other programs of the same user look at its rails, and take devices out of service and
//! back while it runs. [`FabricBuilder::admin_socket`](crate::FabricBuilder::admin_socket) opens it.
//!
//! It is a Unix stream socket with the file mode 0600. A client sends an [`AdminRequest`] as one line of JSON, and gets
//! an [`AdminResponse`] as one line:
//!
//! ```text
//! {"request":"rails"}
//! {"response":"rails","rails":[{"state":"in_service","transport":"cards","device":"rdmap79s0","posts":12, ...}]}
//! {"request":"drain","device":"rdmap79s0"}
//! {"response":"done"}
//! {"request":"dump"}
//! {"response":"dump","omitted_operations":0,"omitted_peers":0,"dump":{"host":"node7","peers":[...], ...}}
//! {"request":"restore","device":"nonsense"}
//! {"response":"error","kind":"InvalidRequest","error":"restore_device: ..."}
//! ```
//!
//! A request of one client waits for the answer to the one before it; requests of several clients do not wait for each
//! other. A line that is no request gets an error. After a line of more than [`MAX_LINE`] bytes, after a minute of
//! silence, and if the client does not read its answer, the connection ends. The fabric serves eight clients at once.
//! Its control thread does all of this, without waiting for a client; a helper thread takes the dumps.

mod json;
mod json_writer;
mod message;
#[cfg(unix)]
mod socket_file;

pub use message::{AdminRequest, AdminResponse, MAX_LINE, MAX_OPERATIONS, MAX_PEERS, RailState, RailStatus};
#[cfg(unix)]
pub(crate) use socket_file::SocketFile;
