//! The counts of the operations with each peer.

use crate::Peer;

/// A snapshot of the operations with one connected peer that the workers have ended. What the submitting thread carries out
/// itself is not among them, nor is what the peer does on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCounters {
    /// The peer's number in this fabric.
    pub peer: u64,
    /// The peer's host name, as the peer reports it.
    pub host: String,
    /// The remote address of the control connection. `None` if there is no control connection.
    pub address: Option<String>,
    /// Operations that succeeded. One that several rail groups share counts once for each of them.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Operations that failed.
    pub errors: u64,
}

impl PeerCounters {
    pub(super) fn of(peer: &Peer) -> Self {
        let name = peer.0.name();
        let counts =
            peer.0.links.iter().filter(|link| !link.engine.for_notifications).map(|link| link.counts.read());
        let [operations, bytes, errors] =
            counts.fold([0; 3], |sum, counts| std::array::from_fn(|at| sum[at] + counts[at]));
        Self { peer: name.id, host: name.host, address: name.address, operations, bytes, errors }
    }
}
