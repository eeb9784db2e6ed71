//! A peer's slot: whose it is, and where that peer is.

use libfabric_sys::fi_addr_t;

use crate::tag::PeerTag;

/// A connected peer, as requests need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub address: fi_addr_t,
    /// The endpoint in whose address vector that is: the one by which the peer knows us.
    pub endpoint: u32,
    /// Ours there, which goes with all that we send.
    pub peer_tag: PeerTag,
    /// Where writes without bytes go.
    pub landing: Landing,
}

/// A registered place for writes without bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Landing {
    pub base: u64,
    pub key: u64,
}

/// Where a peer is, by its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub address: Vec<u8>,
    /// The number of its process.
    pub process: u64,
    /// Ours there.
    pub peer_tag: PeerTag,
    pub landing: Landing,
}

/// A slot as the endpoint sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum View {
    /// Nobody's, or offered to a peer that has not answered.
    #[default]
    Free,
    Up(Remote),
    /// Connected, but the peer knows only an endpoint that is closed: it has been told of the next.
    Waiting,
    /// Ended by this side: the endpoint says when its last request is over.
    Leaving,
}

#[derive(Debug, Default)]
pub(super) enum Slot {
    #[default]
    Free,
    /// To a peer that was told of this endpoint.
    Offered(u32),
    Up(Known),
    /// Was the peer's of that address, if any.
    Leaving(Option<Vec<u8>>),
    /// Its last request is over, which the endpoint is telling: free once that was heard.
    Gone,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) there: RemoteAddress,
    /// The endpoint that the peer knows.
    pub(super) endpoint: u32,
    /// Its address there, unless that endpoint is closed.
    pub(super) address: Option<fi_addr_t>,
    /// Its address in a newer endpoint, that it does not know yet.
    pub(super) ahead: Option<fi_addr_t>,
    /// How often it has moved.
    pub(super) moves: u32,
}

impl Slot {
    /// Where its peer is, or was while it ends.
    pub(super) fn address(&self) -> Option<&[u8]> {
        match self {
            Self::Up(known) => Some(&known.there.address),
            Self::Leaving(address) => address.as_deref(),
            Self::Free | Self::Offered(_) | Self::Gone => None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self, Self::Up(_))
    }

    pub(super) fn view(&self) -> View {
        match self {
            Self::Free | Self::Offered(_) | Self::Gone => View::Free,
            Self::Leaving(_) => View::Leaving,
            Self::Up(Known { address: None, .. }) => View::Waiting,
            Self::Up(Known { there, endpoint, address: Some(address), .. }) => View::Up(Remote {
                address: *address,
                endpoint: *endpoint,
                peer_tag: there.peer_tag,
                landing: there.landing,
            }),
        }
    }
}
