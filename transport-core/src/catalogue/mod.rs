//! Regions by address: all regions of a program in one piece, for peers that name memory by address and length.
//!
//! [`address_index`] finds the region of an address. [`Catalogue`] is the owner's side, [`RemoteCatalogue`] the peer's,
//! and `wire` the bytes between them.

mod address_index;
mod local;
mod remote;
mod wire;

use address_index::AddressIndex;
pub use local::Catalogue;
pub use remote::RemoteCatalogue;
