//! The messages between the two sides of a bench.

use serde::{Deserialize, Serialize};

use super::load::BenchLoad;

/// The start of a server's first message, by which a client recognises a bench server.
pub const PROTOCOL: [u8; 8] = *b"mr-bench";

/// The protocol version. Every change of messages or content increases it.
pub const VERSION: u16 = 4;

/// The name under which the server publishes its region of this number.
pub fn region_name(number: usize) -> String {
    format!("bench-{number}")
}

/// The flag in the imm of a measured message that asks the server to compare its bytes. The other bits are the index in
/// the page order. Messages of the protocol have no imm.
pub const COMPARE: u32 = 1 << 31;

/// A message from the client.
#[derive(Debug, Serialize, Deserialize)]
pub enum ClientMessage {
    /// Prepare the regions for this load.
    Prepare(BenchLoad),
    /// Compare the received bytes.
    Check {
        /// The number of operations since `Prepare`.
        operations: u64,
    },
    /// Overwrite the regions.
    Overwrite,
    /// The client has finished.
    Bye,
}

/// A message from the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerMessage {
    /// The first message.
    Hello {
        /// [`PROTOCOL`].
        protocol: [u8; 8],
        /// [`VERSION`].
        version: u16,
    },
    /// The regions are prepared or overwritten.
    Ready,
    /// The result of the comparison.
    Checked(Result<(), String>),
    /// The server refuses for this reason.
    Refused(String),
    /// The response to the client's `Bye`.
    Bye,
}
