//! The state of a peer slot, and what the endpoint reads of it.

use libfabric_sys::fi_addr_t;
use multirail_spi::{FenceKind, PeerSlot};

use crate::tag::PeerTag;

/// What a request to a connected peer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    pub address: fi_addr_t,
    /// The number of the libfabric endpoint to post to: the address is in its address vector, and the peer knows it.
    pub endpoint: u32,
    /// The peer tag that the peer has given this side. Each request carries it.
    pub peer_tag: PeerTag,
    pub empty_write_target: EmptyWriteTarget,
}

/// The remote address and key that a request without bytes names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct EmptyWriteTarget {
    pub base: u64,
    pub key: u64,
}

/// What a peer's offer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub address: Vec<u8>,
    /// A random number of the peer's process.
    pub process: u64,
    /// The peer tag that the peer has given this side.
    pub peer_tag: PeerTag,
    pub empty_write_target: EmptyWriteTarget,
}

/// What the endpoint reads of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum SlotView {
    /// The slot has no peer, or is offered to a peer that has not answered.
    #[default]
    Free,
    Up(Destination),
    /// The slot is connected, but the peer has confirmed only an endpoint that is closed by now. Nothing can be posted
    /// until the peer confirms the address of the next endpoint, which the engine sends.
    AwaitingConfirmation,
    /// This side has disconnected the slot. The endpoint reports when the slot's last request has ended.
    Leaving,
}

/// A slot whose peer has lost its device, or the path to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FencedSlot {
    pub slot: PeerSlot,
    /// Why the slot is fenced.
    pub kind: FenceKind,
    /// The newest libfabric endpoint that the peer may have sent to.
    pub last: u32,
    /// Whether no other endpoint can be opened, so that the old one stays.
    pub is_refused: bool,
}

#[derive(Debug, Default)]
pub(super) enum SlotState {
    #[default]
    Free,
    /// The slot is offered to a peer, with the address of the endpoint of this number.
    Offered(u32),
    Up(ConnectedPeer),
    /// This side has disconnected the slot. Its peer had this address, if it was connected.
    Leaving(Option<Vec<u8>>),
    /// The slot's last request has ended, and the endpoint reports `PeerGone`. The slot is free once the engine has
    /// acted on that event.
    Gone,
}

#[derive(Debug)]
pub(super) struct ConnectedPeer {
    pub(super) remote: RemoteAddress,
    /// The number of the endpoint that the peer knows.
    pub(super) endpoint: u32,
    /// The peer's address in that endpoint's address vector; `None` if the endpoint is closed.
    pub(super) address: Option<fi_addr_t>,
    /// The peer's address in the address vector of a newer endpoint, which the peer does not know yet.
    pub(super) next_address: Option<fi_addr_t>,
    /// How often the peer's address has changed.
    pub(super) relocations: u32,
}

impl SlotState {
    /// The address of the slot's peer, until its last request has ended.
    pub(super) fn address(&self) -> Option<&[u8]> {
        match self {
            Self::Up(peer) => Some(&peer.remote.address),
            Self::Leaving(address) => address.as_deref(),
            Self::Free | Self::Offered(_) | Self::Gone => None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    pub(super) fn view(&self) -> SlotView {
        match self {
            Self::Free | Self::Offered(_) | Self::Gone => SlotView::Free,
            Self::Leaving(_) => SlotView::Leaving,
            Self::Up(ConnectedPeer { address: None, .. }) => SlotView::AwaitingConfirmation,
            Self::Up(ConnectedPeer { remote, endpoint, address: Some(address), .. }) => {
                SlotView::Up(Destination {
                    address: *address,
                    endpoint: *endpoint,
                    peer_tag: remote.peer_tag,
                    empty_write_target: remote.empty_write_target,
                })
            }
        }
    }
}
