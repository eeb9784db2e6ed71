//! What the two sides of a bench say to each other.

use serde::{Deserialize, Serialize};

use super::load::Load;

/// First words of a server, so that a client knows whom it reached.
pub const PROTOCOL: [u8; 8] = *b"mr-bench";

/// Raised with every change of messages or content.
pub const VERSION: u16 = 3;

/// Name of the region the server publishes.
pub const REGION: &str = "bench";

/// In the imm of a measured message: compare its bytes. The bits below are the
/// place in the order of pages. Messages of the protocol carry no imm.
pub const COMPARE: u32 = 1 << 31;

/// From the client.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToServer {
    /// Make a region ready for this.
    Prepare(Load),
    /// Compare what arrived; `operations` were done since `Prepare`.
    Check {
        /// Operations done since `Prepare`.
        operations: u64,
    },
    /// Overwrite the region.
    Overwrite,
    /// That was all.
    Bye,
}

/// From the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToClient {
    /// First message.
    Hello {
        /// [`PROTOCOL`].
        protocol: [u8; 8],
        /// [`VERSION`].
        version: u16,
    },
    /// Prepared, or scrubbed.
    Ready,
    /// Compared: what was wrong, if anything.
    Checked(Result<(), String>),
    /// It cannot be done.
    Refused(String),
    /// Goodbye.
    Bye,
}
