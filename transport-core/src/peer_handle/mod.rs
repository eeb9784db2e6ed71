//! Peers that come back: a [`PeerHandle`] connects again to a peer whose connection was lost.
//!
//! A [`Peer`](crate::Peer) is one connection, and stays dead once it is dead. A handle gives the current one.
//! [`ReconnectPolicy`] says when the handle connects again. `reconnect_task` runs on the fabric's control thread: it
//! waits for the end of the connection, connects again where the [`AddressSource`] says, and imports again what [`named_regions`] knows by name.
//! [`RebindableTransfer`] is a prepared transfer that is made anew for each connection. `handle_state` is what all of
//! them share.

mod address_source;
mod handle;
mod handle_state;
mod named_regions;
mod rebindable_transfer;
mod reconnect_policy;
mod reconnect_task;

pub use address_source::AddressSource;
pub use handle::PeerHandle;
use handle_state::HandleState;
use named_regions::NamedRegions;
pub use rebindable_transfer::RebindableTransfer;
use reconnect_policy::ReconnectLimit;
pub use reconnect_policy::ReconnectPolicy;
use reconnect_task::ReconnectTask;
