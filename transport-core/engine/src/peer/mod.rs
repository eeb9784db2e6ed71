//! What an engine knows of each peer.
//!
//! In reading order: [`PeerState`] (what all engines share), [`PeerEvents`] (what they tell the peer's owner), [`Link`]
//! (the peer's rails, and the direct path past the worker), `LinkState` (the engine's own state of a link),
//! `EarlyEvents`, `UnconfirmedFailures`, `Fences` and `Comeback` (how a broken path is used again).

mod comeback;
mod early_events;
mod events;
mod fences;
#[allow(unsafe_code, reason = "runs checked requests in the calling thread")]
mod link;
mod link_counts;
mod link_state;
mod state;
mod unconfirmed_failures;

pub use crate::spi::FenceKind;
pub(super) use comeback::{Comeback, GOOD_PROBES, MAX_REFUSED_PROBES, PathProbe, PathProbes};
pub(super) use early_events::EarlyEvents;
pub use events::{PeerEvents, PeerIdentity};
pub use fences::FenceRequest;
pub(super) use fences::{Fence, Fences, LostArrivals};
pub use link::{CheckedRange, CountedRails, Link, PairedRail};
pub use link_counts::LinkCounts;
pub(super) use link_state::{ArrivalKind, BrokenPath, LinkState, SlotLink};
pub use state::PeerState;
pub use unconfirmed_failures::PeerProbe;
pub(super) use unconfirmed_failures::{UnconfirmedFailure, UnconfirmedFailures};
