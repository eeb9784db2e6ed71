//! An opened device: memory registration and connecting, off the posting thread.

use std::any::Any;
use std::sync::Arc;
use std::task::Poll;

use crate::{Access, Error, ErrorKind, Memory, Result};
use crate::{Capabilities, Endpoint, EndpointConfig, PeerSlot, WorkRequest};

/// An opened device. Everything here may be called while traffic flows.
pub trait Domain: Send + Sync {
    /// Facts and limits; they do not change while the domain is open.
    fn capabilities(&self) -> &Capabilities;

    /// A number no other domain of this host has, now or later.
    fn id(&self) -> u64;

    /// Registers `memory` so that the device, and peers as `access` allows, may touch it.
    ///
    /// # Safety
    /// The bytes may change under the owner's eyes until the region is dropped
    /// and quiet: the caller holds no reference into them.
    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>>;

    /// Makes a peer's key usable here. May ask the peer's process for a mapping,
    /// within `limit`; a malformed key is an error, a revoked one may be found out later.
    fn import(
        &self,
        peer: PeerSlot,
        key: &KeyMaterial,
        limit: std::time::Duration,
    ) -> Result<Arc<dyn RemoteMemory>>;

    /// The control object for connecting.
    fn connector(&self) -> &dyn Connector;

    /// Opens the domain's endpoint. One thread owns it from then on. A second
    /// call is an error of kind `Busy` unless the first endpoint was dropped.
    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>>;

    /// Endpoints that were dropped and are not closed: the device's library does not come to an end with them. The
    /// backend keeps all that they may still touch, and goes on closing them where that can end.
    fn unclosed(&self) -> usize {
        0
    }

    /// A way to run small requests to `peer` in the calling thread, where there is one.
    fn direct(&self, peer: PeerSlot) -> Option<Arc<dyn Direct>> {
        let _ = peer;
        None
    }
}

/// Connecting in two steps, apart from the posting thread.
pub trait Connector: Send + Sync {
    /// Reserves a peer slot and says how the peer can reach it.
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)>;

    /// As [`Connector::prepare`], for a peer in this process: what only others need may be
    /// left out.
    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare()
    }

    /// Brings the slot up with the peer's offer, bytes that are not trusted.
    /// `Unreachable` says why this domain cannot reach that peer.
    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()>;

    /// What the peer of a connected slot is to be told, where the endpoint has moved since it was
    /// told last; `None` where it knows all.
    fn offer_again(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        let _ = slot;
        Ok(None)
    }

    /// The peer's endpoint has moved: its new offer, bytes that are not trusted. What is under way
    /// may still come from where it was. Gives what the peer is answered.
    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        let _ = (slot, offer);
        Err(Error::new(ErrorKind::Protocol, "renew a connection", "this backend's endpoints do not move"))
    }

    /// The peer has taken our new offer, and answered, with bytes that are not trusted.
    fn renewed(&self, slot: PeerSlot, answer: &[u8]) -> Result<()> {
        self.renew(slot, answer).map(drop)
    }

    /// Tears the connection down. The endpoint reports [`crate::Event::PeerGone`]
    /// after the last flush; the slot is reused only once that was heard, which it has been by the poll
    /// that follows.
    fn disconnect(&self, slot: PeerSlot);
}

/// What a peer needs to address a region, in a backend's own numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct KeyMaterial {
    /// Address of the first byte as the wire wants it; 0 for offset addressing.
    pub base: u64,
    /// The key.
    pub key: u64,
    /// Length of the region in bytes.
    pub len: u64,
}

impl KeyMaterial {
    /// The bit of `base` that says that the region is staged: no address of a process has it, and no offset. What
    /// reads such a key is the domain that [stages](Capabilities::stages), nobody else.
    pub const STAGED: u64 = 1 << 63;

    /// Whether the region is staged.
    pub fn is_staged(&self) -> bool {
        self.base & Self::STAGED != 0
    }
}

/// A registration. Dropping it deregisters, after work in flight has ended.
pub trait MemoryRegion: Send + Sync {
    /// The local key that work requests carry.
    fn lkey(&self) -> u64;

    /// What a peer needs.
    fn key(&self) -> KeyMaterial;

    /// What carries bytes to it and from it where the device does not by itself, and why, in a few words for people.
    fn detour(&self) -> Option<&str> {
        None
    }

    /// Starts taking the peers' key back, and says whether it is done: once `Ready`, no
    /// peer's byte can land any more. Call again until then; never blocks.
    ///
    /// An error says that the device did not take the key back: peers may still use it. The next call tries again.
    fn revoke(&self) -> Poll<Result<()>>;

    /// Whether requests and receives of this side may still name [`MemoryRegion::lkey`] once `revoke` was called.
    /// Where they may not, the engine calls it only when none is under way that does, and posts none after it.
    fn lkey_outlives_revoke(&self) -> bool {
        false
    }
}

/// A peer's region, usable from here.
pub trait RemoteMemory: Send + Sync + Any {
    /// The key that work requests carry, valid while this value lives.
    fn rkey(&self) -> u64;

    /// The address that work requests add their offset to.
    fn base(&self) -> u64;

    /// Makes ready what the first request to it would have to, in the calling thread. A
    /// hint: it cannot fail. Nothing by default.
    fn warm_up(&self) {}

    /// What carries bytes to it, in a few words for people.
    fn path(&self) -> &'static str {
        "the device"
    }
}

/// Runs one small request at once, in the calling thread.
///
/// It makes the same checks of key, bounds, revocation and peer as a posted one.
pub trait Direct: Send + Sync {
    /// Runs `request`; `None` if it must be posted instead (lane full, too large).
    ///
    /// # Safety
    /// As [`Endpoint::post`]: the local span is valid for the call, and `remote`
    /// is the import that `request.rkey` came from.
    unsafe fn run(&self, request: &WorkRequest, remote: Option<&dyn RemoteMemory>) -> Option<Result<()>>;

    /// As [`Direct::run`], for a local span that the processor cannot follow the address of: that of a GPU.
    /// `request.lkey` is a number of its region, which no other one of the fabric ever has.
    ///
    /// # Safety
    /// As [`Direct::run`].
    unsafe fn run_far(&self, request: &WorkRequest, remote: &dyn RemoteMemory) -> Option<Result<()>> {
        let _ = (request, remote);
        None
    }

    /// Why requests of `len` bytes to that region are never run here, in a few words for people; `None`
    /// if they may be. `far` says that the processor cannot follow the address of the local span.
    fn declines(&self, remote: &dyn RemoteMemory, far: bool, len: u64) -> Option<&'static str> {
        let _ = (remote, far, len);
        None
    }
}
