//! What a receiver allows a sender.

/// A grant as it crosses the wire. Imms and messages count from the beginning of the connection, so that a frame can
/// neither be counted twice nor add up wrongly.
#[derive(serde::Serialize, serde::Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Allowance {
    /// Bytes that may be posted and not acknowledged.
    pub bytes: u64,
    /// Requests with an imm, since the peer was connected.
    pub imms: u64,
    /// Messages, since the peer was connected.
    pub messages: u64,
}
