//! What an engine tells the owner of a peer.

use super::{FenceRequest, PeerProbe};
use crate::Error;
use crate::flow_control::WireGrant;
use crate::index::{GroupIndex, TransportIndex};
use crate::spi::PeerSlot;

/// The part of a peer that the engine does not know: how to tell the peer something, and how its connection ends. The
/// core implements it.
///
/// An engine calls it when a peer fails, when a grant is renewed, when an endpoint gets a new address, and for messages
/// that have changed their rail; otherwise never per request and never per arrival.
pub trait PeerEvents: Send + Sync {
    /// What the peer has told about itself, and the tenant that it belongs to.
    fn identity(&self) -> PeerIdentity<'_>;

    /// The peer failed. Does nothing if it is known to be gone already: the first reason stays.
    fn failed(&self, error: Error);

    /// The peer may send this over a transport from now on. Called in the order in which the grants are made.
    fn grant_renewed(&self, transport: TransportIndex, grant: WireGrant);

    /// The endpoint of rail `rail` of the link over `group` may have a new address, which the peer has to learn.
    fn endpoint_changed(&self, group: GroupIndex, rail: usize);

    /// Asks the peer over the control connection whether it is alive. Drops `probe` once it has answered, or once the
    /// connection has ended.
    fn probe_wanted(&self, probe: PeerProbe);

    /// Tells the peer how many messages this side has posted to `slot` of rail `rail` of the link over `group`, since the
    /// peer was connected. Called only for messages that have changed their rail.
    fn messages_posted(&self, group: GroupIndex, rail: usize, slot: PeerSlot, count: u64);

    /// Asks the peer to fence the pair of a rail of the link over `group`. Answers or drops `request` once the peer has
    /// answered, or once the connection has ended.
    fn fence_wanted(&self, group: GroupIndex, request: FenceRequest);
}

/// What dumps and grant policies tell of a peer.
#[derive(Debug, Clone, Copy)]
pub struct PeerIdentity<'a> {
    /// The peer's host name, as the peer reports it.
    pub host: &'a str,
    /// Our tenant that the peer belongs to. Empty for the fabric itself.
    pub tenant: &'a str,
    /// The incarnation of the peer's fabric.
    pub incarnation: u64,
    /// The address that the control connection leads to.
    pub address: Option<&'a str>,
}
